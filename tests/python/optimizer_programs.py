"""What ranks do in attach_test.py with ZeroRedundancyOptimizer: functions of (rank, size), as in attach_programs.py."""

import copy
import gc
import hashlib

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from attach_programs import backward, close, equal_on_all_ranks, loss_of, mean_gradients, network, raises

KINDS = [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}), (torch.optim.SGD, {"lr": 0.1}),
         (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 1e-2}), (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True})]


def reference(kind, options, size, steps, max_norm=None):
    """The module and torch's optimizer after `steps` steps of one process with the ranks' mean gradients."""
    model = network()
    model.eval()
    optimizer = kind(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        for parameter, gradient in zip(model.parameters(), mean_gradients(model, step, size)):
            parameter.grad = gradient
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
    return model, optimizer


def train(model, optimizer, rank, steps, replica=None, max_norm=None):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step, rank)
        if max_norm is not None:
            norm = replica.clip_grad_norm(max_norm) if step % 2 else replica.clip_grad_norm_(model.parameters(), max_norm)
            assert norm > max_norm
        optimizer.step()
        scheduler.step()


def equals(model, expected, tolerance=1e-5):
    for (name, one), other in zip(model.named_parameters(), expected.parameters()):
        close(one.detach(), other.detach(), name, tolerance)
    equal_on_all_ranks(model.parameters())


def steps(rank, size):
    """As torch's optimizer in one process, with a schedule; parameters once for all ranks or on each."""
    for kind, options in KINDS:
        for shared in (False, True):
            model = network()
            model.eval()
            replica = lockstep.attach(model, bucket_cap_mb=0.05)
            optimizer = lockstep.ZeroRedundancyOptimizer(replica, kind, shared_parameters=shared, **options)
            train(model, optimizer, rank, 5)
            expected, _ = reference(kind, options, size, 5)
            assert optimizer.param_groups[0]["lr"] == options["lr"] / 4
            equals(model, expected)
            optimizer = replica = None


def clipped(rank, size):
    kind, options = KINDS[3]
    model = network()
    model.eval()
    replica = lockstep.attach(model)
    train(model, lockstep.ZeroRedundancyOptimizer(replica, kind, **options), rank, 4, replica, max_norm=0.05)
    equals(model, reference(kind, options, size, 4, max_norm=0.05)[0])


def same_state(one, other):
    assert one["param_groups"] == other["param_groups"], (one["param_groups"], other["param_groups"])
    assert one["state"].keys() == other["state"].keys()
    for index, state in other["state"].items():
        assert one["state"][index].keys() == state.keys(), (one["state"][index].keys(), state.keys())
        for name, value in state.items():
            close(one["state"][index][name], value, f"{index} {name}", 1e-5)


def states(rank, size):
    """state_dict() is that of torch's optimizer, on every rank all of it; each loads the other's."""
    for kind, options in (KINDS[0], KINDS[2], KINDS[3]):
        expected, torchs = reference(kind, options, size, 3)
        model = network()
        model.eval()
        replica = lockstep.attach(model)
        optimizer = lockstep.ZeroRedundancyOptimizer(replica, kind, **options)
        train(model, optimizer, rank, 3)
        saved = copy.deepcopy(optimizer.state_dict())
        same_state(saved, torchs.state_dict())
        kind(network().parameters(), **options).load_state_dict(saved)
        # From torch's state on both go the same way; made from an optimizer with its state, too.
        model.load_state_dict(expected.state_dict())
        again = kind(model.parameters(), **options)
        again.load_state_dict(torchs.state_dict())
        optimizer.load_state_dict(torchs.state_dict())
        for one in (optimizer, lambda: lockstep.ZeroRedundancyOptimizer(replica, again)):
            one = one if one is optimizer else one()
            weights = copy.deepcopy(model.state_dict())
            one.zero_grad()
            gradient = mean_gradients(model, 7, size)
            backward(model, 7, rank)
            one.step()
            plain = network()
            plain.load_state_dict(weights)
            plain_optimizer = kind(plain.parameters(), **options)
            plain_optimizer.load_state_dict(torchs.state_dict())
            for parameter, mean in zip(plain.parameters(), gradient):
                parameter.grad = mean
            plain_optimizer.step()
            equals(model, plain)
            model.load_state_dict(weights)


