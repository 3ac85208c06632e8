"""What ranks do wrong, or oddly, with attach(), in attach_test.py: functions of (rank, size), as in attach_programs.py."""

import copy
import datetime
import io
import os
import subprocess
import sys
import tempfile
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from attach_programs import backward, close, equal_on_all_ranks, mean_gradients, network, raises

seconds = datetime.timedelta


def sharded():
    model = network()
    model.eval()
    replica = lockstep.attach(model)
    return model, replica, lockstep.ZeroRedundancyOptimizer(replica, lr=1e-2)


def changed_gradients(rank, size):
    """With the sharded optimizer .grad is the rank's own until step(): who changes it then has changed a part of a sum."""
    def scale(model):
        model[0].weight.grad.mul_(0.5)

    def replace(model):
        model[0].weight.grad = model[0].weight.grad * 0.5

    ways = [lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3), lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-4),
            scale, replace]
    for way in ways:
        for alone in (False, True):
            model, replica, optimizer = sharded()
            backward(model, 0, rank)
            if not alone or rank == size - 1:
                way(model)
            raises(RuntimeError, "clip_grad_norm", optimizer.step)
            replica.detach()


def changed_means(rank, size):
    """Between machines backward reduces, so .grad is the mean: all ranks may clip it alike, as without the sharded optimizer."""
    for alone in (False, True):
        model, replica, optimizer = sharded()
        single = copy.deepcopy(model)
        plain = torch.optim.AdamW(single.parameters(), 1e-2)
        for parameter, gradient in zip(single.parameters(), mean_gradients(model, 0, size)):
            parameter.grad = gradient
        backward(model, 0, rank)
        if not alone or rank == size - 1:
            nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        if alone:
            raises(RuntimeError, f"rank {size - 1} has other gradients", optimizer.step)
        else:
            nn.utils.clip_grad_value_(single.parameters(), 1e-4)
            optimizer.step()
            plain.step()
            for one, other in zip(model.parameters(), single.parameters()):
                close(one.detach(), other.detach(), tolerance=1e-4)
        replica.detach()


def unknown_to_ignore(rank, size):
    raises(ValueError, "no.such", lambda: lockstep.attach(network(), parameters_to_ignore=["no.such"]))
    raises(ValueError, "0.weigth", lambda: lockstep.attach(network(), parameters_to_ignore=["0.bias", "0.weigth"]))
    raises(RuntimeError, "no.such", lambda: lockstep.attach(network(), delay_all_reduce_named_params=["no.such"]))
    model = network()
    lockstep.attach(model, parameters_to_ignore=["0.bias", "3.running_mean"])
    backward(model, 0, rank)
    own = copy.deepcopy(model)
    own.zero_grad()
    backward(own, 0, rank)
    close(model[0].bias.grad, own[0].bias.grad)


def other_reducers(rank, size):
    """torch's DistributedDataParallel beside attach() on the same parameters, made before or after it, around it or within."""
    model = network()
    replica = lockstep.attach(model)
    for wrapped in (model, nn.Sequential(model), model[2], nn.ModuleList([nn.Linear(2, 2), model[5]])):
        raises(RuntimeError, "already averaged over the ranks by lockstep.attach()", DistributedDataParallel, wrapped)
    ignored = nn.Sequential(model, nn.Linear(5, 5))  # a part of it is attached, and DistributedDataParallel leaves that part alone
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignored, [f"0.{name}" for name, _ in model.named_parameters()])
    both = DistributedDataParallel(ignored, broadcast_buffers=False)
    both(torch.randn(8, 20)).sum().backward()
    equal_on_all_ranks([p.grad for p in ignored.parameters()])
    replica.detach()
    wrapped = DistributedDataParallel(model)
    raises(TypeError, "is a DistributedDataParallel, which averages the gradients itself", lockstep.attach, wrapped)
    raises(TypeError, "its layer 1 is a DistributedDataParallel", lockstep.attach, nn.Sequential(nn.ReLU(), wrapped))
    raises(RuntimeError, "are already averaged by torch's DistributedDataParallel", lockstep.attach, model)
    expected = mean_gradients(model, 0, size)
    model.zero_grad()
    backward(wrapped, 0, rank)
    for parameter, gradient in zip(model.parameters(), expected):
        close(parameter.grad, gradient)


