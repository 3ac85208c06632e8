"""attach(): what keeps the copies of a module that the ranks train in step."""

import atexit
import contextlib
import datetime
import os
import weakref
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
import torch.distributed as dist

import lockstep

_C = lockstep._extension()

Error = _C.Error

_groups: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()  # by torch's process group
_replicas: "weakref.WeakSet[Replica]" = weakref.WeakSet()
_alone: Any = None
_TIMEOUT = datetime.timedelta(minutes=30)  # of one collective, as torch's; `lockstep run` finds ranks that hang sooner


def attach(module: torch.nn.Module, group: Optional[dist.ProcessGroup] = None, *, first_bucket_cap_mb: float = 1,
           bucket_cap_mb: float = 25, reduction: str = "mean", buffers: str = "follow_rank_zero",
           init_sync: bool = True, delay_all_reduce_named_params: Sequence[str] = (),
           parameters_to_ignore: Sequence[str] = (), keep_freed_memory: bool = True) -> "Replica":
    """Trains one module on all ranks: after every backward, each parameter's .grad is the mean over the ranks.

        model = Net()
        lockstep.attach(model)
        optimizer = torch.optim.AdamW(model.parameters())
        ...                                               # the loop of one process

    The module is not wrapped: its names, its state_dict() and its methods stay as they were, and an optimizer may be
    made before or after. Parameters that a rank does not use, and graphs that change, need no option. The module keeps
    the Replica that this returns until detach(); whoever wants its methods keeps it, too.

    Every rank calls it, with the same module and options; the ranks' parameters are compared, and set to rank 0's.
    `group` is one of torch.distributed; without it the default group, which is made if the environment names ranks
    (`lockstep run`, torchrun), else this process alone. Parameters are on the CPU. Ranks may be on several machines if
    their environment has MASTER_ADDR, as those launchers set it.

    reduction: "mean", "sum" or "weighted_mean" (Replica.set_weight). buffers: "follow_rank_zero", "mean" or "none".
    """
    options = dict(first_bucket_cap_mb=first_bucket_cap_mb, bucket_cap_mb=bucket_cap_mb,
                   reduction=_choice(_C.GradientReduction, "reduction", reduction),
                   buffers=_choice(_C.BufferPolicy, "buffers", buffers), init_sync=init_sync,
                   delay_all_reduce_named_params=list(delay_all_reduce_named_params),
                   parameters_to_ignore=list(parameters_to_ignore), keep_freed_memory=keep_freed_memory)
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"lockstep.attach() takes a torch.nn.Module, not {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("lockstep.attach(): scripted modules take no hooks; attach to the module that this one was made from")
    return Replica(module, _group_of(group), options)


