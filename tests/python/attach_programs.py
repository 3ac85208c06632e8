"""What ranks do in attach_test.py: each function is called as function(rank, size) in a group of all ranks."""

import copy
import ctypes
import gc
import io
import json
import os
import pickle
import re
import struct
import sys
import threading
import time
import weakref

import torch
import torch.distributed as dist
from torch import nn

import lockstep

GOLDEN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "golden")
sys.path.insert(0, GOLDEN)
import write_ddp_golden as golden_ddp  # noqa: E402


def read_safetensors(path):
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header, data = json.loads(file.read(length)), bytearray(file.read())
    types = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = torch.frombuffer(data[begin:end], dtype=types[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def close(actual, expected, name="", tolerance=2e-6):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


# What a user of Python does not know.
NAMES_OF_CPP = re.compile(r"\w+::\w+|\bk[A-Z]\w+|\b\w+Options\b|DistributedDataParallel|C\+\+ stack|\bContext\b")


def raises(kind, pattern, function, *arguments):
    try:
        function(*arguments)
    except kind as error:
        text = str(error)
        assert pattern in text, f"{pattern!r} is not in {text!r}"
        foreign = NAMES_OF_CPP.findall(text.replace("torch's DistributedDataParallel", ""))
        assert not foreign or kind is TypeError or text.startswith("DistributedDataParallel"), f"{foreign} in {text!r}"
        return text
    raise AssertionError(f"no {kind.__name__} with {pattern!r}")


def equal_on_all_ranks(tensors):
    for tensor in tensors:
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, tensor.detach())
        assert all(torch.equal(one, everyone[0]) for one in everyone)


def golden(rank, size):
    """PyTorch's DistributedDataParallel and the C++ class, from the file that the C++ tests read, too."""
    expected = read_safetensors(os.path.join(GOLDEN, "ddp.safetensors"))
    for name in golden_ddp.CASES:
        model = golden_ddp.MODELS.get(name, golden_ddp.Plain)()
        golden_ddp.fill(model)
        replica = lockstep.attach(model, reduction="weighted_mean" if name == "weighted" else "mean")
        if name == "weighted":
            replica.set_weight(2 + 3 * rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        place = f"{name}/{size}/"

        def loss_of(step):
            if name != "weighted":
                return golden_ddp.loss_of(name, model, step, rank, size)
            data, target = golden_ddp.batch(step, rank, 2 + 3 * rank)
            return nn.functional.mse_loss(model(data, step), target)

        def train():
            for step in range(golden_ddp.inputs_of(name, rank)):
                optimizer.zero_grad()
                if name == "no_sync":
                    with replica.no_sync():
                        golden_ddp.loss_of(name, model, step + 100, rank, size).backward()
                loss_of(step).backward()
                if step == 0:
                    named = {place + "grad/" + key: p.grad for key, p in model.named_parameters() if p.grad is not None}
                    assert set(named) == {key for key in expected if key.startswith(place + "grad/")}, name
                    for key, gradient in named.items():
                        close(gradient, expected[key], key, 1e-6)
                optimizer.step()

        replica.join(train) if name == "join" else train()
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            close(tensor.detach(), expected[f"{place}after/{key}"], key)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 100), nn.BatchNorm1d(100), nn.ReLU(), nn.Linear(100, 5))


def loss_of(model, step, rank, inputs=20):
    torch.manual_seed(1000 * step + rank)
    return nn.functional.cross_entropy(model(torch.randn(8, inputs)), torch.randint(5, (8,)))


def backward(model, step, rank, inputs=20):
    loss = loss_of(model, step, rank, inputs)
    loss.backward()
    return loss.item()


def mean_gradients(model, step, size):
    """Of all ranks, computed here from copies of the module as it is."""
    copies = []
    for rank in range(size):
        one = copy.deepcopy(model)
        one.zero_grad()
        backward(one, step, rank)
        copies.append([p.grad for p in one.parameters()])
    return [sum(gradients) / size for gradients in zip(*copies)]


