"""Data-parallel training on CPUs: attach() for modules, and a backend for torch.distributed.

`import torch` registers the backend by itself: init_process_group("lockstep"), CPU tensors. Nothing of this package
needs to be imported for it, and attach() and the rest are loaded when they are first used.
"""

import os
import sys

__version__ = "0.1.0"
__all__ = ["DiLoCo", "Error", "Replica", "ZeroRedundancyOptimizer", "attach", "register"]

_HOMES = {"DiLoCo": "_diloco", "Error": "_replica", "Replica": "_replica", "attach": "_replica", "ZeroRedundancyOptimizer": "_optimizer"}


def __dir__():
    return sorted({*globals(), *__all__})


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    import importlib

    _check_torch()
    return getattr(importlib.import_module("lockstep." + _HOMES[name]), name)


def register():
    """Registers the backend with torch.distributed. Calling it again changes nothing.

    Its extension is loaded when the first group is made, so importing torch stays as fast as it was.
    """
    import torch.distributed as dist

    if not dist.is_available() or "LOCKSTEP" in dist.Backend._plugins:
        return
    # DistributedDataParallel takes its buckets' memory from the backend only if told to.
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    dist.Backend.register_backend("lockstep", _make_backend, extended_api=True, devices=["cpu"])


def _torch_here():
    """The version of the torch that is installed, "" if nobody says it, None if there is none. Importing torch would take seconds."""
    if "torch" in sys.modules:
        return getattr(sys.modules["torch"], "__version__", "")
    import importlib.metadata
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        return None
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _torch_then():
    """major.minor of the torch that this package was built with; "" in a source tree."""
    try:
        from lockstep._built import TORCH
    except ImportError:
        return ""
    return TORCH


def _misfit():
    """What is wrong with the torch that is installed, and what to do: a sentence. None if it is the one this package was built for."""
    here, then = _torch_here(), _torch_then()
    if here is None:
        return f'lockstep needs torch {then}, and this Python has none: pip install "torch=={then}.*"' if then else "lockstep needs torch, and this Python has none"
    if here and then and here.split(".")[:2] != then.split("."):
        return (f'this lockstep was built for torch {then}, but torch {here} is installed: pip install "torch=={then}.*", '
                f"or install the lockstep for torch {'.'.join(here.split('.')[:2])} (its wheel, or pip install ./python in Lockstep's sources)")
    return None


def _check_torch():
    misfit = _misfit()
    if misfit:
        raise ImportError(misfit)


def _extension():
    """lockstep._C. It is built for one release of torch."""
    _check_torch()
    import torch  # noqa: F401  # its libraries are those that _C links

    try:
        from lockstep import _C
    except ImportError as error:
        raise ImportError(f"lockstep's extension does not load; install its wheel again, or run pip install ./python in Lockstep's sources: {error}") from error
    return _C


def _make_backend(group, _):
    if getattr(group, "enable_reconfigure", False):  # since torch 2.14
        return _extension().make_unformed_backend(group.group_rank, group.group_size, group.timeout)
    return _extension().make_backend(group.store, group.group_rank, group.group_size, group.timeout)


# Not while torch imports this: a program that does not use lockstep goes on. `python -m lockstep` says it in its own way.
if "torch" not in sys.modules and sys.argv[:1] != ["-m"]:
    _check_torch()
