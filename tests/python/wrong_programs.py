"""Wrong and odd programs with attach(), for wrong_programs_test.py: each is called as function(rank, size, group) with a group of
its own, in which an error ends nobody else's. Whatever is wrong is an error on all ranks, within seconds; what is merely odd
has the right numbers."""

import contextlib
import copy
import datetime
import io
import threading

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from attach_programs import backward, close, mean_gradients, network, raises


def equal(tensors, group):
    for tensor in tensors:
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, tensor.detach(), group=group)
        assert all(torch.equal(one, everyone[0]) for one in everyone)


def gradients_are_means(model, expected):
    for parameter, gradient in zip(model.parameters(), expected):
        close(parameter.grad, gradient)


def attached(group, model=None, **options):
    model = network() if model is None else model
    return model, lockstep.attach(model, group, **options)


# Attaching.

def a_layer_of_an_attached_module(rank, size, group):
    model, _ = attached(group)
    raises(RuntimeError, "parameter weight is already attached to a Replica", lockstep.attach, model[0], group)


def a_module_that_shares_a_weight(rank, size, group):
    model, _ = attached(group)
    other = nn.Sequential(nn.Linear(20, 300))
    other[0].weight = model[0].weight
    raises(RuntimeError, "parameter 0.weight is already attached to a Replica", lockstep.attach, other, group)


def a_class_and_no_module(rank, size, group):
    raises(TypeError, "takes a torch.nn.Module, not type", lockstep.attach, nn.Linear, group)


def no_group(rank, size, group):
    for wrong in (0, [0, 1], "gloo"):
        raises(TypeError, "group is a group of torch.distributed", lockstep.attach, network(), wrong)


def no_rank_of_the_group(rank, size, group):
    first = dist.new_group([0], backend=dist.get_backend(group))
    if rank == 0:
        model, replica = attached(first)
        assert (replica.rank, replica.world_size) == (0, 1)
    else:
        raises(ValueError, "this process is not a rank of the group", lockstep.attach, network(), first)


def names_in_one_string(rank, size, group):
    raises(TypeError, "parameters_to_ignore is a list of names", lambda: lockstep.attach(network(), group, parameters_to_ignore="0.bias"))
    raises(TypeError, "delay_all_reduce_named_params is a list of names",
           lambda: lockstep.attach(network(), group, delay_all_reduce_named_params="0.bias"))


def other_options_on_one_rank(rank, size, group):
    for options in ({"reduction": "sum"}, {"buffers": "none"}, {"bucket_cap_mb": 3}, {"parameters_to_ignore": ["0.bias"]}):
        raises(lockstep.Error, "rank", lambda: lockstep.attach(network(), group, **(options if rank == 1 else {})))


def senseless_sizes(rank, size, group):
    for value in (-1, float("nan")):
        raises(RuntimeError, "bucket_cap_mb", lambda: lockstep.attach(network(), group, bucket_cap_mb=value))


def a_parameter_without_memory(rank, size, group):
    raises(RuntimeError, "a parameter is on meta", lockstep.attach, nn.Sequential(nn.Linear(3, 3, device="meta")), group)


def other_frozen_parameters(rank, size, group):
    model = network()
    model[rank % 2 * 2].requires_grad_(False)
    raises(lockstep.Error, "do not hold the same model", lockstep.attach, model, group)


# Numbers that are right.

def half_precision(rank, size, group):
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        model, _ = attached(group, nn.Sequential(nn.Linear(4, 4)).to(dtype))
        loss = model(torch.full((2, 4), rank + 1.0, dtype=dtype)).abs().sum()
        loss.backward()
        equal([torch.view_as_real(p.grad) if dtype.is_complex else p.grad for p in model.parameters()], group)


def part_of_the_ranks(rank, size, group):
    first = dist.new_group([0, 1], backend=dist.get_backend(group))
    model = network()
    expected = mean_gradients(model, 0, 2)
    if rank < 2:
        attached(first, model)
        backward(model, 0, rank)
        gradients_are_means(model, expected)


def two_models_in_turn(rank, size, group):
    one, two = attached(group)[0], attached(group)[0]
    expected = mean_gradients(one, 0, size)
    with torch.no_grad():
        two[0].weight.mul_(2)
    backward(one, 0, rank)
    backward(two, 1, rank)
    gradients_are_means(one, expected)


