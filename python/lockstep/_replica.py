"""attach(): what keeps the copies of a module that the ranks train in step."""

import atexit
import contextlib
import datetime
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Optional, Sequence, Union

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep import _arguments, _groups

_C = lockstep._extension()
if TYPE_CHECKING:
    from lockstep._C import Error as Error
    from lockstep._C import ReductionStats
else:
    Error = _C.Error

_replicas: "weakref.WeakSet[Replica]" = weakref.WeakSet()
_of_module: "weakref.WeakKeyDictionary[torch.nn.Module, Replica]" = weakref.WeakKeyDictionary()  # keeps them alive


def attach(module: torch.nn.Module, group: Optional[dist.ProcessGroup] = None, *,
           timeout: Optional[datetime.timedelta] = None, first_bucket_cap_mb: float = 1, bucket_cap_mb: float = 25,
           reduction: str = "mean", buffers: str = "follow_rank_zero", init_sync: bool = True,
           delay_all_reduce_named_params: Sequence[str] = (), parameters_to_ignore: Sequence[str] = (),
           keep_freed_memory: bool = True) -> "Replica":
    """Trains one module on all ranks: after every backward, each parameter's .grad is the mean over the ranks.

        model = Net()
        lockstep.attach(model)
        optimizer = torch.optim.AdamW(model.parameters())
        ...                                               # the loop of one process

    The module is not wrapped: its names, its state_dict() and its methods stay as they were, and an optimizer may be
    made before or after. Parameters that a rank does not use, and graphs that change, need no option. The Replica that
    this returns lives as long as the module, or until detach(); whoever wants its methods keeps it, too.

    Every rank calls it, with the same module and options; the ranks' parameters are compared, and set to rank 0's.
    `group` is one of torch.distributed; without it the default group, which is made if the environment names ranks
    (`lockstep run`, torchrun), else this process alone. Parameters are on the CPU. Ranks may be on several machines if
    their environment has MASTER_ADDR, as those launchers set it.

    reduction: "mean", "sum" or "weighted_mean" (Replica.set_weight). buffers: "follow_rank_zero", "mean" or "none".
    timeout: of one collective; without it the group's. All modules that are attached to a group have the same.
    """
    _check(module)
    call = "lockstep.attach()"
    options = dict(first_bucket_cap_mb=_arguments.number(call, "first_bucket_cap_mb", first_bucket_cap_mb),
                   bucket_cap_mb=_arguments.number(call, "bucket_cap_mb", bucket_cap_mb),
                   reduction=_choice(_C.GradientReduction, "reduction", reduction),
                   buffers=_choice(_C.BufferPolicy, "buffers", buffers), init_sync=_arguments.flag(call, "init_sync", init_sync),
                   delay_all_reduce_named_params=_arguments.names(call, "delay_all_reduce_named_params", delay_all_reduce_named_params),
                   parameters_to_ignore=_arguments.names(call, "parameters_to_ignore", parameters_to_ignore),
                   keep_freed_memory=_arguments.flag(call, "keep_freed_memory", keep_freed_memory))
    _check_names(module, options["parameters_to_ignore"])
    own = _groups.of(group, timeout)
    with _groups.turn(own):
        return Replica(module, own, options)


