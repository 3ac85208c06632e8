#!/usr/bin/env python3
"""Finds a Python that imports the torch which this tree is built with. Prints its path, or nothing; the benches and the
tests import python_with_torch()."""

import functools
import os
import shutil
import subprocess
import sys

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def candidates(source):
    """The Python that the build's LibTorch lies in, the tree's own, and the one on PATH."""
    try:
        with open(os.path.join(source, ".setup/torch_dir"), encoding="utf-8") as file:
            torch_dir = file.read().strip()  # <prefix>/lib/pythonX/site-packages/torch/share/cmake/Torch
        yield os.path.join(os.path.abspath(os.path.join(torch_dir, *[".."] * 7)), "bin/python")
    except OSError:
        pass
    yield os.path.join(source, ".venv/bin/python")
    yield shutil.which("python3")


def imports_torch(python):
    return subprocess.run([python, "-c", "import torch"], capture_output=True, stdin=subprocess.DEVNULL).returncode == 0


@functools.cache  # importing torch takes seconds
def python_with_torch(source=SOURCE):
    """The path of the first candidate that imports torch, or None."""
    return next((python for python in candidates(source) if python and os.path.exists(python) and imports_torch(python)), None)


if __name__ == "__main__":
    print(python_with_torch() or "")
