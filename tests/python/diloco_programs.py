"""What one rank runs with lockstep.DiLoCo. Ranks are on one machine or on several, which the letters in LOCKSTEP_MACHINE tell apart."""

import copy
import os
import time

import torch
import torch.distributed as dist

import lockstep

H, STEPS = 4, 12


def network(seed=3):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 19), torch.nn.Tanh(), torch.nn.Linear(19, 5))


def loss_of(model, step, rank):
    torch.manual_seed(1000 * step + rank)
    data = torch.randn(6, 7)
    return (model(data) - data[:, :5].square()).square().mean()


def machines():
    """The ranks of each machine, in the order of their first ranks."""
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, os.environ.get("LOCKSTEP_MACHINE", ""))
    return [[rank for rank, other in enumerate(names) if other == name] for name in dict.fromkeys(names)]


def machine_of(rank):
    """Every rank makes all groups."""
    return next(group for ranks, group in [(ranks, dist.new_group(ranks)) for ranks in machines()] if rank in ranks)


class Training:
    def __init__(self, rank, **options):
        self.rank, self.model = rank, network(seed=rank)
        self.replica = lockstep.attach(self.model, machine_of(rank))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.diloco = lockstep.DiLoCo(self.replica, sync_every=H, **options)
        self.synchronised = []

    def steps(self, begin, end):
        for step in range(begin, end):
            self.optimizer.zero_grad()
            loss_of(self.model, step, self.rank).backward()
            self.optimizer.step()
            self.synchronised.append(self.diloco.step())


def bits_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def assert_equal_everywhere(tensor):
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor)
    for rank, other in enumerate(everyones):
        assert torch.equal(other, tensor), f"rank {rank} has other parameters"