def lbfgs(rank, size, group):
    model, _ = attached(group)
    model.eval()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        backward(model, 0, rank)
        return sum((p.grad ** 2).sum() for p in model.parameters())

    optimizer.step(closure)
    equal(model.parameters(), group)


def compiled(rank, size, group):
    model, _ = attached(group)
    expected = mean_gradients(model, 0, size)
    backward(torch.compile(model, backend="eager"), 0, rank)
    gradients_are_means(model, expected)


def a_shallow_copy(rank, size, group):
    model, _ = attached(group)
    expected = mean_gradients(model, 0, size)
    backward(copy.copy(model), 0, rank)
    gradients_are_means(model, expected)


def a_graph_kept(rank, size, group):
    model, _ = attached(group, nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)))
    expected = mean_gradients(model, 0, size)
    torch.manual_seed(rank)
    loss = nn.functional.cross_entropy(model(torch.randn(8, 20)), torch.randint(5, (8,)))
    loss.backward(retain_graph=True)
    loss.backward()
    gradients_are_means(model, [2 * gradient for gradient in expected])


def detached_and_attached_again(rank, size, group):
    model, replica = attached(group)
    for step in range(3):
        expected = mean_gradients(model, step, size)
        backward(model, step, rank)
        gradients_are_means(model, expected)
        model.zero_grad()
        replica.detach()
        replica = lockstep.attach(model, group)


def data_replaced(rank, size, group):
    model, _ = attached(group)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    expected = mean_gradients(model, 0, size)
    backward(model, 0, rank)
    gradients_are_means(model, expected)


# Edits.

def assigned_state(rank, size, group):
    model, replica = attached(group)
    model.load_state_dict(network().state_dict(), assign=True)
    raises(lockstep.Error, "0.weight was added or replaced", backward, model, 0, rank)
    replica.refresh()
    backward(model, 1, rank)
    equal([p.grad for p in model.parameters()], group)


def parametrized(rank, size, group):
    model, _ = attached(group)
    nn.utils.parametrizations.weight_norm(model[0])
    raises(lockstep.Error, "0.", backward, model, 0, rank)


def pruned(rank, size, group):
    from torch.nn.utils import prune

    model, _ = attached(group)
    prune.random_unstructured(model[0], "weight", 0.5)
    raises(lockstep.Error, "0.weight", backward, model, 0, rank)


def frozen_on_one_rank(rank, size, group):
    """The other ranks would wait for a gradient, and step a parameter that stays on this rank."""
    model, _ = attached(group)
    if rank == 1:
        model[0].requires_grad_(False)
    raises(lockstep.Error, "parameter 0.weight is frozen (requires_grad_(false)) on rank 1 and not on rank", backward, model, 0, rank)


# Passes.

def no_sync_on_one_rank(rank, size, group):
    model, replica = attached(group)
    with replica.no_sync() if rank == 1 else contextlib.nullcontext():
        if rank == 1:
            backward(model, 0, rank)
    raises(lockstep.Error, "backward", backward, model, 0, rank)


def an_exception_in_no_sync(rank, size, group):
    model, replica = attached(group)
    with contextlib.suppress(ZeroDivisionError), replica.no_sync():
        1 / 0
    expected = mean_gradients(model, 0, size)
    backward(model, 0, rank)
    gradients_are_means(model, expected)


def other_accumulation(rank, size, group):
    model, replica = attached(group)
    for n in (0, -1):
        raises(RuntimeError, "accumulate", lambda: replica.accumulate(n).__enter__())

    def loop():
        with replica.accumulate(2 if rank == 0 else 1):
            for step in range(2):
                backward(model, step, rank)

    raises(lockstep.Error, "backward", loop)


def senseless_numbers(rank, size, group):
    model, replica = attached(group)
    raises(RuntimeError, "lockstep.attach(..., reduction=\"weighted_mean\")", replica.set_weight, 2.0)
    raises(RuntimeError, f"this group has ranks 0 to {size - 1}", replica.broadcast_parameters, 7)
    for weight in (float("nan"), -1.0):
        raises(RuntimeError, "weight", replica.average_parameters, weight)
    raises(ValueError, "'ignore', 'skip', 'raise'", replica.set_non_finite_policy, "never")
    for n in (-1,):
        raises(RuntimeError, "check_divergence_every", replica.check_divergence_every, n)