def other_optimizers(rank, size):
    model, replica, optimizer = sharded()
    plain, part = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD([model[0].bias, torch.zeros(1, requires_grad=True)], 0.1)
    backward(model, 0, rank)
    for other in (plain, part):
        raises(RuntimeError, "are stepped by another optimizer, a lockstep.ZeroRedundancyOptimizer", other.step)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1).step()
    optimizer.step()
    equal_on_all_ranks(model.parameters())
    another = lockstep.ZeroRedundancyOptimizer(replica, torch.optim.SGD, lr=0.1)  # takes its place
    another.zero_grad()
    backward(model, 1, rank)
    raises(RuntimeError, "are stepped by another optimizer", optimizer.step)
    another.step()
    equal_on_all_ranks(model.parameters())
    del optimizer, another
    expected = mean_gradients(model, 2, size)
    model.zero_grad()
    backward(model, 2, rank)
    for parameter, gradient in zip(model.parameters(), expected):
        close(parameter.grad, gradient)
    plain.step()
    equal_on_all_ranks(model.parameters())


def arguments(rank, size):
    model = network()
    replica = lockstep.attach(model)
    raises(TypeError, "optimizer_class of torch's",
           lambda: lockstep.ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3))
    raises(TypeError, "does not take generator as its first argument", lambda: lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam))
    raises(TypeError, "It takes the Replica that lockstep.attach(model) returns", lambda: lockstep.ZeroRedundancyOptimizer(model))
    raises(TypeError, "parameters_as_bucket_view", lambda: lockstep.ZeroRedundancyOptimizer(replica, parameters_as_bucket_view=True))
    replica.detach()
    raises(RuntimeError, "was detached", lambda: lockstep.ZeroRedundancyOptimizer(replica))
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    raises(RuntimeError, "0.weight, 0.bias of a lazy layer have no shape yet", lockstep.attach, lazy)
    lazy(torch.ones(1, 3))
    lockstep.attach(lazy)
    lazy(torch.full((1, 3), rank + 1.0)).sum().backward()
    equal_on_all_ranks([p.grad for p in lazy.parameters()])
    raises(ValueError, "timeout is a datetime.timedelta", lambda: lockstep.attach(network(), timeout=3))
    raises(ValueError, "give all of a group's modules the same timeout", lambda: lockstep.attach(network(), timeout=seconds(seconds=3)))
    ignored = network()
    replica = lockstep.attach(ignored, parameters_to_ignore=["0.bias"])
    assert len(lockstep.ZeroRedundancyOptimizer(replica, torch.optim.SGD, lr=0.1).param_groups[0]["params"]) == 7
    given = network()
    replica = lockstep.attach(given)
    raises(ValueError, "0.weight is not among the parameters", replica.clip_grad_norm_, given[2:].parameters(), 1.0)


def wrong_types(rank, size):
    """The text names the call, the argument, what it must be, and what was given."""
    for options, words in ((dict(bucket_cap_mb="a"), "bucket_cap_mb is 'a', of type str; it must be a number"),
                           (dict(first_bucket_cap_mb=None), "first_bucket_cap_mb is None; it must be a number"),
                           (dict(delay_all_reduce_named_params=[3]),
                            "an entry of delay_all_reduce_named_params is 3, of type int; it must be a name, a str"),
                           (dict(parameters_to_ignore=None), "parameters_to_ignore is None; it must be a list of names"),
                           (dict(keep_freed_memory="x"), "keep_freed_memory is 'x', of type str; it must be True or False"),
                           (dict(init_sync=None), "init_sync is None; it must be True or False")):
        raises(TypeError, f"lockstep.attach(): {words}", lambda: lockstep.attach(network(), **options))
    raises(ValueError, "reduction is []; it must be one of", lambda: lockstep.attach(network(), reduction=[]))
    model = network()
    replica = lockstep.attach(model)
    raises(TypeError, "Replica.join(): body is None; it must be a function without arguments", replica.join, None)
    raises(TypeError, "Replica.join(): body is 3, of type int", replica.join, 3)
    raises(TypeError, "Replica.join(): shadow is 3, of type int", lambda: replica.join(lambda: None, shadow=3))
    raises(TypeError, "Replica.accumulate(): n is 'a', of type str; it must be an int", lambda: replica.accumulate("a").__enter__())
    raises(TypeError, "Replica.broadcast_parameters(): root is None; it must be an int", replica.broadcast_parameters, None)
    raises(TypeError, "Replica.set_weight(): weight is 'a'", replica.set_weight, "a")
    raises(TypeError, "Replica.clip_grad_norm(): max_norm is None; it must be a number", replica.clip_grad_norm, None)
    raises(TypeError, "ZeroRedundancyOptimizer: shared_parameters is 'no'",
           lambda: lockstep.ZeroRedundancyOptimizer(replica, lr=0.1, shared_parameters="no"))


