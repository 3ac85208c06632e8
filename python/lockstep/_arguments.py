"""Checks of arguments: a TypeError names the call, the argument, what it must be, and what was given."""

import operator
from typing import Any, List, Mapping, Tuple

import torch


def wrong(call: str, name: str, value: Any, expected: str) -> TypeError:
    given = "None" if value is None else f"{value!r:.100}, of type {type(value).__name__}"
    return TypeError(f"{call}: {name} is {given}; it must be {expected}")


def whole(call: str, name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise wrong(call, name, value, "an int") from None


def number(call: str, name: str, value: Any) -> float:
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise wrong(call, name, value, "a number")


def flag(call: str, name: str, value: Any) -> bool:
    if type(value).__name__ in ("bool", "bool_") or (isinstance(value, int) and value in (0, 1)):  # NumPy's, too
        return bool(value)
    raise wrong(call, name, value, "True or False")


def function(call: str, name: str, value: Any) -> Any:
    if not callable(value):
        raise wrong(call, name, value, "a function without arguments")
    return value


def names(call: str, name: str, value: Any) -> List[str]:
    if isinstance(value, str):
        raise TypeError(f"{call}: {name} is a list of names, not one string; write [{value!r}]")
    try:
        listed = list(value)
    except TypeError:
        raise wrong(call, name, value, "a list of names") from None
    for one in listed:
        if not isinstance(one, str):
            raise wrong(call, f"an entry of {name}", one, "a name, a str")
    return listed


def tensors(call: str, name: str, value: Any) -> List[Tuple[str, torch.Tensor]]:
    """The items of a state_dict()."""
    if not isinstance(value, Mapping):
        raise wrong(call, name, value, "a dict of tensors, as state_dict() returns it")
    for key, one in value.items():
        if not isinstance(key, str):
            raise wrong(call, f"a key of {name}", key, "a name, a str")
        if not isinstance(one, torch.Tensor):
            raise wrong(call, f"{name}[{key!r}]", one, "a tensor")
    return list(value.items())
