"""Runs a test of this folder in a Python with torch and the package, built from this tree, on its path.

    run.py SCRIPT [ARGUMENT]...     ends with 77, and says why, where no Python with torch is found
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "programs"))

import package  # noqa: E402
import support  # noqa: E402


def main():
    python = support.python_with_torch()
    if python is None:
        print("SKIPPED BECAUSE no Python with torch was found; scripts/setup installs one")
        return 77
    environment = support.environment(PYTHONPATH=package.build(python), PYTHONDONTWRITEBYTECODE="1")
    environment.pop("DDP_DISABLE_COMM_MEM", None)
    os.execve(python, [python, os.path.join(HERE, sys.argv[1]), *sys.argv[2:]], environment)


if __name__ == "__main__":
    sys.exit(main())
