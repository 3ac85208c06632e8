"""`.pt` files between the languages: C++ reads and rewrites what Python writes, and training continues in the other language."""

import os
import random
import struct
import zipfile

from support import BIN, LOCKSTEP, ProgramTest, environment, main, python_with_torch, run
from torch_python import in_torch_python

PT = os.path.join(BIN, "pt_python")
ONE_THREAD = environment(OMP_NUM_THREADS="1")

# All plain values that torch.save can write, chosen so that a wrong byte order, size or sign shows.
MAKE = """
import collections, sys, torch
names = ("float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 complex32 uint16 uint32 uint64 "
         "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu").split()
def every():
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    dtypes = {}
    for name in names:
        dtype = getattr(torch, name)
        values = (torch.arange(6, dtype=torch.float64) * 17 - 40).abs().reshape(2, 3)
        if dtype.is_floating_point or dtype.is_complex: values = values / 3
        if dtype.is_complex: values = values * (1 - 2j)
        values = values.to(dtype)
        dtypes[name] = {"matrix": values, "scalar": values[1, 2], "empty": values[:0], "column": values[:, 1], "transposed": values.t()}
    return {"dtypes": dtypes, "base": base, "row": base[1], "expanded": base[0].expand(5, 4),
            "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(), "neg": torch.tensor([1 + 2j]).conj().imag,
            "nested": {"list": [1, [2.5, None, {"deep": True}], ()], "tuple": (1, "two"), 7: "integer key"},
            "ordered": collections.OrderedDict([("z", 1), ("a", torch.ones(2))]),
            "numbers": [0, 255, 256, -1, 2**31 - 1, -2**31, 2**62, -2**63, 1e300, float("inf"), -0.0],
            "text": "caf\\u00e9 \\U0001f600 \\n\\0", "size": torch.Size([2, 3]), "bytes": b"abc", "device": torch.device("cpu"),
            "parameter": torch.nn.Parameter(torch.ones(2)), "dtype": torch.float16, "empty": {}, "truth": [True, False]}
"""

COMPARE = MAKE + """
def same(a, b, place):
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape, (place, a, b)
        bits = lambda t: torch.zeros(t.shape, dtype=t.dtype).copy_(t.detach()).flatten().view(torch.uint8) if t.numel() else torch.zeros(0)
        assert torch.equal(bits(a), bits(b)), (place, a, b)
        if not (a.is_conj() or a.is_neg()): assert a.stride() == b.stride(), (place, a.stride(), b.stride())
        assert a.requires_grad == b.requires_grad, place
    elif isinstance(a, dict):
        assert list(a) == list(b), (place, list(a), list(b))
        for key in a: same(a[key], b[key], f"{place}.{key}")
    elif isinstance(a, torch.Size): assert tuple(a) == b, (place, b)
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b), (place, a, b)
        for i, (x, y) in enumerate(zip(a, b)): same(x, y, f"{place}.{i}")
    elif isinstance(a, bytes): assert b == a.decode(), (place, b)
    elif isinstance(a, (torch.device, torch.dtype)): assert b == str(a), (place, b)
    else: assert type(a) is type(b) and (a == b), (place, a, b)
first = every()
for mmap in (False, True):
    other = torch.load(sys.argv[1], mmap=mmap)  # weights_only, the default
    same(first, other, "root")
    storage = lambda t: t.untyped_storage().data_ptr()
    assert storage(other["base"]) == storage(other["row"]) == storage(other["expanded"])
    other["base"][1, 0] = 99
    assert other["row"][0] == 99
    for name in names:
        assert storage(other["dtypes"][name]["matrix"]) == storage(other["dtypes"][name]["column"]), name
print("same")
"""