def groups(rank, size):
    """Parameter groups of their own options, some of them frozen."""
    model = network()
    model.eval()
    model[3].requires_grad_(False)
    lists = [{"params": [p for p in model.parameters() if p.dim() > 1]},
             {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 1e-3}]
    replica = lockstep.attach(model)
    frozen = model[3].weight.clone()
    optimizer = lockstep.ZeroRedundancyOptimizer(replica, torch.optim.AdamW(lists, lr=1e-2, weight_decay=0.1))
    plain = copy.deepcopy(model)
    other = torch.optim.AdamW([{**group, "params": [p for p in plain.parameters() if (p.dim() > 1) == (i == 0)]}
                               for i, group in enumerate(lists)], lr=1e-2, weight_decay=0.1)
    for step in range(3):
        for p in plain.parameters():
            p.grad = None
        trained = [p for p in plain.parameters() if p.requires_grad]
        means = []
        for r in range(size):
            one = copy.deepcopy(plain)
            backward(one, step, r)
            means.append([p.grad for p in one.parameters() if p.requires_grad])
        for parameter, parts in zip(trained, zip(*means)):
            parameter.grad = sum(parts) / size
        other.step()
        optimizer.zero_grad()
        backward(model, step, rank)
        optimizer.step()
    equals(model, plain)
    assert torch.equal(model[3].weight, frozen)


