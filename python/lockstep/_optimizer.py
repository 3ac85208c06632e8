"""ZeroRedundancyOptimizer: one optimizer state for all ranks, of which each steps its part."""

import functools
import threading
import weakref
from typing import Any, Callable, Optional, Union

import torch

import lockstep
from lockstep import _arguments
from lockstep._replica import Replica, _replicas

_C = lockstep._extension()

# What the kernels step, and what torch calls it. Adam may decay as AdamW does.
_MAKERS = {torch.optim.SGD: _C.make_sgd, torch.optim.Adam: _C.make_adam, torch.optim.AdamW: _C.make_adamw}
_ONLY_TORCHS = ("optimizer_class", "process_group", "parameters_as_bucket_view", "overlap_with_ddp")
_watching, _watching_loads = threading.Lock(), threading.Lock()
_NUMBERS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "momentum", "dampening", "nesterov")


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """SGD, Adam or AdamW of torch.optim, whose step the ranks share out.

        replica = lockstep.attach(model)
        optimizer = lockstep.ZeroRedundancyOptimizer(replica, torch.optim.AdamW, lr=1e-3)
        optimizer = lockstep.ZeroRedundancyOptimizer(replica, torch.optim.AdamW(groups, lr=1e-3))

    The second form takes over an optimizer's parameter groups, options and state; it must hold every parameter that
    the replica trains. It is a torch.optim.Optimizer to whoever asks: learning-rate schedulers change its groups, and
    state_dict() and load_state_dict() have the format of the optimizer that it stands for, so either loads what the
    other has saved. Every rank makes it and calls step(), with the same options.

    step() takes the mean over the ranks, not backward: until then .grad is what this rank has computed itself. Limit
    its norm by replica.clip_grad_norm(). torch.amp.GradScaler works with it: all ranks leave out the same steps. The
    parameters move into memory that the other ranks reach: views of them that were made before show the old memory.
    shared_parameters: they lie there once for all ranks.

    `state` is filled by state_dict(). The formulas are torch's, without fused multiply-adds: results differ from
    torch's in the last place.
    """

    def __init__(self, replica: Replica, optimizer: Union[type, torch.optim.Optimizer] = torch.optim.AdamW, *,
                 shared_parameters: bool = False, **options: Any):
        self._check_arguments(replica, options)
        shared_parameters = _arguments.flag("ZeroRedundancyOptimizer", "shared_parameters", shared_parameters)
        if isinstance(optimizer, torch.optim.Optimizer):
            if options:
                raise TypeError(f"ZeroRedundancyOptimizer: {', '.join(options)} given together with an optimizer; give the options to that "
                                "optimizer, or pass its class")
            inner = optimizer
        else:
            self._check(optimizer)
            inner = optimizer([parameter for _, parameter in replica._trained()], **options)
        self._check(type(inner))
        self._stepper = None
        super().__init__(inner.param_groups, inner.defaults)
        groups = [[p for p in group["params"] if p.requires_grad] for group in self.param_groups]
        kind = type(inner)
        if kind is torch.optim.Adam and any(group.get("decoupled_weight_decay") for group in self.param_groups):
            kind = torch.optim.AdamW
        self._options()  # refuses what the kernels do not know before the parameters move
        _watch_scalers()
        if shared_parameters:
            _watch_loads()
        self._replica = weakref.ref(replica)
        self._kind = kind
        self._ids = {id(p) for group in groups for p in group}
        self._stepper = _MAKERS[kind](replica._core, groups, shared_parameters)
        replica._optimizers.add(self)
        replica._steps_by = weakref.ref(self)
        for parameter, state in inner.state.items():
            self.state[parameter] = state
        self._push()

    @staticmethod
    def _check_arguments(replica: Any, options: dict) -> None:
        torchs = [name for name in _ONLY_TORCHS if name in options]
        if torchs or not isinstance(replica, Replica):
            what = f"{', '.join(torchs)} of torch's" if torchs else f"{type(replica).__name__} as its first argument"
            raise TypeError(f"lockstep.ZeroRedundancyOptimizer does not take {what}. It takes the Replica that lockstep.attach(model) returns, "
                            "then the optimizer's class and its options: ZeroRedundancyOptimizer(replica, torch.optim.AdamW, lr=1e-3)")
        if replica.module is None:
            raise RuntimeError("ZeroRedundancyOptimizer: the module of the replica was destroyed")
        if replica not in _replicas:
            raise RuntimeError("ZeroRedundancyOptimizer: this Replica was detached from its module; attach again")

    def _check_steps_alone(self, other: torch.optim.Optimizer) -> None:
        """Refuses a step of another optimizer over the same parameters: their .grad is this rank's own."""
        if other is self or self._stepper is None or any(held is self for held in vars(other).values()):  # one that wraps this
            return
        if any(id(parameter) in self._ids for group in other.param_groups for parameter in group["params"]):
            raise RuntimeError(f"{type(other).__name__}.step(): its parameters are stepped by another optimizer, a lockstep.ZeroRedundancyOptimizer. "
                               "While that one exists, .grad holds this rank's own gradients. Step that one; or delete it, and all that "
                               "holds it (such as a scheduler), before the backward whose gradients this one is to step")

    @staticmethod
    def _check(kind: Any) -> None:
        if kind not in _MAKERS:
            raise TypeError(f"ZeroRedundancyOptimizer steps torch.optim's SGD, Adam and AdamW, not {getattr(kind, '__name__', kind)}; "
                            "step such an optimizer itself: the parameters' .grad is the mean over the ranks")

    def _options(self) -> list:
        for group in self.param_groups:
            for name in ("maximize", "differentiable"):
                if group.get(name):
                    raise ValueError(f"ZeroRedundancyOptimizer: there are no kernels for {name}=True; leave it out")
        return [{name: _number(group[name]) for name in _NUMBERS if name in group} for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._stepper is None:
            raise RuntimeError("this ZeroRedundancyOptimizer's replica was detached; make another optimizer")
        self._stepper.step(self._options())
        return loss

    def _unscaled(self, inverse: float, found: torch.Tensor, accept: bool) -> None:
        """A GradScaler has divided the gradients, and found infinity or NaN on this rank or not: all ranks are to leave out the step."""
        replica = self._replica()
        if self._stepper is not None and replica is not None:
            found.fill_(_C.unscaled(replica._core, self._parameters(), 1 / inverse, found.item() > 0, accept))

    def _parameters(self) -> list:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict:
        self._pull()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self._push()

    def add_param_group(self, param_group: dict) -> None:
        if self._stepper is not None:
            raise RuntimeError("ZeroRedundancyOptimizer: its parameters lie in memory that all ranks share; make another optimizer with "
                               "the new group, and load this one's state_dict()")
        super().add_param_group(param_group)

    def _pull(self) -> None:
        if self._stepper is None:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self._stepper.state(parameter)
                if "step" in state:
                    state["step"] = torch.tensor(float(state["step"]))
                if state:
                    self.state[parameter] = state

    def _push(self) -> None:
        for parameter, state in self.state.items():
            if state:
                self._stepper.load_state(parameter, {name: int(value) if name == "step" else value
                                                     for name, value in state.items()})

    def _detach(self) -> None:
        """Gives the parameters memory of their own again, and keeps the state."""
        if self._stepper is not None:
            self._pull()
            for state in self.state.values():
                for name, value in state.items():
                    state[name] = value.clone() if isinstance(value, torch.Tensor) else value
            self._stepper = None


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _watch_scalers() -> None:
    """From now on, once. A GradScaler divides gradients in place and looks for infinity on its own rank; torch has no hook for that."""
    if not _watching.acquire(blocking=False):
        return
    divide = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(divide)
    def divide_on_all_ranks(scaler: Any, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            return divide(scaler, optimizer, inv_scale, found_inf, *rest, **named)
        accept = not _C.gradients_were_changed(optimizer._parameters())
        found = divide(scaler, optimizer, inv_scale, found_inf, *rest, **named)
        found = found or {found_inf.device: found_inf}  # without a gradient on this rank there may be one on others
        for one in found.values():
            optimizer._unscaled(inv_scale.item(), one, accept)
        return found

    setattr(torch.amp.GradScaler, "_unscale_grads_", divide_on_all_ranks)


def _watch_loads() -> None:
    """From now on, once. All ranks may load the same state into parameters that they share, and no other change is known to be the same.
    A hook of the module itself would be pickled with it."""
    if not _watching_loads.acquire(blocking=False):
        return
    load = torch.nn.Module.load_state_dict

    @functools.wraps(load)
    def load_and_tell(module: torch.nn.Module, state_dict: Any, *rest: Any, **named: Any) -> Any:
        own = dict(module.named_parameters(remove_duplicate=False))
        there = [name for name in own if isinstance(state_dict.get(name), torch.Tensor)]
        stay_wrong = len(there) < len(own) and _C.are_wrong(list(own.values()))  # loading a part does not repair the rest
        result = load(module, state_dict, *rest, **named)
        if there and not stay_wrong:
            _C.note_loaded([own[name] for name in there], [state_dict[name] for name in there])
        return result

    setattr(torch.nn.Module, "load_state_dict", load_and_tell)