NETWORK = """
import sys, torch
from torch import nn
net = lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
def optimizer(kind, params):
    if kind == "SGD": return torch.optim.SGD(params, 0.05, momentum=0.9, weight_decay=1e-3, nesterov=True)
    if kind == "plainSGD": return torch.optim.SGD(params, 0.05)
    if kind == "Adam": return torch.optim.Adam(params, 0.02, betas=(0.8, 0.95), weight_decay=1e-3)
    if kind == "AdamW": return torch.optim.AdamW(params, 0.02, amsgrad=True)
    if kind == "RMSprop": return torch.optim.RMSprop(params, 0.01, momentum=0.5, centered=True)
    if kind == "Adagrad": return torch.optim.Adagrad(params, 0.1, lr_decay=1e-2)
"""

TRAIN = NETWORK + """
kind, state_path, data_path, result_path, first, steps = sys.argv[1:5] + [int(w) for w in sys.argv[5:]]
model = net(); opt = optimizer(kind, model.parameters())
state = torch.load(state_path)
model.load_state_dict(state["model"], strict=True)
if "optimizer" in state: opt.load_state_dict(state["optimizer"])
data = torch.load(data_path)
for step in range(first, first + steps):
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(data["x"][step]), data["y"][step])
    loss.backward(); opt.step()
    print("%.9g" % loss.item())
torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "step": first + steps}, result_path)
"""

OPTIMIZERS = ("SGD", "plainSGD", "Adam", "AdamW", "RMSprop", "Adagrad")


class PtTest(ProgramTest):
    def setUp(self):
        super().setUp()
        self.python = python_with_torch()
        if self.python is None:
            self.skipTest("no Python with torch")

    def path(self, name):
        return os.path.join(self.folder, name)

    def in_python(self, script, *arguments):
        return in_torch_python(self.python, script, *arguments, cwd=self.folder)

    def has(self, module):
        try:
            self.in_python(f"import {module}")
        except AssertionError:
            return False
        return True

    def refused(self, name, *parts, command="copy"):
        result = run(PT, command, self.path(name), self.path("out.pt"), check=False)
        self.assertEqual(result.returncode, 1, name)
        for part in (self.path(name),) + parts:
            self.assertIn(part, result.stderr)
        self.assertFalse(os.path.exists(self.path("out.pt")))