class Replica:
    """A module that is trained on all ranks; attach() makes it. Call methods between backward passes, on one thread.

    Errors are lockstep.Error, a RuntimeError, also from backward(), and on all ranks that they concern.
    """

    def __init__(self, module: torch.nn.Module, group: Any, options: dict):
        self._group = group
        self._core = _C.Replica(module, group, options)
        self._optimizers: "weakref.WeakSet[Any]" = weakref.WeakSet()
        self._dilocos: "weakref.WeakSet[Any]" = weakref.WeakSet()
        self._steps_by: Callable[[], Any] = lambda: None  # the last of them, if it is still there
        self._module = weakref.ref(module)
        self._ignored = set(options["parameters_to_ignore"])
        self._note_layers()
        _watch()
        _replicas.add(self)
        _of_module[module] = self

    def __repr__(self) -> str:
        module = self.module
        name = "a module that is gone" if module is None else type(module).__name__
        state = ", detached" if isinstance(self._core, _Detached) else ""
        return f"<lockstep.Replica of {name}, rank {self.rank} of {self.world_size}{state}>"

    def detach(self) -> None:
        """Leaves the module as it is; its gradients stay with each rank from now on. May be called again."""
        for part in (*self._optimizers, *self._dilocos):
            part._detach()
        _replicas.discard(self)
        module = self.module
        if module is not None and _of_module.get(module) is self:
            del _of_module[module]
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
        guard = self._core.accumulate(_arguments.whole("Replica.accumulate()", "n", n))
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
        self._core.set_weight(_arguments.number("Replica.set_weight()", "weight", weight))

    def join(self, body: Callable[[], None], *, divide_by_initial_world_size: bool = True,
             throw_on_early_termination: bool = False, shadow: Optional[Callable[[], None]] = None) -> None:
        """Runs `body`, a loop over inputs of which some ranks may have fewer. Every rank calls it.

        A rank whose body has returned takes part in the others' reductions, without a gradient, until all have
        returned; then every rank gets the parameters and buffers of the last rank that had inputs. `shadow` runs on it
        after each of those reductions: put the optimizer's step there if its state should follow.
        """
        call = "Replica.join()"
        self._core.join(_arguments.function(call, "body", body),
                        _arguments.flag(call, "divide_by_initial_world_size", divide_by_initial_world_size),
                        _arguments.flag(call, "throw_on_early_termination", throw_on_early_termination),
                        None if shadow is None else _arguments.function(call, "shadow", shadow))

    def broadcast_parameters(self, root: int = 0) -> None:
        """Sets every parameter and buffer to rank `root`'s. Every rank calls it."""
        self._core.broadcast_parameters(_arguments.whole("Replica.broadcast_parameters()", "root", root))

    def average_parameters(self, weight: float = 1) -> None:
        """Sets parameters and floating-point buffers to the mean over the ranks, weighted. Every rank calls it."""
        self._core.average_parameters(_arguments.number("Replica.average_parameters()", "weight", weight))

    def refresh(self) -> None:
        """Attaches to the module as it is now, after an edit or a change of requires_grad. Every rank calls it."""
        self._core.refresh()
        self._note_layers()

    def check_divergence(self) -> None:
        """Compares all parameters and buffers, bit by bit; the Error names the tensor and the odd rank out."""
        self._core.check_divergence()

    def check_divergence_every(self, every_n_steps: int, *, buffers_as_left: bool = False) -> None:
        """The same after every n-th reduction; 0: never.

        `buffers_as_left`: buffers other than batch norm's statistics are also compared before they follow rank 0, for those that every
        rank computes from the same numbers.
        """
        call = "Replica.check_divergence_every()"
        self._core.check_divergence_every(_arguments.whole(call, "every_n_steps", every_n_steps),
                                          _arguments.flag(call, "buffers_as_left", buffers_as_left))

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """As torch.nn.utils.clip_grad_norm_; with a ZeroRedundancyOptimizer it takes its place, on every rank."""
        return self._clipped("Replica.clip_grad_norm()", max_norm, norm_type)

    def clip_grad_norm_(self, parameters: Union[torch.Tensor, Iterable[torch.Tensor]], max_norm: float, norm_type: float = 2.0,
                        error_if_nonfinite: bool = False, foreach: Optional[bool] = None) -> torch.Tensor:
        """clip_grad_norm() with the arguments and the result of torch.nn.utils.clip_grad_norm_, for what calls that one:
        `accelerator.clip_grad_norm_ = replica.clip_grad_norm_`. `parameters` are all that the replica trains."""
        given = {id(tensor) for tensor in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        for name, tensor in self._trained():
            if id(tensor) not in given:
                raise ValueError(f"Replica.clip_grad_norm_(): {name} is not among the parameters; the norm is that of all gradients which "
                                 "the replica averages")
        norm = torch.tensor(self._clipped("Replica.clip_grad_norm_()", max_norm, norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped")
        return norm

    def set_non_finite_policy(self, policy: str) -> None:
        """What a step with infinity or NaN in a gradient does on all ranks: "ignore", "skip" or "raise"."""
        self._core.set_non_finite_policy(_choice(_C.NonFinitePolicy, "policy", policy))

    def skipped_steps(self) -> int:
        """Steps without a gradient on any rank."""
        return self._core.skipped_steps()

    def stats(self) -> "ReductionStats":
        """What reductions have cost this rank so far. An object with

            reductions         how many there were
            bytes              of one of them: what this rank gives to the others
            backward_ms        mean, from the first gradient to the end of the last bucket
            wait_ms            mean, the part of it in which this rank waited
            overlap            the share of the communication during which backward went on computing; 1 is all of it
            buckets            of the last reduction, each with parameters (names), bytes, and ready_ms, start_ms, end_ms and
                               wait_ms, in milliseconds since its backward began
            wait_ms_by_rank    mean of each rank, and times_last_by_rank, both after set_rank_comparison(True)
            reason             the rank that came last most often, in words; empty if none stands out
        """
        return self._core.stats()

    def set_rank_comparison(self, on: bool) -> None:
        """Whether stats() says which rank is late. Every rank calls it."""
        self._core.set_rank_comparison(_arguments.flag("Replica.set_rank_comparison()", "on", on))

    def communication_seconds(self) -> float:
        """How long this rank has waited for communication: the part not hidden behind backward."""
        return self._core.communication_seconds()

    def bucket_parameters(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order in which buckets are reduced."""
        return self._core.bucket_parameters()

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> Any:
        raise TypeError("a lockstep.Replica belongs to its process and cannot be pickled; save the module's state_dict()")

    def _clipped(self, call: str, max_norm: float, norm_type: float) -> float:
        return self._core.clip_grad_norm(_arguments.number(call, "max_norm", max_norm), _arguments.number(call, "norm_type", norm_type))

    def _trained(self) -> list:
        """(name, parameter) of those whose gradients are averaged."""
        module = self.module
        named = [] if module is None else module.named_parameters()
        return [(name, tensor) for name, tensor in named if tensor.requires_grad and name not in self._ignored]

    def _note_layers(self) -> None:
        module = self.module
        self._layers = set() if module is None else {id(layer) for layer in module.modules()}

    def _before_registration(self, module: torch.nn.Module, value: Any) -> None:
        """`module` is about to get another layer, parameter or buffer."""
        if id(module) not in self._layers:
            return
        tensors = [] if value is None else [value]
        if isinstance(value, torch.nn.Module):
            self._layers.update(id(layer) for layer in value.modules())
            tensors = list(value.parameters())
        self._core.expect([tensor for tensor in tensors if not torch.nn.parameter.is_lazy(tensor)])

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer of torch.optim is about to step."""
        self._core.look()
        owner = self._steps_by()
        if owner is not None:
            owner._check_steps_alone(optimizer)


class _Detached:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name}: this Replica was detached from its module; attach again")


def _choice(kind: Any, option: str, value: str) -> Any:
    choices = kind.__members__
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{option} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return choices[value]


def _check(module: Any) -> None:
    """Refuses what cannot be attached to."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"lockstep.attach() takes a torch.nn.Module, not {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("lockstep.attach(): scripted modules take no hooks; attach to the module that this one was made from")
    for name, layer in module.named_modules():
        if isinstance(layer, DistributedDataParallel):
            what = f"its layer {name}" if name else "this module"
            raise TypeError(f"lockstep.attach(): {what} is a DistributedDataParallel, which averages the gradients itself; leave "
                            "DistributedDataParallel out, and attach to the module that it was given")
    fully_sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for name, layer in module.named_modules():
        if fully_sharded and isinstance(layer, fully_sharded):
            raise TypeError(f"lockstep.attach(): {f'its layer {name}' if name else 'this module'} is a FullyShardedDataParallel, which averages "
                            "the gradients itself; leave attach() out")
    parts = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if parts and isinstance(tensor, parts):
            raise TypeError(f"lockstep.attach(): {name} is a DTensor, which torch distributes over the ranks itself, as after fully_shard(), "
                            "distribute_module() or parallelize_module(); attach() takes modules whose tensors are whole on every rank: "
                            "leave out one of the two")
    lazy = [name for named in (module.named_parameters(), module.named_buffers()) for name, tensor in named
            if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise RuntimeError(f"lockstep.attach(): {', '.join(lazy)} of a lazy layer have no shape yet; run one forward on every rank "
                           "before you attach")


def _check_names(module: torch.nn.Module, ignored: Sequence[str]) -> None:
    known = {name for named in (module.named_parameters(), module.named_buffers()) for name, _ in named}
    for name in ignored:
        if name not in known:
            raise ValueError(f"lockstep.attach(): parameters_to_ignore names {name!r}, which is neither a parameter nor a buffer of the module")


# What torch tells of all modules and optimizers of the process. The module itself gets no hook: it stays one that can be
# pickled, scripted and called with other parameters.

_watching = threading.Lock()


def _watch() -> None:
    """From now on, once."""
    if not _watching.acquire(blocking=False):
        return
    from torch.nn.modules import module
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    module.register_module_parameter_registration_hook(_before_registration)
    module.register_module_buffer_registration_hook(_before_registration)
    module.register_module_module_registration_hook(_before_registration)
    register_optimizer_step_pre_hook(_before_step)


def _before_registration(module: torch.nn.Module, name: str, value: Any) -> None:
    if isinstance(module, DistributedDataParallel) and isinstance(value, torch.nn.Module):
        _refuse_wrapping(value)
    for replica in list(_replicas):
        replica._before_registration(module, value)


def _refuse_wrapping(module: torch.nn.Module) -> None:
    """DistributedDataParallel is about to take this module: both would average the gradients."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    taken = {id(tensor) for name, tensor in module.named_parameters() if name not in ignored}
    for replica in list(_replicas):
        for name, tensor in replica._trained():
            if id(tensor) in taken:
                raise RuntimeError(f"DistributedDataParallel: parameter {name} is already averaged over the ranks by lockstep.attach(); "
                                   "use one of the two: leave DistributedDataParallel out, or detach() the Replica first")


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for replica in list(_replicas):
        replica._before_step(optimizer)


@atexit.register
def _leave() -> None:
    """Before the interpreter takes objects apart in any order; ranks that wait for this one then hear of it."""
    for replica in list(_replicas):
        replica.detach()
    _groups.close()
