"""Checkpoints of a real training, read and written by Python with nothing but json, struct and torch.frombuffer."""

import json
import os

from support import BIN, TRAIN, ProgramTest, environment, main, python_with_torch, read_safetensors, run, write_safetensors
from torch_python import in_torch_python

COPY = os.path.join(BIN, "copy_checkpoint")
ONE_THREAD = environment(OMP_NUM_THREADS="1")  # more only wait for each other in so small a training

# Every dtype that the format and torch share, with values that show a wrong byte order, size or sign.
WRITE = """
import json, struct, sys, torch
names = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
         "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64}
header, data = {"__metadata__": {"written by": "Python \\u00e9"}}, b""
for name, dtype in names.items():
    tensor = (torch.arange(6, dtype=torch.float64).reshape(2, 3) * 17 - 40).abs().to(dtype)
    if dtype.is_floating_point or dtype.is_complex: tensor = -tensor / 3
    for kind, value in (("matrix", tensor), ("scalar", tensor[1, 2]), ("empty", tensor[:0])):
        content = bytes(value.contiguous().view(-1).view(torch.uint8).tolist()) if value.numel() else b""
        header[f"{name} {kind}"] = {"dtype": name, "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
text = json.dumps(header).encode()
open(sys.argv[1], "wb").write(struct.pack("<Q", len(text)) + text + data)
"""

COMPARE = """
import json, struct, sys, torch
def read(path):
    content = open(path, "rb").read()
    length, = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + length])
    return header, content[8 + length:]
(first, a), (second, b) = read(sys.argv[1]), read(sys.argv[2])
assert first.pop("__metadata__") == second.pop("__metadata__")
assert list(first) == list(second), (list(first), list(second))
names = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
         "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64}
for name in first:
    values = []
    for entry, data in ((first[name], a), (second[name], b)):
        begin, end = entry["data_offsets"]
        piece = bytearray(data[begin:end])
        tensor = torch.frombuffer(piece, dtype=names[entry["dtype"]]) if piece else torch.empty(0, dtype=names[entry["dtype"]])
        values.append(tensor.reshape(entry["shape"]))
    assert values[0].dtype == values[1].dtype and torch.equal(*values), name
print(len(first))
"""

# The network of the example, in PyTorch's words: loading with strict=True checks every name and shape.
EVALUATE = """
import json, struct, sys, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                                      nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10))
    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))
content = open(sys.argv[1], "rb").read()
length, = struct.unpack("<Q", content[:8])
header, data, state = json.loads(content[8:8 + length]), bytearray(content[8 + length:]), {}
dtypes = {"F32": torch.float32, "I64": torch.int64}
for name, entry in header.items():
    if name.startswith("model."):
        dtype, (begin, end) = dtypes[entry["dtype"]], entry["data_offsets"]
        values = torch.frombuffer(data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=begin)
        state[name[6:]] = values.reshape(entry["shape"])
net = Net()
net.load_state_dict(state, strict=True)
net.eval()
raw = bytearray(open(sys.argv[2] + "/t10k-images-idx3-ubyte", "rb").read()[16:])
labels = bytearray(open(sys.argv[2] + "/t10k-labels-idx1-ubyte", "rb").read()[8:])
images = (torch.frombuffer(raw, dtype=torch.uint8).reshape(-1, 1, 28, 28).float() / 255 - 0.2860) / 0.3530
with torch.no_grad():
    right = net(images).argmax(1).eq(torch.frombuffer(labels, dtype=torch.uint8).long()).sum().item()
print(json.dumps({"right": right, "steps": int(state["features.1.num_batches_tracked"]), "metadata": header["__metadata__"]}))
"""


class CheckpointPython(ProgramTest):
    def setUp(self):
        super().setUp()
        self.python = python_with_torch()

    def need_torch(self):
        if self.python is None:
            self.skipTest("no Python with torch")

    def in_python(self, script, *arguments):
        return in_torch_python(self.python, script, *arguments, cwd=self.folder)

    def test_every_dtype_from_python_and_back(self):
        self.need_torch()
        first, second = (os.path.join(self.folder, name) for name in ("first.safetensors", "second.safetensors"))
        self.in_python(WRITE, first)
        run(COPY, first, second)
        self.assertEqual(self.in_python(COMPARE, first, second), "33\n")

    def test_pytorch_finds_the_same_accuracy_with_the_trained_model(self):
        self.need_torch()
        figures = self.figures(name="out", env=ONE_THREAD)
        checkpoint = os.path.join(self.folder, "run_out", "checkpoint.safetensors")
        found = json.loads(self.in_python(EVALUATE, checkpoint, self.data))
        self.assertEqual(found["right"], round(figures["test_accuracy"] * 99))
        self.assertEqual(found["steps"], 64)  # 2 epochs of 512 images, 16 at a time
        self.assertEqual(found["metadata"]["epochs_done"], "2")
        self.assertEqual(json.loads(found["metadata"]["train_loss"]), figures["train_loss"])

    def test_a_checkpoint_rewritten_by_python_trains_on_to_the_same_bits(self):
        half = os.path.join(self.folder, "half")
        run(TRAIN, "--data", self.data, "--epochs", 1, "--batch-size", 16, "--run-dir", half, cwd=self.folder,
            env=ONE_THREAD)
        path = os.path.join(half, "checkpoint.safetensors")
        header, metadata, data = read_safetensors(path)
        tensors = {name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()}
        rewritten = os.path.join(self.folder, "rewritten.safetensors")
        write_safetensors(rewritten, dict(sorted(tensors.items(), reverse=True)), metadata)
        ends = [self.figures(arguments=("--resume", source), name=name, env=ONE_THREAD) for source, name in ((path, "own"), (rewritten, "other"))]
        for key in ("train_loss", "parameters_hash", "test_accuracy"):
            self.assertEqual(ends[0][key], ends[1][key], key)


if __name__ == "__main__":
    main()