class CheckpointPt(PtTest):
    def test_everything_there_and_back(self):
        for protocol in (2, 3, 4, 5):
            self.in_python(MAKE + f"torch.save(every(), sys.argv[1], pickle_protocol={protocol})", self.path("first.pt"))
            for command in ("copy", "copy-mapped"):
                run(PT, command, self.path("first.pt"), self.path("second.pt"))
                self.assertEqual(self.in_python(COMPARE, self.path("second.pt")), "same\n", f"{command}, protocol {protocol}")

    def test_a_network_saved_here_loads_strictly_there(self):
        run(PT, "network", self.path("net.pt"))
        names = self.in_python(NETWORK + """
for mmap in (False, True):
    state = torch.load(sys.argv[1], mmap=mmap)
    model = net(); report = model.load_state_dict(state, strict=True)
    assert not report.missing_keys and not report.unexpected_keys
    assert model(torch.ones(4, 3)).shape == (4, 2)
print(" ".join(state))
""", self.path("net.pt"))
        self.assertEqual(sorted(names.split()), sorted(
            "0.weight 0.bias 1.weight 1.bias 1.running_mean 1.running_var 1.num_batches_tracked 3.weight 3.bias".split()))

    def test_the_archive_is_laid_out_as_pytorchs(self):
        self.in_python(NETWORK + "torch.save(net().state_dict(), sys.argv[1])", self.path("theirs.pt"))
        run(PT, "network", self.path("ours.pt"))
        theirs, ours = (zipfile.ZipFile(self.path(name)) for name in ("theirs.pt", "ours.pt"))
        self.assertIsNone(ours.testzip())  # every checksum
        strip = lambda archive: sorted(name.split("/", 1)[1] for name in archive.namelist())
        self.assertEqual(strip(ours), strip(theirs))
        for small in ("version", "byteorder", ".format_version", ".storage_alignment"):
            self.assertEqual(ours.read("ours/" + small), theirs.read("theirs/" + small), small)
        with open(self.path("ours.pt"), "rb") as file:
            content = file.read()
        for info in ours.infolist():
            name_bytes, extra_bytes = struct.unpack_from("<HH", content, info.header_offset + 26)
            self.assertEqual((info.header_offset + 30 + name_bytes + extra_bytes) % 64, 0, info.filename)
            self.assertEqual(info.compress_type, 0)

    def test_shared_tensors_share_there(self):
        run(PT, "shared", self.path("shared.pt"))
        self.in_python("""
import sys, torch
state = torch.load(sys.argv[1])
assert state["column"].tolist() == [2, 6, 10] and state["transposed"].shape == (4, 3) and state["expanded"].stride() == (0, 1)
state["all"].fill_(5)
assert all((state[name] == 5).all() for name in ("row", "column", "transposed", "expanded")) and (state["alone"] == 1).all()
assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == 2
""", self.path("shared.pt"))

    def test_a_checkpointers_file_is_pythons_too(self):
        run(PT, "checkpoint", self.path("run"))
        self.assertEqual(sorted(os.listdir(self.path("run"))), ["step-000000000017.0.json", "step-000000000017.0.pt"])
        self.in_python(NETWORK + """
import io
state = torch.load(sys.argv[1])
assert state["step"] == 17 and state["epoch"] == 2, state
model = net(); model.load_state_dict(state["model"], strict=True)
opt = optimizer("AdamW", model.parameters()); opt.load_state_dict(state["optimizer"])
assert opt.state_dict()["state"][0]["step"].item() == 1
own = torch.load(io.BytesIO(bytes(state["ranks"][0].tolist())))
torch.set_rng_state(own["random"])
""", self.path("run/step-000000000017.0.pt"))

    def make_data(self):
        self.in_python(NETWORK + """
torch.manual_seed(1)
torch.save({"model": net().state_dict()}, sys.argv[1])
torch.save({"x": torch.randn(20, 8, 3), "y": torch.randn(20, 8, 2)}, sys.argv[2])
""", self.path("start.pt"), self.path("data.pt"))

    def test_training_goes_on_in_the_other_language(self):
        self.make_data()
        python = lambda *words: [float(line) for line in self.in_python(TRAIN, *words).split()]
        cpp = lambda *words: [float(line) for line in run(PT, "train", *words, env=ONE_THREAD).stdout.split()]
        start, data, half, end = (self.path(name + ".pt") for name in ("start", "data", "half", "end"))
        for kind in OPTIMIZERS:
            straight = python(kind, start, data, end, 0, 20)
            self.assertEqual(len(straight), 20)
            for name, first, second in (("C++", cpp, cpp), ("Python, C++", python, cpp), ("C++, Python", cpp, python)):
                losses = first(kind, start, data, half, 0, 5) + second(kind, half, data, end, 5, 15)
                for step, (one, other) in enumerate(zip(straight, losses, strict=True)):
                    self.assertLess(abs(one - other), 1e-6, f"{kind}, {name}, step {step}: {one} {other}")

    def test_a_training_that_shares_out_its_steps_comes_from_python_and_goes_back(self):
        self.make_data()
        python = lambda *words: [float(line) for line in self.in_python(TRAIN, *words).split()]
        start, data, half, end = (self.path(name + ".pt") for name in ("start", "data", "half", "end"))
        for ranks, shared in ((2, "shared"), (3, "replicated")):
            for kind in ("SGD", "plainSGD", "Adam", "AdamW"):
                straight = python(kind, start, data, end, 0, 15)
                folder = self.path(f"{kind}_{ranks}")
                losses = python(kind, start, data, half, 0, 5)
                losses += [float(line) for line in run(LOCKSTEP, "run", "-n", ranks, "--", PT, "train-sharded", kind, half, data,
                                                       folder, 5, 5, shared, env=ONE_THREAD).stdout.split()]
                losses += python(kind, os.path.join(folder, "step-000000000010.0.pt"), data, end, 10, 5)
                for step, (one, other) in enumerate(zip(straight, losses, strict=True)):
                    self.assertLess(abs(one - other), 2e-6, f"{kind}, {ranks} ranks, step {step}: {one} {other}")

    def test_averages_of_weights_load_alone_and_from_the_checkpoint(self):
        """Values are those of torch.optim.swa_utils after the same steps."""
        if not self.has("safetensors.torch"):
            self.skipTest("no safetensors package")
        start, data = self.path("start.pt"), self.path("data.pt")
        self.in_python(NETWORK + """
torch.manual_seed(1)
torch.save(net().state_dict(), sys.argv[1])
torch.save({"x": torch.randn(6, 8, 3), "y": torch.randn(6, 8, 2)}, sys.argv[2])
""", start, data)
        run(PT, "average", start, data, self.folder, env=ONE_THREAD)
        self.assertEqual(self.in_python(NETWORK + """
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
start, data, folder = sys.argv[1:]
model = net(); model.load_state_dict(torch.load(start))
opt = optimizer("SGD", model.parameters())
averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) for decay in (0.5, 0.9)]
for average in averages: average.update_parameters(model)  # the weights they start from
data = torch.load(data)
for x, y in zip(data["x"], data["y"]):
    opt.zero_grad(); nn.functional.mse_loss(model(x), y).backward(); opt.step()
    for average in averages: average.update_parameters(model)
def same(state, average):
    loaded = net(); loaded.load_state_dict(state, strict=True)
    expected = dict(average.module.named_parameters()) | dict(model.named_buffers())
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == expected[name].dtype and (tensor - expected[name]).abs().max() < 1e-6, name
    assert (averages[0].module[0].weight - averages[1].module[0].weight).abs().max() > 1e-4
for mmap in (False, True): same(torch.load(folder + "/average.pt", weights_only=True, mmap=mmap), averages[1])
same(load_file(folder + "/average.safetensors"), averages[1])
state = torch.load(folder + "/run/step-000000000006.0.pt")
assert state["ema"]["updates"] == 6 and state["ema"]["decays"] == [0.5, 0.9]
for of, average in zip(state["ema"]["averages"], averages, strict=True): same({**state["model"], **of}, average)
print("same")
""", start, data, self.folder), "same\n")

    def test_another_optimizers_state_is_refused_with_all_that_differs(self):
        self.in_python(NETWORK + """
torch.manual_seed(1)
model = net(); opt = torch.optim.Adam(model.parameters(), maximize=True); model(torch.randn(4, 3)).sum().backward(); opt.step()
torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, sys.argv[1])
torch.save({"x": torch.randn(20, 8, 3), "y": torch.randn(20, 8, 2)}, sys.argv[2])
""", self.path("start.pt"), self.path("data.pt"))
        words = (self.path("start.pt"), self.path("data.pt"), self.path("end.pt"), 0, 1)
        error = run(PT, "train", "SGD", *words, check=False).stderr
        for part in ("param_groups.0.momentum is missing", "unknown: 0.exp_avg", "maximize has a value that LibTorch's optimizer of this name does not support"):
            self.assertIn(part, error)
        self.assertIn("param_groups.0.decoupled_weight_decay", run(PT, "train", "AdamW", *words, check=False).stderr)

    def test_numpy_scalars_are_numbers(self):
        if not self.has("numpy"):
            self.skipTest("no numpy")
        for protocol in (2, 4):
            self.in_python(f"""
import numpy as np, sys, torch
torch.save({{"a": np.float64(1.25), "b": np.int32(-3), "c": np.float32(0.5), "d": np.bool_(True), "e": np.int64(2**40)}}, sys.argv[1], pickle_protocol={protocol})
""", self.path("numpy.pt"))
            run(PT, "copy", self.path("numpy.pt"), self.path("plain.pt"))
            self.assertEqual(self.in_python("import sys, torch; print(torch.load(sys.argv[1]))", self.path("plain.pt")),
                             "{'a': 1.25, 'b': -3, 'c': 0.5, 'd': True, 'e': 1099511627776}\n")

    def test_files_without_checksums_are_read(self):
        self.in_python(MAKE + "torch.serialization.set_crc32_options(False); torch.save(every(), sys.argv[1])", self.path("first.pt"))
        run(PT, "copy", self.path("first.pt"), self.path("second.pt"))
        self.assertEqual(self.in_python(COMPARE, self.path("second.pt")), "same\n")

    def test_refusals_say_what_to_do(self):
        self.in_python("""
import sys, torch, os, zipfile, io, struct
class Evil:
    def __reduce__(self): return (os.system, ("touch " + sys.argv[1] + "/owned",))
folder = sys.argv[1] + "/"
torch.save({"a": Evil()}, folder + "evil.pt")
torch.save({"a": torch.ones(2)}, folder + "legacy.pt", _use_new_zipfile_serialization=False)
torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), folder + "script.pt")
torch.save({"a": torch.ones(2).to_sparse()}, folder + "sparse.pt")
torch.save(torch.nn.Linear(1, 1), folder + "module.pt")
torch.save({"deep": None}, folder + "good.pt")
torch.save({"weight": torch.arange(1000.)}, folder + "damaged.pt")
nested = []
for _ in range(200): nested = [nested]
torch.save(nested, folder + "deep.pt")
around = []; around.append(around)
torch.save(around, folder + "around.pt")
def rewrite(source, to, change, compress=zipfile.ZIP_STORED):
    old = zipfile.ZipFile(folder + source)
    with zipfile.ZipFile(folder + to, "w", compress) as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None: new.writestr(name, content)
rewrite("damaged.pt", "big.pt", lambda name, content: b"big" if name.endswith("byteorder") else content)
rewrite("damaged.pt", "packed.pt", lambda name, content: content, zipfile.ZIP_DEFLATED)
rewrite("damaged.pt", "missing.pt", lambda name, content: None if name.endswith("data/0") else content)
rewrite("damaged.pt", "short.pt", lambda name, content: content[:100] if name.endswith("data/0") else content)
content = bytearray(open(folder + "damaged.pt", "rb").read())
content[content.index(struct.pack("<3f", 500, 501, 502))] ^= 1
open(folder + "damaged.pt", "wb").write(content)
open(folder + "text.pt", "w").write("no archive at all")
""", self.folder)
        self.refused("evil.pt", "posix.system", "nothing was executed")
        self.assertFalse(os.path.exists(self.path("owned")))
        self.refused("legacy.pt", "torch.save(torch.load(f), f)")
        self.refused("script.pt", "torch::jit::load")
        self.refused("sparse.pt", "_rebuild_sparse_tensor", "convert them")
        self.refused("module.pt", "torch.nn.modules.linear.Linear", "state_dict()")
        self.refused("damaged.pt", "checksum", "`weight`")
        self.refused("deep.pt", "nested deeper than 128")
        self.refused("around.pt", "contains itself")
        self.refused("big.pt", "big-endian")
        self.refused("packed.pt", "compressed")
        self.refused("missing.pt", "storage 0", "missing")
        self.refused("short.pt", "storage 0", "4000 bytes, but has 100")
        self.refused("text.pt", "does not start like a zip archive")
        run(PT, "copy", self.path("good.pt"), self.path("out.pt"))

    def test_damaged_anywhere_never_crashes(self):
        """Truncated everywhere and with bytes changed: an Error or a whole object, never a signal."""
        self.in_python(NETWORK + "torch.manual_seed(0); torch.save(net().state_dict(), sys.argv[1])", self.path("net.pt"))
        with open(self.path("net.pt"), "rb") as file:
            content = file.read()
        seed = random.randrange(1 << 32)
        chance = random.Random(seed)
        rounds = 400 if os.environ.get("LOCKSTEP_NIGHTLY") else 40
        damaged = self.path("hurt.pt")
        for round in range(rounds):
            hurt = bytearray(content)
            if round % 2:
                del hurt[chance.randrange(len(hurt)):]
            for _ in range(chance.randrange(1, 5) if hurt else 0):
                hurt[chance.randrange(len(hurt))] = chance.randrange(256)
            with open(damaged, "wb") as file:
                file.write(hurt)
            result = run(LOCKSTEP, "convert", damaged, self.path("out.safetensors"), check=False)
            self.assertIn(result.returncode, (0, 49), f"seed {seed}, round {round}\n{result.stderr}")
            if round < 8:
                result = run(PT, "copy", damaged, self.path("out.pt"), check=False)
                self.assertIn(result.returncode, (0, 1), f"seed {seed}, round {round}\n{result.stderr}")