def distributed_by_torch(rank, size):
    """Modules whose parameters torch itself shares out."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_module, init_device_mesh

    mesh = init_device_mesh("cpu", (size,))
    sharded = nn.Sequential(nn.Linear(4, 4))
    fully_shard(sharded, mesh=mesh)
    for module in (sharded, distribute_module(nn.Linear(4, 4), mesh)):
        raises(TypeError, "weight is a DTensor, which torch distributes over the ranks itself", lockstep.attach, module)
    raises(TypeError, "this module is a FullyShardedDataParallel", lockstep.attach, FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))


def other_timeouts(rank, size):
    group = dist.new_group()
    for timeout in (seconds(seconds=20 + (rank == size - 1)), seconds(seconds=20) if rank == 0 else None):
        raises(lockstep.Error, "give the same one on every rank", lambda: lockstep.attach(network(), group, timeout=timeout))
    model = network()
    lockstep.attach(model, group, timeout=seconds(seconds=20))
    backward(model, 0, rank)
    equal_on_all_ranks([p.grad for p in model.parameters()])


def compiled_autograd(rank, size):
    """Would compile the hooks. A compiled forward is another matter."""
    model = nn.Sequential(nn.Linear(20, 5))
    lockstep.attach(model)
    loss = model(torch.ones(1, 20)).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        raises(RuntimeError, "compiled autograd cannot run this backward", loss.backward)
    model.zero_grad()
    backward(model, 0, rank)
    equal_on_all_ranks([p.grad for p in model.parameters()])


def clipped_as_by_torch(rank, size):
    """clip_grad_norm_() has the arguments, the effect and the result of torch's."""
    for norm_type in (2.0, 1.0, float("inf")):
        model = network()
        replica = lockstep.attach(model)
        single = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        for parameter, gradient in zip(single, mean_gradients(model, 0, size)):
            parameter.grad = gradient
        backward(model, 0, rank)
        expected = nn.utils.clip_grad_norm_(single, 1e-3, norm_type)
        norm = replica.clip_grad_norm_(model.parameters(), 1e-3, norm_type)
        assert (norm.shape, norm.dtype) == (expected.shape, expected.dtype), norm
        close(norm, expected, tolerance=1e-5)
        for one, other in zip(model.parameters(), single):
            close(one.grad, other.grad)
        replica.detach()
    model = network()
    replica = lockstep.attach(model)
    model[5].bias.register_hook(lambda gradient: gradient * float("nan"))
    backward(model, 0, rank)
    raises(RuntimeError, "cannot be clipped", lambda: replica.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True))


def plain_modules(rank, size):
    """An attached module can be saved, scripted and called with other parameters, as any other."""
    model = network()
    lockstep.attach(model)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.pt")
        torch.save(model, path)
        program = ("import sys; sys.modules['lockstep'] = None; import torch; "
                   f"model = torch.load({path!r}, weights_only=False); print(model(torch.ones(2, 20)).shape)")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60,
                              env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
        assert "torch.Size([2, 5])" in done.stdout, done.stderr
    model.eval()
    inputs = torch.randn(4, 20)
    for one in (model, copy.deepcopy(model)):
        scripted = torch.jit.script(one)
        buffer = io.BytesIO()
        torch.jit.save(scripted, buffer)
        close(scripted(inputs), model(inputs))
    model.train()
    for values in ({name: p.detach().clone() for name, p in model.named_parameters()},
                   {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}):
        torch.func.functional_call(model, values, (inputs,))
    # Weights that are computed from the parameters: their gradients arrive at these, and are averaged.
    halves = {name: p * 0.5 for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, halves, (inputs * (rank + 1),)).square().sum()
    loss.backward()
    equal_on_all_ranks([p.grad for p in model.parameters()])