def gradients(rank, size):
    """With several buckets, nobody's hooks lost, and a copy of the module that nobody is attached to."""
    model = network()
    if rank != 0:
        nn.init.zeros_(model[0].weight)  # attaching brings rank 0's
    early, late = [], []
    model[0].weight.register_hook(lambda gradient: early.append(1))
    replica = lockstep.attach(model, first_bucket_cap_mb=0.01, bucket_cap_mb=0.05)
    assert (replica.rank, replica.world_size, replica.module) == (rank, size, model)
    assert len(replica.bucket_parameters()) > 1
    equal_on_all_ranks(model.parameters())
    model[0].bias.register_hook(lambda gradient: late.append(1))  # Python drops C++'s hooks when it adds its first one
    for step in range(3):
        expected = mean_gradients(model, step, size)
        early.clear(), late.clear()
        model.zero_grad()
        backward(model, step, rank)
        assert (early, late) == ([1], [1]), (early, late)
        for parameter, gradient in zip(model.parameters(), expected):
            close(parameter.grad, gradient)
        equal_on_all_ranks([p.grad for p in model.parameters()])
    raises(RuntimeError, "torch.autograd.grad", lambda: torch.autograd.grad(model(torch.randn(8, 20)).sum(), model[0].bias))
    stats = replica.stats()
    assert stats.reductions >= 3 and stats.bytes >= 4 * 36000 and len(stats.buckets) > 1, (stats.reductions, stats.bytes)
    assert "5.bias" in stats.buckets[0].parameters
    assert replica.communication_seconds() > 0


def accumulation(rank, size):
    model = network()
    replica = lockstep.attach(model)
    with replica.accumulate(2):
        backward(model, 0, rank)
        assert not replica.step_complete()
        backward(model, 1, rank)
        assert replica.step_complete()
    equal_on_all_ranks([p.grad for p in model.parameters()])
    norm = replica.clip_grad_norm(1e-3)
    close(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item(), 1e-3, tolerance=1e-5)
    assert norm > 1e-3
    model.zero_grad()
    with replica.no_sync():
        backward(model, 2, rank)
    replica.reduce_gradients()
    equal_on_all_ranks([p.grad for p in model.parameters()])


def checks(rank, size):
    """What ranks find wrong together: an Error on each of them."""
    model = network()
    replica = lockstep.attach(model)
    replica.check_divergence()
    if rank == 1:
        with torch.no_grad():
            model[2].bias[3] += 1
    raises(lockstep.Error, "2.bias", replica.check_divergence)
    replica.broadcast_parameters()
    replica.check_divergence()
    with torch.no_grad():
        model[2].bias.fill_(rank)
    replica.average_parameters(1.0)
    close(model[2].bias[0].item(), (size - 1) / 2)
    replica.set_non_finite_policy("raise")
    if rank == 1:
        model[5].bias.register_hook(lambda gradient: gradient * float("nan"))
    text = raises(lockstep.Error, "5.bias", backward, model, 0, rank)
    assert "rank 1" in text and issubclass(lockstep.Error, RuntimeError)
    replica.detach()

    other = nn.Sequential(nn.Linear(20, 5 if rank == 0 else 6))
    text = raises(lockstep.Error, "do not hold the same model", lockstep.attach, other)
    assert "[5, 20]" in text and "[6, 20]" in text, text
    raises(TypeError, "takes a torch.nn.Module", lockstep.attach, [nn.Linear(2, 2)])
    raises(TypeError, "scripted modules take no hooks", lockstep.attach, torch.jit.script(nn.Linear(2, 2)))
    raises(ValueError, "'mean', 'sum', 'weighted_mean'", lambda: lockstep.attach(network(), reduction="median"))
    raises(RuntimeError, "no parameter that requires grad", lockstep.attach, nn.ReLU())


def edits(rank, size):
    """Layers that come, go and thaw: an Error on all ranks until refresh()."""
    model = network()
    replica = lockstep.attach(model)
    backward(model, 0, rank)
    model.append(nn.Linear(5, 5))
    raises(lockstep.Error, "6.weight was added or replaced", backward, model, 1, rank)
    replica.refresh()
    equal_on_all_ranks(model.parameters())
    backward(model, 2, rank)
    equal_on_all_ranks([p.grad for p in model.parameters()])
    if rank == 0:  # one rank alone: the others hear of it in backward
        model[0] = nn.Linear(20, 300)
    raises(lockstep.Error, "0.weight was added or replaced", backward, model, 3, rank)
    model[0] = nn.Linear(20, 300)
    model[2].requires_grad_(False)
    replica.refresh()
    model.zero_grad()
    backward(model, 4, rank)
    assert model[2].weight.grad is None
    model[2].requires_grad_(True)
    raises(lockstep.Error, "2.weight was unfrozen", backward, model, 5, rank)
    replica.refresh()
    model.double()
    raises(lockstep.Error, "was converted", lambda: model(torch.randn(8, 20, dtype=torch.float64)).sum().backward())
    model.float()
    replica.refresh()
    model.zero_grad()
    backward(model, 6, rank)
    equal_on_all_ranks([p.grad for p in model.parameters()])