class InspectAndConvert(PtTest):
    """Of the launcher, which knows nothing of torch."""

    def test_inspect(self):
        self.in_python(MAKE + """
base = torch.zeros(3, 4)
torch.save({"model": {"weight": base, "view": base[0], "half": torch.ones(2, dtype=torch.float16)}, "lr": 0.5, "\\x1b[31mred": "x" * 200}, sys.argv[1])
""", self.path("net.pt"))
        text = run(LOCKSTEP, "inspect", self.path("net.pt")).stdout
        self.assertRegex(text, r"(?m)^model.weight +float32 +\[3, 4\] +48$")
        self.assertRegex(text, r"(?m)^model.view +float32 +\[4\] +16$")
        self.assertRegex(text, r"(?m)^model.half +float16 +\[2\] +4$")
        self.assertRegex(text, r"(?m)^lr = 0.5$")
        self.assertRegex(text, r"(?m)^\\x1b\[31mred = x{100}\.\.\.$")
        self.assertRegex(text, r"(?m)^3 tensors, 52 bytes \(2 pieces of memory, some shared\)$")

    def test_convert_there_and_back(self):
        run(PT, "network", self.path("net.pt"))
        run(LOCKSTEP, "convert", self.path("net.pt"), self.path("net.safetensors"))
        run(LOCKSTEP, "convert", self.path("net.safetensors"), self.path("back.pt"))
        hashes = {run(PT, "hash", self.path(name)).stdout for name in ("net.pt", "net.safetensors", "back.pt")}
        self.assertEqual(len(hashes), 1)
        self.in_python("""
import sys, torch
one, other = torch.load(sys.argv[1]), torch.load(sys.argv[2])
assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
""", self.path("net.pt"), self.path("back.pt"))
        listing = run(LOCKSTEP, "inspect", self.path("net.safetensors")).stdout
        self.assertEqual(listing, run(LOCKSTEP, "inspect", self.path("back.pt")).stdout)

    def test_convert_strided_views_and_values(self):
        run(PT, "shared", self.path("shared.pt"))
        notes = run(LOCKSTEP, "convert", self.path("shared.pt"), self.path("shared.safetensors")).stderr
        self.assertIn("written once each", notes)
        run(PT, "flat", self.path("shared.safetensors"), self.path("flat.pt"))
        self.in_python("""
import sys, torch
one, other = torch.load(sys.argv[1]), torch.load(sys.argv[2])
assert set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)
""", self.path("shared.pt"), self.path("flat.pt"))

    def test_convert_writes_what_load_reads_of_views_with_turned_signs(self):
        self.in_python("""
import sys, torch
c = torch.tensor([1 + 2j, -3 - 1j, 0.5 + 0j, -0.0 + 4j])
big = torch.complex(torch.randn(9000), torch.randn(9000))
torch.save({"conj": c.conj(), "imag": c.clone().conj().imag, "strided": big.view(90, 100).t().conj(), "both": torch._neg_view(big.conj()),
            "neg": torch._neg_view(torch.randn(5, dtype=torch.bfloat16)), "double": c.to(torch.complex128).conj()[1:]}, sys.argv[1])
""", self.path("views.pt"))
        run(LOCKSTEP, "convert", self.path("views.pt"), self.path("plain.pt"))
        self.in_python("""
import sys, torch
one, other = torch.load(sys.argv[1]), torch.load(sys.argv[2])
bits = lambda t: torch.view_as_real(t) if t.is_complex() else t
for name in one:
    assert not other[name].is_conj() and not other[name].is_neg(), name
    a, b = bits(one[name].resolve_conj().resolve_neg().contiguous()), bits(other[name])
    assert torch.equal(a, b) and torch.equal(torch.signbit(a), torch.signbit(b)), name
assert set(one) == set(other)
""", self.path("views.pt"), self.path("plain.pt"))

    def test_inspect_lists_what_has_one_name(self):
        self.in_python("""
import sys, torch
torch.save({"a.b": torch.zeros(2), "a": {"b": torch.zeros(3)}, "c": {"d": 1}, "c.d": 2, "a.b (2)": 7}, sys.argv[1])
""", self.path("twice.pt"))
        text = run(LOCKSTEP, "inspect", self.path("twice.pt")).stdout
        self.assertRegex(text, r"(?m)^a\.b +float32 +\[2\] +8$")
        self.assertRegex(text, r"(?m)^a\.b \(3\) +float32 +\[3\] +12$")
        self.assertRegex(text, r"(?m)^c\.d = 1$")
        self.assertRegex(text, r"(?m)^c\.d \(2\) = 2$")
        self.assertRegex(text, r"(?m)^a\.b \(2\) = 7$")
        result = run(LOCKSTEP, "convert", self.path("twice.pt"), self.path("once.pt"), check=False)
        self.assertEqual(result.returncode, 49)
        self.assertIn("two of its entries are called", result.stderr)

    def test_safetensors_own_package(self):
        if not self.has("safetensors.torch"):
            self.skipTest("no package safetensors: scripts/setup --tests installs it")
        run(PT, "network", self.path("net.pt"))
        run(PT, "flat", self.path("net.pt"), self.path("net.safetensors"))
        self.in_python("""
import sys, torch
from safetensors.torch import load_file, save_file
names = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 float8_e4m3fn float8_e5m2 complex64".split()
one, other = torch.load(sys.argv[1]), load_file(sys.argv[2])
assert set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)
tensors = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in names}
tensors["empty"] = torch.zeros(0, 3); tensors["scalar"] = torch.tensor(2.5)
save_file(tensors, sys.argv[3], metadata={"epoch": "3"})
""", self.path("net.pt"), self.path("net.safetensors"), self.path("theirs.safetensors"))
        run(PT, "flat", self.path("theirs.safetensors"), self.path("ours.safetensors"))
        self.in_python("""
import sys, torch
from safetensors import safe_open
from safetensors.torch import load_file
one, other = load_file(sys.argv[1]), load_file(sys.argv[2])
bits = lambda t: t.flatten().view(torch.uint8) if t.numel() else t.flatten()
assert set(one) == set(other) and all(one[n].dtype == other[n].dtype and torch.equal(bits(one[n]), bits(other[n])) for n in one)
assert safe_open(sys.argv[2], "pt").metadata() == {"epoch": "3"}
""", self.path("theirs.safetensors"), self.path("ours.safetensors"))

    def test_bad_words(self):
        self.assertEqual(run(LOCKSTEP, "inspect", check=False).returncode, 2)
        self.assertEqual(run(LOCKSTEP, "convert", "a.pt", check=False).returncode, 2)
        result = run(LOCKSTEP, "inspect", self.path("nothing.pt"), check=False)
        self.assertEqual(result.returncode, 49)
        self.assertIn(self.path("nothing.pt"), result.stderr)
        run(PT, "network", self.path("net.pt"))
        result = run(LOCKSTEP, "convert", self.path("net.pt"), self.path("net.txt"), check=False)
        self.assertEqual(result.returncode, 49)
        self.assertIn(".safetensors", result.stderr)


if __name__ == "__main__":
    main()