class Replica:
    """A module that is trained on all ranks; attach() makes it. Call methods between backward passes, on one thread.

    Errors are lockstep.Error, a RuntimeError, also from backward(), and on all ranks that they concern.
    """

    def __init__(self, module: torch.nn.Module, group: Any, options: dict):
        self._group = group
        self._core = _C.Replica(module, group, options)
        self._optimizers: "weakref.WeakSet[Any]" = weakref.WeakSet()
        self._module = weakref.ref(module)
        self._hook = module.register_forward_pre_hook(_BeforeForward(self))
        _replicas.add(self)

    def detach(self) -> None:
        """Leaves the module as it is; its gradients stay with each rank from now on. May be called again."""
        for optimizer in list(self._optimizers):
            optimizer._detach()
        self._hook.remove()
        self._core = _Detached()

    @property
    def rank(self) -> int:
        return self._group.rank()

    @property
    def world_size(self) -> int:
        return self._group.world_size()

    @property
    def module(self) -> Optional[torch.nn.Module]:
        """None once it is gone."""
        return self._module()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of the backward passes within stay on each rank; the first backward after it reduces them."""
        guard = self._core.no_sync()
        try:
            yield
        finally:
            guard.end()

    @contextlib.contextmanager
    def accumulate(self, n: int) -> Iterator["Replica"]:
        """Within, only every n-th backward reduces gradients; step_complete() says whether the last one did."""
        guard = self._core.accumulate(n)
        try:
            yield self
        finally:
            guard.end()

    def step_complete(self) -> bool:
        """Whether the last backward reduced gradients, so that it is time for optimizer.step() and zero_grad()."""
        return self._core.step_complete()

    def reduce_gradients(self) -> None:
        """Reduces what no_sync() or accumulate() left in .grad, without a backward. Every rank calls it."""
        self._core.reduce_gradients()

    def skip_step(self) -> None:
        """In place of a backward that failed: leaves this rank out of the others' next mean."""
        self._core.skip_step()

    def set_weight(self, weight: float) -> None:
        """With reduction="weighted_mean": the weight (samples, tokens) of this rank's next gradients."""
        self._core.set_weight(weight)

    def join(self, body: Callable[[], None], *, divide_by_initial_world_size: bool = True,
             throw_on_early_termination: bool = False, shadow: Optional[Callable[[], None]] = None) -> None:
        """Runs `body`, a loop over inputs of which some ranks may have fewer. Every rank calls it.

        A rank whose body has returned takes part in the others' reductions, without a gradient, until all have
        returned; then every rank gets the parameters and buffers of the last rank that had inputs. `shadow` runs on it
        after each of those reductions: put the optimizer's step there if its state should follow.
        """
        self._core.join(body, divide_by_initial_world_size, throw_on_early_termination, shadow)

    def broadcast_parameters(self, root: int = 0) -> None:
        """Sets every parameter and buffer to rank `root`'s. Every rank calls it."""
        self._core.broadcast_parameters(root)

    def average_parameters(self, weight: float = 1) -> None:
        """Sets parameters and floating-point buffers to the mean over the ranks, weighted. Every rank calls it."""
        self._core.average_parameters(weight)

    def refresh(self) -> None:
        """Attaches to the module as it is now, after an edit or a change of requires_grad. Every rank calls it."""
        self._core.refresh()

    def check_divergence(self) -> None:
        """Compares all parameters and buffers, bit by bit; the Error names the tensor and the odd rank out."""
        self._core.check_divergence()

    def check_divergence_every(self, every_n_steps: int) -> None:
        """The same after every n-th reduction; 0: never."""
        self._core.check_divergence_every(every_n_steps)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """As torch.nn.utils.clip_grad_norm_; with a ZeroRedundancyOptimizer it takes its place, on every rank."""
        return self._core.clip_grad_norm(max_norm, norm_type)

    def set_non_finite_policy(self, policy: str) -> None:
        """What a step with infinity or NaN in a gradient does on all ranks: "ignore", "skip" or "raise"."""
        self._core.set_non_finite_policy(_choice(_C.NonFinitePolicy, "policy", policy))

    def skipped_steps(self) -> int:
        """Steps without a gradient on any rank."""
        return self._core.skipped_steps()

    def stats(self) -> Any:
        """What reductions have cost so far: a ReductionStats."""
        return self._core.stats()

    def set_rank_comparison(self, on: bool) -> None:
        """Whether stats() says which rank is late. Every rank calls it."""
        self._core.set_rank_comparison(on)

    def communication_seconds(self) -> float:
        """How long this rank has waited for communication: the part not hidden behind backward."""
        return self._core.communication_seconds()

    def bucket_parameters(self) -> list:
        """Names of the parameters in each bucket, in the order in which buckets are reduced."""
        return self._core.bucket_parameters()

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> Any:
        raise TypeError("a lockstep.Replica belongs to its process and cannot be pickled; save the module's state_dict()")


class _BeforeForward:
    """The module's hook: notices an edit before the ranks compute different things. A copy of the module has a copy
    that does nothing, since nobody has attached to it."""

    def __init__(self, replica: Optional[Replica] = None):
        self.replica = replica

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        if self.replica is not None and not torch.compiler.is_compiling():
            self.replica._core.look()

    def __deepcopy__(self, memo: dict) -> "_BeforeForward":
        return _BeforeForward()

    def __reduce__(self) -> Any:
        return _BeforeForward, ()


class _Detached:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name}: this Replica was detached from its module; attach again")


def _choice(kind: Any, option: str, value: str) -> Any:
    choices = kind.__members__
    if value not in choices:
        raise ValueError(f"{option} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return choices[value]


def _group_of(group: Optional[dist.ProcessGroup]) -> Any:
    """The group of the C++ library that belongs to one of torch's."""
    global _alone
    if group is None:
        if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group("lockstep")
        if not dist.is_initialized():
            _alone = _alone if _alone is not None and _alone.is_open() else _C.make_single_group()
            return _alone
        group = dist.group.WORLD
    if group not in _groups:
        if dist.get_rank(group) < 0:
            raise ValueError("lockstep.attach(): this process is no rank of the group; call it on the group's ranks only")
        store = dist.PrefixStore("lockstep.attach", dist.distributed_c10d._get_process_group_store(group))
        _groups[group] = _C.make_group(store, dist.get_rank(group), dist.get_world_size(group), _TIMEOUT)
    return _groups[group]


@atexit.register
def _leave() -> None:
    """Before the interpreter takes objects apart in any order; ranks that wait for this one then hear of it."""
    for replica in list(_replicas):
        replica.detach()
    for group in list(_groups.values()):
        group.close()