def held_gradients(rank, size):
    """A gradient that the program keeps stays as it is; the others stay where they are, though Python has seen them."""
    model = network()
    lockstep.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, values, seen = {}, {}, {}
    for step in range(4):
        optimizer.zero_grad()  # sets them to None
        backward(model, step, rank)
        optimizer.step()
        for name, parameter in model.named_parameters():
            if name in seen and name not in kept:
                assert seen[name]() is parameter.grad, f"step {step}: the gradient of {name} was copied to another tensor"
            seen[name] = weakref.ref(parameter.grad)
        for name, gradient in kept.items():
            assert torch.equal(gradient, values[name]), f"step {step}: the gradient of {name} that was kept has changed"
            assert model.get_parameter(name).grad is not gradient
        kept = {name: parameter.grad for name, parameter in model.named_parameters() if step == 1 and "weight" in name}
        values = {name: gradient.clone() for name, gradient in kept.items()}
        parameter = None  # the loop's own


def lifetimes(rank, size):
    """Either end may go first, and copies are plain modules."""
    model = network()
    lockstep.attach(model)  # the module keeps it
    gc.collect()
    backward(model, 0, rank)
    equal_on_all_ranks([p.grad for p in model.parameters()])
    raises(RuntimeError, "is already attached to a Replica", lockstep.attach, model)
    for plain in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        plain.zero_grad()
        backward(plain, rank, rank)  # would wait for the others
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert list(model.state_dict()) == list(network().state_dict())
    model = None  # with its replica
    gc.collect()

    model = network()
    replica = lockstep.attach(model)
    weight = model[0].weight
    model = None
    gc.collect()
    assert replica.module is None
    raises(RuntimeError, "the module of this replica was destroyed", replica.refresh)
    replica = None
    gc.collect()
    (weight * rank).sum().backward()
    close(weight.grad[0, 0].item(), float(rank))

    model = network()
    replica = lockstep.attach(model)
    replica.detach()
    replica.detach()
    raises(RuntimeError, "was detached", replica.refresh)
    backward(model, rank, rank)
    assert not model._forward_pre_hooks
    lockstep.attach(model)
    backward(model, 1, rank)


def lock_of_python(rank, size):
    """While a thread of rank 1 holds Python's lock, its backward goes on, and the others need not wait."""
    model = nn.Sequential(*[nn.Linear(400, 400) for _ in range(4)])  # long enough for the thread to get the lock
    lockstep.attach(model)
    library, held = ctypes.PyDLL(None), 1.5  # PyDLL's functions keep the lock
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody takes the lock before it is given up
    for _ in range(10):
        begun = threading.Event()
        holder = threading.Thread(target=lambda: (begun.wait(), library.usleep(int(held * 1e6)) if rank == 1 else None))
        holder.start()
        loss = model(torch.randn(256, 400)).sum()
        dist.barrier()
        start = time.monotonic()
        begun.set()
        loss.backward(retain_graph=True)  # torch itself takes the lock to free tensors of the graph that Python has seen
        taken = [torch.empty(1) for _ in range(size)]
        dist.all_gather(taken, torch.tensor([time.monotonic() - start]))
        holder.join()
        # Rank 1 could not return before its thread was done; torch may have wanted the lock before the last gradient.
        if taken[1] >= held and taken[0] < 0.8 * held:
            sys.setswitchinterval(interval)
            return
    raise AssertionError(f"while a thread of rank 1 held the lock for {held} s, the last backward took {taken[0].item()} s on rank 0, {taken[1].item()} s there")


def on_several_machines(rank, size):
    for function in (golden, gradients, accumulation, checks, edits):
        function(rank, size)


def everything(rank, size):
    for function in (golden, gradients, accumulation, checks, edits, held_gradients, lifetimes, lock_of_python):
        function(rank, size)


def be_killed(rank, size):
    model = network()
    lockstep.attach(model)
    backward(model, 0, rank)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    text = raises(lockstep.Error, "rank 1", backward, model, 1, rank)
    return time.monotonic() - start, text