def edits(rank, size):
    """No forward goes through a hook of ours: torch tells what modules register, and optimizers' steps look for the rest."""
    model = nn.Sequential(nn.Linear(20, 5))
    replica = lockstep.attach(model)
    model[0] = nn.Linear(20, 5)  # nothing that the replica follows is left
    raises(lockstep.Error, "0.weight was added or replaced", backward, model, 0, rank)
    replica.refresh()
    model[0].weight = nn.Parameter(torch.ones(5, 20))
    raises(lockstep.Error, "0.weight was added or replaced", backward, model, 0, rank)
    replica.refresh()
    model.append(nn.Sequential())
    backward(model, 0, rank)  # no tensor came with it
    model[1].append(nn.Linear(5, 5))
    raises(lockstep.Error, "1.0.weight was added", backward, model, 0, rank)
    replica.refresh()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward(model, 1, rank)
    del model[1]
    optimizer.step()
    raises(lockstep.Error, "1.0.weight was removed", backward, model, 1, rank)
    replica.refresh()
    model[0].register_buffer("mask", torch.ones(2))
    raises(lockstep.Error, "0.mask was added", backward, model, 1, rank)
    replica.refresh()
    # Freezing needs no refresh(): the parameter counts as unused, until it is thawed again.
    model.zero_grad()
    model[0].bias.requires_grad_(False)
    backward(model, 2, rank)
    assert model[0].bias.grad is None
    model[0].bias.requires_grad_(True)
    backward(model, 3, rank)
    equal_on_all_ranks([p.grad for p in model.parameters()])


def late_hooks(rank, size):
    """Python's first hook on a tensor drops those of C++, which come back before the next backward."""
    model = nn.Sequential(nn.Linear(20, 5))
    lockstep.attach(model, reduction="sum")
    expected = [size * gradient for gradient in mean_gradients(model, 0, size)]
    backward(model, 0, rank)
    called = []
    threading.Thread(target=lambda: model[0].bias.register_hook(lambda gradient: called.append(1))).start()
    model[0].weight.register_hook(lambda gradient: called.append(1))
    raises(RuntimeError, "torch.autograd.grad", lambda: torch.autograd.grad(model(torch.randn(8, 20)).sum(), model[0].weight))
    called.clear()
    backward(model, 0, rank)  # onto the sum of the first
    assert called == [1, 1], called
    for parameter, gradient in zip(model.parameters(), expected):
        close(parameter.grad, 2 * gradient)


def threads(rank, size):
    """Two threads, each with a module and a group, that come in another order on each rank."""
    for backend in ("lockstep", "gloo"):
        groups = [dist.new_group(backend=backend) for _ in range(2)]
        models = [network() for _ in groups]
        first, failures = threading.Event(), []

        def attach(i):
            try:
                if i != rank % 2:
                    first.wait(0.5)
                lockstep.attach(models[i], groups[i])
            except Exception as error:
                failures.append(error)

        both = [threading.Thread(target=attach, args=(i,)) for i in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join(30)
        assert not failures and not any(thread.is_alive() for thread in both), failures
        for model in models:
            backward(model, 0, rank)
            equal_on_all_ranks([p.grad for p in model.parameters()])


def shows(rank, size):
    model = network()
    replica = lockstep.attach(model)
    assert repr(replica) == f"<lockstep.Replica of Sequential, rank {rank} of {size}>", repr(replica)
    replica.detach()
    assert "detached" in repr(replica)
    assert {"attach", "Replica", "ZeroRedundancyOptimizer", "Error", "register"} <= set(dir(lockstep))
    assert "wait_ms" in lockstep.Replica.stats.__doc__


def everything(rank, size):
    for function in (unknown_to_ignore, other_reducers, other_optimizers, arguments, wrong_types, other_timeouts, compiled_autograd, clipped_as_by_torch, plain_modules, edits, late_hooks, threads, shows, changed_gradients, distributed_by_torch):
        function(rank, size)
