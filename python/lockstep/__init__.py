"""A shared-memory backend for torch.distributed: init_process_group("lockstep"), ranks of one machine, CPU tensors.

`import torch` registers it by itself; nothing of this package needs to be imported.
"""

import os

__all__ = ["register"]


def register():
    """Registers the backend with torch.distributed. Calling it again changes nothing.

    Its extension is loaded when the first group is made, so importing torch stays as fast as it was.
    """
    import torch.distributed as dist

    if not dist.is_available() or "LOCKSTEP" in dist.Backend._plugins:
        return
    # DistributedDataParallel takes its buckets' memory from the backend only if told to.
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    dist.Backend.register_backend("lockstep", _make_backend, devices=["cpu"])


def _make_backend(store, rank, size, timeout):
    import torch

    try:
        from lockstep import _C
    except ImportError as error:
        raise ImportError(f"lockstep's extension does not match torch {torch.__version__}; build it again: "
                          f"pip install --no-build-isolation ./python ({error})") from error
    return _C.make_backend(store, rank, size, timeout)
