"""Writes ddp.safetensors: what PyTorch's DistributedDataParallel (Gloo, 2 to 4 ranks) computes for small models.

    python3 tests/golden/write_ddp_golden.py

Models, initial weights and inputs are closed formulas of indices (see `formula`), so that the C++ test builds the same
without any file of inputs. For each world size and case the file holds gradients after one step and parameters and
buffers after twenty steps of SGD with momentum: "<case>/<world size>/grad/<name>" and ".../after/<name>".
"""

import json
import os
import struct
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 20
BATCH = 4


def formula(shape, key):
    """Values in (-0.5, 0.5), equal in every language: the fractional part of i * 0.618... + key * 0.377..., in double."""
    count = 1
    for size in shape:
        count *= size
    index = torch.arange(count, dtype=torch.float64)
    value = index * 0.6180339887498949 + key * 0.3771
    return (value - value.floor() - 0.5).reshape(shape)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x, step):
        return self.fc2(torch.tanh(self.fc1(x)))


class WithBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.bn = nn.BatchNorm1d(8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x, step):
        return self.fc2(torch.relu(self.bn(self.fc1(x))))


class Branches(nn.Module):
    """Each rank and step uses one branch or the other; `never` is used by nobody."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(6, 3)
        self.right = nn.Linear(6, 3)
        self.never = nn.Linear(6, 3)

    def forward(self, x, step):
        branch = self.left if (step + dist.get_rank()) % 2 == 0 else self.right
        return branch(x)


class Shared(nn.Module):
    """One layer used twice."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x, step):
        return self.out(torch.tanh(self.fc(torch.tanh(self.fc(x)))))


class Recomputed(Plain):
    """Its first layer runs again in backward."""

    def forward(self, x, step):
        return self.fc2(checkpoint(lambda y: torch.tanh(self.fc1(y)), x.requires_grad_(), use_reentrant=True))


MODELS = {"batch_norm": WithBatchNorm, "branches": Branches, "shared": Shared, "recomputed": Recomputed}
CASES = ("plain", "no_sync", "batch_norm", "branches", "shared", "recomputed", "several_forwards", "join", "weighted")


def inputs_of(name, rank):
    """How many batches the rank has."""
    return 8 + 6 * rank if name == "join" else STEPS


def fill(model):
    for key, tensor in enumerate(model.parameters()):
        tensor.data.copy_(formula(tensor.shape, key + 1))


def batch(step, rank, size=BATCH):
    key = 1000 + step * 10 + rank
    return formula((size, 6), key).float(), formula((size, 3), key + 0.5).float()


def loss_of(name, replica, step, rank, world):
    def loss(at_step, size=BATCH):
        data, target = batch(at_step, rank, size)
        return nn.functional.mse_loss(replica(data, step), target)

    if name == "several_forwards":
        return loss(step) + loss(step + 200) * loss(step + 300)
    if name == "weighted":  # DistributedDataParallel divides by the world size
        size = 2 + 3 * rank
        return loss(step, size) * size * world / sum(2 + 3 * r for r in range(world))
    return loss(step)


def run_case(name, rank, world):
    model = MODELS.get(name, Plain)()
    fill(model)
    replica = DistributedDataParallel(model, find_unused_parameters=name == "branches")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    out = {}
    with replica.join(enable=name == "join"):
        for step in range(inputs_of(name, rank)):
            optimizer.zero_grad()
            if name == "no_sync":
                with replica.no_sync():
                    data, target = batch(step + 100, rank)
                    nn.functional.mse_loss(replica(data, step), target).backward()
            loss_of(name, replica, step, rank, world).backward()
            if step == 0:
                for key, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        out[f"{name}/{world}/grad/{key}"] = parameter.grad.clone()
            optimizer.step()
    for key, tensor in model.named_parameters():
        out[f"{name}/{world}/after/{key}"] = tensor.detach().clone()
    # The last forward has changed every rank's buffers; PyTorch would bring rank 0's to all before the next one.
    for key, tensor in model.named_buffers():
        out[f"{name}/{world}/after/{key}"] = tensor.detach().clone()
    return out


def worker(rank, world, folder, names, run):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    out = {}
    for name in names:
        out.update(run(name, rank, world))
    if rank == 0:
        torch.save(out, f"{folder}/out{world}.pt")
    dist.barrier()
    dist.destroy_process_group()


def write_safetensors(path, tensors):
    names = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}
    header, blobs, offset = {}, [], 0
    for name, tensor in sorted(tensors.items()):
        blob = tensor.contiguous().numpy().tobytes()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def write_golden(file_name, names, run, world_sizes=(2, 3)):
    """Writes beside this file what run(name, rank, world) returns on rank 0, for each name on each number of ranks."""
    everything = {}
    for world_size in world_sizes:
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(worker, (world_size, directory, list(names), run), nprocs=world_size)
            everything.update(torch.load(f"{directory}/out{world_size}.pt"))
    write_safetensors(os.path.join(os.path.dirname(os.path.abspath(__file__)), file_name), everything)
    print(f"{len(everything)} tensors, PyTorch {torch.__version__}")


if __name__ == "__main__":
    write_golden("ddp.safetensors", CASES, run_case, world_sizes=(2, 3, 4))
