"""python -m lockstep: which lockstep and torch these are, and what this machine can do."""

import platform
import resource
import sys

import torch

import lockstep


def main() -> int:
    print(f"lockstep  {lockstep.__version__}, Python {platform.python_version()}, {platform.machine()}")
    try:
        core = lockstep._extension()
    except ImportError as error:
        print(f"torch     {torch.__version__}: {error}")
        print("explain   lockstep explain 46")
        return 1
    facts = core.describe()
    quota = f", a quota of {facts['cpu_quota']:g} CPUs' time" if facts["cpu_quota"] else ""
    print(f"torch     {torch.__version__}; built with {facts['built_with_torch']}")
    print(f"engine    shared memory, {facts['kernels']} kernels; one machine, up to {facts['most_ranks']} ranks, tensors on the CPU")
    print(f"machine   {facts['cpus']} CPUs for this process{quota}, {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files")
    print("try       lockstep run -n 2 -- python train.py, or torchrun --nproc-per-node 2 train.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
