"""The C++ library's group for each of torch.distributed's."""

import datetime
import os
import threading
import weakref
from typing import Any, Optional

import torch
import torch.distributed as dist

import lockstep

_C = lockstep._extension()

_TIMEOUT = datetime.timedelta(minutes=30)  # torch's own, for groups that do not say theirs


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()  # of one group alone: threads may attach in different groups in any order
        self.group: Any = None
        self.timeout: Optional[datetime.timedelta] = None
        self.is_own = False  # not the engine of torch's group


_known: "weakref.WeakKeyDictionary[Any, _Entry]" = weakref.WeakKeyDictionary()  # by torch's process group
_turns: "weakref.WeakKeyDictionary[Any, threading.Lock]" = weakref.WeakKeyDictionary()  # by the C++ library's group
_lock = threading.Lock()
_making = threading.Lock()  # torch's default group
_alone: Any = None


def of(group: Optional[dist.ProcessGroup], timeout: Optional[datetime.timedelta]) -> Any:
    """`timeout`: None, the group's own. Every rank of the group calls it."""
    if timeout is not None and not (isinstance(timeout, datetime.timedelta) and timeout > datetime.timedelta()):
        raise ValueError(f"lockstep.attach(): timeout is a datetime.timedelta above zero, not {timeout!r}")
    if group is None:
        with _making:
            if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
                dist.init_process_group("lockstep", timeout=timeout)
        if not dist.is_initialized():
            return _of_one()
        group = dist.group.WORLD
    elif not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(f"lockstep.attach(): group is a group of torch.distributed, not {type(group).__name__}; make one by dist.new_group(ranks)")
    if dist.get_rank(group) < 0:
        raise ValueError("lockstep.attach(): this process is not a rank of the group; call it on the group's ranks only")
    with _lock:
        entry = _known.setdefault(group, _Entry())
    with entry.lock:
        if entry.group is None:
            made, is_own = _make(group, timeout)
            try:
                _C.check_same_timeout(made, timeout)
            except BaseException:
                if is_own:
                    made.close()
                raise
            entry.group, entry.is_own, entry.timeout = made, is_own, timeout
        elif timeout is not None and timeout != entry.timeout:
            known = "without one" if entry.timeout is None else f"with {entry.timeout.total_seconds():g} s"
            raise ValueError(f"lockstep.attach(): a timeout of {timeout.total_seconds():g} s, but a module was attached to this group {known}; "
                             "give all of a group's modules the same timeout, or this one a group of its own (dist.new_group())")
        return entry.group


def turn(group: Any) -> threading.Lock:
    """Held while a module is attached: threads that attach in one group take turns, in different groups they do not wait."""
    with _lock:
        return _turns.setdefault(group, threading.Lock())


def close() -> None:
    """Leaves those that have an engine of their own; ranks that wait for this one hear of it."""
    for entry in list(_known.values()):
        if entry.is_own:
            entry.group.close()


def _of_one() -> Any:
    global _alone
    with _lock:
        _alone = _alone if _alone is not None and _alone.is_open() else _C.make_single_group()
        return _alone


def _make(group: dist.ProcessGroup, timeout: Optional[datetime.timedelta]) -> Any:
    """The group, and whether its engine is its own."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    backend = _backend_of(group)
    # A store of its own: a thread that waits at one keeps the others from it.
    store = dist.PrefixStore("lockstep.attach", dist.distributed_c10d._get_process_group_store(group).clone())
    limit = timeout or _timeout_of(backend)
    if backend is not None and size > 1:
        within = _C.make_group_within(backend, store, rank, size, limit, timeout is not None)
        if within is not None:
            return within, False
        _meet(group, backend, limit)
    return _C.make_group(store, rank, size, limit), True


def _backend_of(group: dist.ProcessGroup) -> Any:
    """What the group has for CPU tensors; None if nothing."""
    try:
        return group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None


def _timeout_of(backend: Any) -> datetime.timedelta:
    """Its own, where it says one. Without options a backend has no such attribute, or one that raises RuntimeError."""
    try:
        return getattr(backend.options, "_timeout", None) or _TIMEOUT
    except (AttributeError, RuntimeError):
        return _TIMEOUT


def _meet(group: dist.ProcessGroup, backend: Any, limit: datetime.timedelta) -> None:
    """Over the group itself, which knows of ranks that are gone; a store does not."""
    failures = []

    def meet() -> None:
        try:
            if backend.name() == "gloo":
                dist.monitored_barrier(group, timeout=limit)  # names the ranks that are missing
            else:
                dist.barrier(group, async_op=True).wait(limit)
        except RuntimeError as error:
            failures.append(error)

    # On a thread of its own: this one hears of Ctrl-C.
    thread = threading.Thread(target=meet, name="lockstep.attach", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if failures:
        raise _C.Error(f"lockstep.attach(): some ranks of the group did not call attach(): {failures[0]}") from failures[0]
