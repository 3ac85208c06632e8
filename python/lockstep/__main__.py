"""python -m lockstep: which lockstep and torch these are, and what this machine can do.

    python -m lockstep                   says it
    python -m lockstep --cmake-prefix    prints the CMAKE_PREFIX_PATH for C++ programs: this package's library, and torch's
"""

import importlib.util
import os
import platform
import resource
import sys

import lockstep

HERE = os.path.dirname(os.path.abspath(__file__))


def cmake_prefix() -> int:
    if not os.path.exists(os.path.join(HERE, "lib/cmake/Lockstep/LockstepConfig.cmake")):
        print("lockstep: this package was built from source, without the C++ library; install Lockstep's wheel, or use the prefix of cmake --install", file=sys.stderr)
        return 1
    spec = importlib.util.find_spec("torch")  # its own cmake_prefix_path, without the seconds that importing it takes
    folders = [] if spec is None or spec.origin is None else [os.path.join(os.path.dirname(spec.origin), "share/cmake")]
    print(";".join([HERE, *folders]))
    return 0


def describe() -> int:
    print(f"lockstep  {lockstep.__version__}, Python {platform.python_version()}, {platform.machine()}")
    try:
        core = lockstep._extension()
    except ImportError as error:
        print(f"torch     {error}")
        print("explain   lockstep explain 46")
        return 1
    import torch

    facts = core.describe()
    quota = f", a quota of {facts['cpu_quota']:g} CPUs' time" if facts["cpu_quota"] else ""
    print(f"torch     {torch.__version__}; built with {facts['built_with_torch']}")
    print(f"engine    shared memory, {facts['kernels']} kernels; one machine, up to {facts['most_ranks']} ranks, tensors on the CPU")
    print(f"machine   {facts['cpus']} CPUs for this process{quota}, {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files")
    print("try       lockstep run -n 2 -- python train.py, or torchrun --nproc-per-node 2 train.py")
    return 0


def main() -> int:
    arguments = sys.argv[1:]
    if arguments == ["--cmake-prefix"]:
        return cmake_prefix()
    if arguments:
        print((__doc__ or "").partition("\n\n")[2], end="", file=sys.stdout if arguments in (["-h"], ["--help"]) else sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    return describe()


if __name__ == "__main__":
    sys.exit(main())
