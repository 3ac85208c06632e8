"""DiLoCo: machines that synchronise every many steps."""

from typing import TYPE_CHECKING, Any, Dict, Iterable, Mapping, Optional, Sequence

import torch
import torch.distributed as dist

import lockstep
from lockstep import _arguments, _groups
from lockstep._replica import Replica, _choice, _replicas

_C = lockstep._extension()
if TYPE_CHECKING:
    from lockstep._C import DiLoCoStats


def _whole(name: str, value: Any) -> int:
    number = _arguments.whole("DiLoCo", name, value)
    if abs(number) >= 2**63:
        raise ValueError(f"DiLoCo: {name} is {number}, which is no number of steps or parts")
    return number


def _number(name: str, value: Any) -> float:
    return _arguments.number("DiLoCo", name, value)


def _flag(name: str, value: Any) -> bool:
    return _arguments.flag("DiLoCo", name, value)


class DiLoCo:
    """Trains one model on several machines that exchange little: C++'s lockstep::DiLoCo (docs/slow_networks.md).

        machine, _ = dist.new_subgroups(ranks_on_a_machine)
        replica = lockstep.attach(model, machine)          # gradients are averaged within the machine
        diloco = lockstep.DiLoCo(replica, sync_every=100, wire="int8")
        for inputs, targets in loader:
            ...
            optimizer.step()
            diloco.step()
        diloco.finish()                                    # all machines have the same model

    `replica` is over the ranks of one machine; `group`, of torch.distributed, has those of all machines, without it the
    default group. Every rank makes it, with the same model and options, and makes the same calls in the same order; a
    difference is an Error on all ranks.

    sync_every: steps between two turns of a fragment. fragments: parts of the model that take turns. overlap_steps:
    steps between sending a fragment and applying the result, below sync_every; then a parameter becomes mixing * own +
    (1 - mixing) * outer. wire: how numbers travel, "fp32", "bf16", "int8" or "int4". error_feedback: what rounding to it
    lost is added next time. outer_lr, outer_momentum, nesterov: of the SGD on the pseudo-gradients. max_nonfinite_rounds: rounds in a
    row in which the parameters of all machines are not finite, after which step() is an Error on all ranks.
    """

    def __init__(self, replica: Replica, group: Optional[dist.ProcessGroup] = None, *, sync_every: int = 100, fragments: int = 1,
                 overlap_steps: int = 0, mixing: float = 0.5, wire: str = "fp32", error_feedback: bool = False,
                 outer_lr: float = 0.7, outer_momentum: float = 0.9, nesterov: bool = True, max_nonfinite_rounds: int = 3):
        if not isinstance(replica, Replica):
            raise TypeError(f"lockstep.DiLoCo takes the Replica that lockstep.attach(model) returns as its first argument, not {type(replica).__name__}")
        if replica not in _replicas:
            raise RuntimeError("DiLoCo: this Replica was detached from its module; attach again")
        options = dict(sync_every=_whole("sync_every", sync_every), fragments=_whole("fragments", fragments),
                       overlap_steps=_whole("overlap_steps", overlap_steps), mixing=_number("mixing", mixing),
                       wire=_choice(_C.Wire, "wire", wire), error_feedback=_flag("error_feedback", error_feedback),
                       outer_lr=_number("outer_lr", outer_lr), outer_momentum=_number("outer_momentum", outer_momentum),
                       nesterov=_flag("nesterov", nesterov), max_nonfinite_rounds=_whole("max_nonfinite_rounds", max_nonfinite_rounds))
        own = _groups.of(group, None)
        self._replica = replica
        self._core: Any = None
        with _groups.turn(own):
            core = _C.DiLoCo(replica._core, own, options)
        count = len(core.stats().rounds_by_machine)
        if count == 1 and group is not None and dist.get_world_size(group) < dist.get_world_size():
            raise RuntimeError(f"DiLoCo: its group has the {dist.get_world_size(group)} ranks of one machine, and the default group has "
                               f"{dist.get_world_size()}, so nothing would synchronise the machines; give the group of all of them, or none")
        self._core = core
        replica._dilocos.add(self)

    def step(self) -> bool:
        """After each step of the optimizer. Returns whether parameters were synchronised. Every rank calls it."""
        return self._here().step()

    def synchronise(self) -> None:
        """Ends the rounds under way, and has a round now: all machines have the same parameters and floating-point buffers, with
        `lockstep run --islands` those that take part in the round. Every rank calls it."""
        self._here().synchronise()

    def finish(self) -> None:
        """synchronise() at the end of the training. With --islands the machine leaves the rounds."""
        self._here().finish()

    def stats(self) -> "DiLoCoStats":
        return self._here().stats()

    def state_dict(self) -> Dict[str, torch.Tensor]:
        """This rank's slice of the outer copy and its optimizer, and the rounds under way, whose results are waited for. Every rank calls
        it. Between rounds machines hold different weights, so each saves its model and its optimizer, too."""
        return dict(self._here().state_dict())

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """On as many machines and ranks as it was saved on, whose models are loaded as well."""
        self._here().load_state_dict(_arguments.tensors("DiLoCo.load_state_dict()", "state", state))

    def load_from_ranks(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """The states of other machines or ranks, in rank order. Parameters become the outer copy. Every rank calls it."""
        call = "DiLoCo.load_from_ranks()"
        if isinstance(states, Mapping) or not isinstance(states, Iterable):
            raise _arguments.wrong(call, "states", states, "a list with the state of each rank")
        self._here().load_from_ranks([_arguments.tensors(call, f"states[{rank}]", state) for rank, state in enumerate(states)])

    def fits_ranks(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether load_state_dict() takes such a state. The same on all ranks."""
        return self._here().fits_ranks(_arguments.tensors("DiLoCo.fits_ranks()", "state", state))

    def _here(self) -> Any:
        if self._core is None:
            raise RuntimeError("DiLoCo: its Replica was detached from the module; make both anew")
        return self._core

    def _detach(self) -> None:
        self._core = None
