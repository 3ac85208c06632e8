"""Data-parallel training on CPUs: attach() for modules, and a backend for torch.distributed.

`import torch` registers the backend by itself: init_process_group("lockstep"), CPU tensors. Nothing of this package
needs to be imported for it, and attach() and the rest are loaded when they are first used.
"""

import os

__version__ = "0.1.0"
__all__ = ["Error", "Replica", "ZeroRedundancyOptimizer", "attach", "register"]

_HOMES = {"Error": "_replica", "Replica": "_replica", "attach": "_replica", "ZeroRedundancyOptimizer": "_optimizer"}


def __dir__():
    return sorted({*globals(), *__all__})


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    import importlib

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


def _extension():
    """lockstep._C. It is built for one release of torch."""
    import torch

    try:
        from lockstep import _C
    except ImportError as error:
        raise ImportError(f"lockstep's extension does not match torch {torch.__version__}; build it again: "
                          f"pip install --no-build-isolation ./python ({error})") from error
    return _C


def _make_backend(group, _):
    if getattr(group, "enable_reconfigure", False):  # since torch 2.14
        return _extension().make_unformed_backend(group.group_rank, group.group_size, group.timeout)
    return _extension().make_backend(group.store, group.group_rank, group.group_size, group.timeout)