def by_hand(ranks_of):
    """The same training in one process, by torch's own SGD. `ranks_of`: by machine."""
    outer = network(seed=0)
    outer_optimizer = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    models = [copy.deepcopy(outer) for _ in ranks_of]
    for step in range(STEPS):
        for ranks, model in zip(ranks_of, models):
            model.zero_grad()
            (sum(loss_of(model, step, rank) for rank in ranks) / len(ranks)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        if (step + 1) % H == 0:
            with torch.no_grad():
                for target, *own in zip(outer.parameters(), *(model.parameters() for model in models)):
                    target.grad = sum(target - each for each in own) / len(own)
                outer_optimizer.step()
                for model in models:
                    for parameter, target in zip(model.parameters(), outer.parameters()):
                        parameter.copy_(target)
    return outer


def equals_the_definition(rank, size):
    training = Training(rank)
    training.steps(0, STEPS)
    assert training.synchronised == [(step + 1) % H == 0 for step in range(STEPS)], training.synchronised
    stats = training.diloco.stats()
    ranks_of = machines()
    assert (stats.steps, stats.rounds, stats.took_part) == (STEPS, STEPS // H, [True] * len(ranks_of)), stats
    assert stats.rounds_by_machine == [STEPS // H] * len(ranks_of)
    sent = torch.tensor(stats.bytes_sent)
    dist.all_reduce(sent)  # ranks without a slice send nothing
    assert (sent.item() > 0) == (len(ranks_of) > 1) and stats.wait_seconds >= 0
    assert_equal_everywhere(bits_of(training.model))
    torch.testing.assert_close(bits_of(training.model), bits_of(by_hand(ranks_of)), rtol=1e-5, atol=1e-6)


def goes_on_from_its_state(rank, size):
    """In the middle of a round, with fragments on their way: the bits of the undisturbed run."""
    options = dict(fragments=2, overlap_steps=1, wire="int8", error_feedback=True)
    training = Training(rank, **options)
    training.steps(0, STEPS)
    training.diloco.finish()
    expected = bits_of(training.model)
    assert_equal_everywhere(expected)

    first = Training(rank, **options)
    first.steps(0, 6)
    state = {name: tensor.clone() for name, tensor in first.diloco.state_dict().items()}
    weights = copy.deepcopy(first.model.state_dict())
    second = Training(rank, **options)
    second.model.load_state_dict(weights)
    assert second.diloco.fits_ranks(state)
    second.diloco.load_state_dict(state)
    second.steps(6, STEPS)
    second.diloco.finish()
    first.steps(6, STEPS)
    first.diloco.synchronise()
    assert torch.equal(bits_of(first.model), expected), "taking a state has changed the run"
    assert torch.equal(bits_of(second.model), expected)


# What tests/diloco/diloco_test.cpp has for the same moves.
BITS_OF_CPP = -3890758992892


def has_the_bits_of_cpp(rank, size):
    """Two machines of one rank, whose parameters are moved by exact numbers in place of a training."""
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.arange(parameter.numel()).view_as(parameter) % 13 - 6) / 16)
    diloco = lockstep.DiLoCo(lockstep.attach(model, machine_of(rank)), sync_every=4, fragments=2, overlap_steps=1, wire="int8", error_feedback=True)
    for step in range(11):
        with torch.no_grad():
            for parameter in model.parameters():
                places = torch.arange(parameter.numel()).view_as(parameter)
                parameter += ((places * 31 + step * 17 + rank * 11) % 101 - 50) / 4096
        diloco.step()
    diloco.finish()
    bits = bits_of(model).view(torch.int32).to(torch.int64)
    total = (bits * (torch.arange(bits.numel()) + 1)).sum().item()
    assert total == BITS_OF_CPP, total


def another_machine_is_told(rank, size):
    """One rank has another option: an Error with both sides on all ranks. Then all have the same, and it works."""
    replica = lockstep.attach(network(), machine_of(rank))
    last = size - 1
    told = {"sync_every": (4, 5), "wire": ("int8", "bf16"), "fragments": (1, 2), "outer_lr": (0.5, 0.25), "nesterov": (True, False), "max_nonfinite_rounds": (3, 9)}
    for name, (mine, others) in told.items():
        text = error_of(lambda: lockstep.DiLoCo(replica, **{name: others if rank == last else mine}))
        both = [f"`{name} {int(value) if isinstance(value, bool) else value}`" for value in (mine, others)]
        assert text.startswith("Error: ") and all(side in text for side in both) and f"on rank {last}" in text, text
    lockstep.DiLoCo(replica).finish()


def another_model_is_told(rank, size):
    model = network()
    if rank == size - 1:
        model[2] = torch.nn.Linear(19, 6)
    replica = lockstep.attach(model, machine_of(rank))
    text = error_of(lambda: lockstep.DiLoCo(replica))
    assert text.startswith("Error: the ranks do not hold the same model: parameter 2 is `2.weight: Float [5, 19] on cpu`"), text


def is_killed(rank, size):
    """Rank 1 dies in a round, and the others hear of it at their next one. Returns how long they waited, and what they were told."""
    training = Training(rank)
    training.steps(0, H)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    text = error_of(lambda: training.steps(H, 2 * H))
    assert text.startswith("Error: ") and "rank 1" in text, text
    return time.monotonic() - start


def error_of(call):
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def misuse(rank, size):
    model = network()
    assert error_of(lambda: lockstep.DiLoCo(model)).startswith("TypeError: lockstep.DiLoCo takes the Replica")
    replica = lockstep.attach(model, machine_of(rank))
    assert "wire is 'int3'; it must be one of 'fp32', 'bf16', 'int8', 'int4'" in error_of(lambda: lockstep.DiLoCo(replica, wire="int3"))
    for options, words in ((dict(sync_every=0), "RuntimeError: DiLoCo: sync_every is 0; it is a number of steps"),
                           (dict(fragments=5), "RuntimeError: DiLoCo: fragments is 5; it must be from 1 to the number of parameters"),
                           (dict(overlap_steps=100), "RuntimeError: DiLoCo: overlap_steps is 100; it must be at least 0 and below sync_every"),
                           (dict(mixing=2), "RuntimeError: DiLoCo: mixing is 2"), (dict(outer_lr=float("nan")), "RuntimeError: DiLoCo: outer_lr is nan"),
                           (dict(outer_momentum=1), "RuntimeError: DiLoCo: outer_momentum is 1"),
                           (dict(max_nonfinite_rounds=0), "RuntimeError: DiLoCo: max_nonfinite_rounds is 0; it is a number of rounds, at least 1"),
                           (dict(sync_every=2.5), "TypeError: DiLoCo: sync_every is 2.5, of type float; it must be an int"),
                           (dict(sync_every=2**70), "ValueError: DiLoCo: sync_every is"),
                           (dict(mixing="half"), "TypeError: DiLoCo: mixing is 'half', of type str; it must be a number"),
                           (dict(error_feedback="yes"), "TypeError: DiLoCo: error_feedback is 'yes', of type str; it must be True or False"),
                           (dict(group=3), "TypeError: ")):
        text = error_of(lambda: lockstep.DiLoCo(replica, **options))
        assert text.startswith(words) and "Options" not in text, text
    everywhere = lockstep.attach(network())
    text = error_of(lambda: lockstep.DiLoCo(everywhere))
    assert size == 4 and "the model of ranks 0-3 is replicated over several machines" in text and "lockstep.attach(model, machine)" in text, text
    text = error_of(lambda: lockstep.DiLoCo(replica, machine_of(rank)))
    assert "its group has the 2 ranks of one machine, and the default group has 4, so nothing would synchronise the machines" in text, text
    wide = lockstep.attach(network().double(), machine_of(rank))
    assert "parameter 0.weight is Double" in error_of(lambda: lockstep.DiLoCo(wide))
    diloco = lockstep.DiLoCo(replica)
    assert "already has a DiLoCo" in error_of(lambda: lockstep.DiLoCo(replica))
    state = diloco.state_dict()
    assert "no number `step`" in error_of(lambda: diloco.load_state_dict({name: t for name, t in state.items() if name != "step"}))
    assert "the list of the ranks' states is empty" in error_of(lambda: diloco.load_from_ranks([]))
    assert "DiLoCo.load_state_dict(): state is None; it must be a dict of tensors" in error_of(lambda: diloco.load_state_dict(None))
    assert "DiLoCo.load_from_ranks(): states[0] is 3, of type int" in error_of(lambda: diloco.load_from_ranks([3]))
    assert "DiLoCo.fits_ranks(): state['step'] is 1, of type int; it must be a tensor" in error_of(lambda: diloco.fits_ranks({"step": 1}))
    diloco.load_state_dict(state)
    replica.detach()
    assert "was detached" in error_of(diloco.step)
    assert "was detached" in error_of(lambda: lockstep.DiLoCo(replica))