def a_failure_in_join(rank, size, group):
    model, replica = attached(group)

    def loop():
        backward(model, 0, rank)
        if rank == 1:
            raise ValueError("a bad batch")
        backward(model, 1, rank)

    raises(ValueError if rank == 1 else lockstep.Error, "bad batch" if rank == 1 else "rank 1", replica.join, loop)


def two_threads_in_one_group(rank, size, group):
    """They attach in another order on each rank, so the ranks compare one module with the other."""
    models = [nn.Linear(3, 3), nn.Linear(5, 5)]
    said = []

    def attach(i):
        try:
            lockstep.attach(models[i], group)
        except RuntimeError as error:
            said.append(str(error))

    for i in ((0, 1) if rank % 2 == 0 else (1, 0)):
        thread = threading.Thread(target=attach, args=(i,))
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    assert said, "nobody was told"


# Optimizers.

def sharded(group, kind=torch.optim.AdamW, **options):
    model, replica = attached(group)
    model.eval()
    return model, replica, lockstep.ZeroRedundancyOptimizer(replica, kind, lr=1e-2, **options)


def rates_that_differ(rank, size, group):
    model, _, optimizer = sharded(group)
    optimizer.param_groups[0]["lr"] *= 1 + rank
    backward(model, 0, rank)
    raises(RuntimeError, "would step other parameters", optimizer.step)


def state_loaded_on_one_rank(rank, size, group):
    model, _, optimizer = sharded(group)
    backward(model, 0, rank)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    backward(model, 1, rank)
    optimizer.step()
    if rank == 1:
        optimizer.load_state_dict(state)
    backward(model, 2, rank)
    raises(RuntimeError, "would step other parameters", optimizer.step)


def scaled_loss(rank, size, group):
    weights = []
    for enabled in (True, False):
        model, _, optimizer = sharded(group)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
        torch.manual_seed(rank)
        scaler.scale(model(torch.randn(8, 20)).square().mean()).backward()
        scaler.step(optimizer)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    equal(weights[0], group)
    for scaled, plain in zip(*weights):
        close(scaled, plain)


def a_step_without_backward(rank, size, group):
    model, _, optimizer = sharded(group)
    if rank == 0:
        backward(model, 0, rank)
    raises(RuntimeError, "backward", optimizer.step)


def optimizers_that_are_not_known(rank, size, group):
    model, replica = attached(group)
    raises(TypeError, "not Adagrad", lambda: lockstep.ZeroRedundancyOptimizer(replica, torch.optim.Adagrad, lr=1e-2))
    raises(TypeError, "given together with an optimizer",
           lambda: lockstep.ZeroRedundancyOptimizer(replica, torch.optim.SGD(model.parameters(), 0.1), lr=0.1))
    raises(RuntimeError, "5.bias", lambda: lockstep.ZeroRedundancyOptimizer(replica, torch.optim.SGD(list(model.parameters())[:-1], 0.1)))
    raises(ValueError, "maximize", lambda: lockstep.ZeroRedundancyOptimizer(replica, torch.optim.SGD, lr=0.1, maximize=True))


def saved_and_loaded(rank, size, group):
    model, _, optimizer = sharded(group)
    backward(model, 0, rank)
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    other = network()
    other.load_state_dict(saved["model"])
    plain = torch.optim.AdamW(other.parameters(), 1e-2)
    plain.load_state_dict(saved["optimizer"])
    expected = mean_gradients(model, 1, size)
    for parameter, gradient in zip(other.parameters(), expected):
        parameter.grad = gradient
    plain.step()
    optimizer.zero_grad()
    backward(model, 1, rank)
    optimizer.step()
    for one, two in zip(model.parameters(), other.parameters()):
        close(one.detach(), two.detach(), tolerance=1e-4)
    raises(TypeError, "cannot be pickled", torch.save, lockstep.attach(network(), group), io.BytesIO())


def frozen_under_the_optimizer(rank, size, group):
    model, _, optimizer = sharded(group)
    before = model[0].weight.detach().clone()
    model[0].requires_grad_(False)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step, rank)
        optimizer.step()
    assert torch.equal(model[0].weight, before)
    equal(model.parameters(), group)


PROGRAMS = [value for name, value in list(globals().items())
            if getattr(value, "__module__", None) == __name__ and callable(value) and name not in ("equal", "gradients_are_means", "attached", "sharded")]


def everything(rank, size):
    for program in PROGRAMS:
        torch.manual_seed(0)
        program(rank, size, dist.new_group(timeout=datetime.timedelta(seconds=30)))