def scaled(rank, size):
    """torch's GradScaler: steps as without it, and a step that all ranks leave out when one of them has found infinity."""
    kind, options = KINDS[0]
    for clips in (False, True):
        model = network()
        model.eval()
        replica = lockstep.attach(model)
        optimizer = lockstep.ZeroRedundancyOptimizer(replica, kind, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(-1, 4):  # the first overflows on the last rank
            optimizer.zero_grad()
            loss = loss_of(model, max(step, 0), rank)
            before = [p.detach().clone() for p in model.parameters()]
            scaler.scale(loss * float("inf") if step < 0 and rank == size - 1 else loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                replica.clip_grad_norm(0.05)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 128.0, scaler.get_scale()
            if step >= 0:
                scheduler.step()
            else:
                assert all(torch.equal(one, other) for one, other in zip(before, model.parameters()))
        equals(model, reference(kind, options, size, 4, max_norm=0.05 if clips else None)[0])


def loaded_by_all(rank, size):
    """Parameters that exist once, into which every rank loads a state: the same, another one, or a part where the rest is wrong."""
    def other(seed):
        state = network().state_dict()
        torch.manual_seed(seed)
        return {name: torch.randn_like(value) if value.is_floating_point() else value for name, value in state.items()}

    model = network()
    replica = lockstep.attach(model)
    optimizer = lockstep.ZeroRedundancyOptimizer(replica, torch.optim.SGD, lr=0.1, shared_parameters=True)
    states = [other(7), other(8)]
    for state in states:
        dist.barrier()
        model.load_state_dict(state)
        optimizer.zero_grad()
        expected = {name: value.clone() for name, value in model.named_parameters()}
        for gradient, name in zip(mean_gradients(model, 0, size), expected):
            expected[name] = expected[name] - 0.1 * gradient
        backward(model, 0, rank)
        optimizer.step()
        for name, parameter in model.named_parameters():
            close(parameter.detach(), expected[name], name, 1e-5)
    dist.barrier()
    model.load_state_dict(states[0 if rank == 0 else 1])
    optimizer.zero_grad()
    raises(lockstep.Error, " loaded", lambda: (backward(model, 0, rank), optimizer.step()))  # the backward may come too early to notice
    replica.detach()
    model.load_state_dict(states[0])
    replica = lockstep.attach(model)
    optimizer = lockstep.ZeroRedundancyOptimizer(replica, torch.optim.SGD, lr=0.1, shared_parameters=True)
    with torch.no_grad():
        model[0].weight.add_(1)
    dist.barrier()
    broken = {name: value for name, value in states[0].items() if name != "0.weight"}
    model.load_state_dict(broken, strict=False)
    raises(lockstep.Error, "parameters were changed, but not by step()", backward, model, 0, rank)
    dist.barrier()
    model.load_state_dict(states[0])
    optimizer.zero_grad()
    backward(model, 0, rank)
    optimizer.step()
    equal_on_all_ranks(model.parameters())


def refused_scalers(rank, size):
    model = network()
    replica = lockstep.attach(model)
    optimizer = lockstep.ZeroRedundancyOptimizer(replica, torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0 if rank == 0 else 128.0)
    scaler.scale(loss_of(model, 0, rank)).backward()
    raises(lockstep.Error, "the ranks have different scales, from 128 to 256", scaler.step, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0, rank)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # torch's
    raises(lockstep.Error, "clip_grad_norm", scaler.step, optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0, rank)).backward()
    replica.clip_grad_norm(1.0)
    raises(RuntimeError, "call scaler.unscale_(optimizer) before it", scaler.unscale_, optimizer)


def refusals(rank, size):
    model = network()
    replica = lockstep.attach(model)
    raises(TypeError, "not Adagrad", lockstep.ZeroRedundancyOptimizer, replica, torch.optim.Adagrad)
    raises(ValueError, "maximize=True", lambda: lockstep.ZeroRedundancyOptimizer(replica, torch.optim.SGD, lr=0.1, maximize=True))
    raises(RuntimeError, "trained by the model and in none of the parameter groups", lockstep.ZeroRedundancyOptimizer, replica,
           torch.optim.SGD([model[0].weight], 0.1))
    optimizer = lockstep.ZeroRedundancyOptimizer(replica, lr=1e-2)
    raises(RuntimeError, "make another", optimizer.add_param_group, {"params": [torch.zeros(2, requires_grad=True)]})
    optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    backward(model, 0, rank)
    raises(lockstep.Error, "rank", optimizer.step)


def ends(rank, size):
    """The parameters have memory of their own again, whoever goes first."""
    model = network()
    replica = lockstep.attach(model)
    optimizer = lockstep.ZeroRedundancyOptimizer(replica, lr=1e-2, shared_parameters=True)
    backward(model, 0, rank)
    optimizer.step()
    kept = copy.deepcopy(model.state_dict())
    replica.detach()
    raises(RuntimeError, "was detached", optimizer.step)
    assert optimizer.state_dict()["state"][0]["step"] == 1
    with torch.no_grad():
        model[0].weight.add_(rank)
    close(model[0].weight.detach(), kept["0.weight"] + rank)
    replica = lockstep.attach(model)
    optimizer = lockstep.ZeroRedundancyOptimizer(replica, torch.optim.SGD, lr=0.1)
    model = replica = None
    gc.collect()
    optimizer = None
    gc.collect()


def trained(rank, size):
    """The bits of the weights after some steps, and of what is remembered of them."""
    kind, options = KINDS[3]
    model = network()
    replica = lockstep.attach(model, bucket_cap_mb=0.05)
    optimizer = lockstep.ZeroRedundancyOptimizer(replica, kind, shared_parameters=True, **options)
    train(model, optimizer, rank, 4)
    state = optimizer.state_dict()["state"]
    return hash_of([*model.parameters(), *(value for of_one in state.values() for value in of_one.values())])


def hash_of(tensors):
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def on_several_machines(rank, size):
    for function in (steps, clipped, scaled, states, groups, refusals, ends):
        function(rank, size)


def everything(rank, size):
    for function in (steps, clipped, scaled, refused_scalers, loaded_by_all, states, groups, refusals, ends):
        function(rank, size)
