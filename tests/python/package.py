"""Builds the Python package into a folder of the build tree, so that tests need no installed package.

    package.py         builds, if a source is newer than what is there

The folder then works on PYTHONPATH as an installed package does: `import torch` finds the entry point in it.
"""

import glob
import os
import re
import subprocess
import sys

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.abspath(os.environ.get("LOCKSTEP_BUILD_DIR", os.path.join(SOURCE, "build")))  # pip works in another folder
FOLDER = os.path.join(BUILD, "python")
SITE = os.path.join(FOLDER, "site")


def sources():
    for pattern in ("python/*.*", "python/lockstep/*.*", "src/*/*.*", "src/*/*/*.*", "include/lockstep/*.h"):
        yield from filter(os.path.isfile, glob.glob(os.path.join(SOURCE, pattern)))


def library(python):
    """liblockstep.a of the build, if it is a plain one with the torch of `python`: compiling its files once is enough."""
    path = os.path.join(BUILD, "src/liblockstep.a")
    try:
        with open(os.path.join(BUILD, "CMakeCache.txt")) as file:
            cache = dict(re.findall(r"^(\w+):\w+=(.*)$", file.read(), re.MULTILINE))
    except OSError:
        return None
    prefix = os.path.realpath(os.path.dirname(os.path.dirname(os.path.abspath(python))))
    plain = cache.get("CMAKE_BUILD_TYPE") == "Release" and not cache.get("LOCKSTEP_SANITIZE")
    return path if plain and os.path.exists(path) and cache.get("Torch_DIR", "").startswith(prefix + os.sep) else None


def is_current(linked):
    built = glob.glob(os.path.join(SITE, "lockstep", "_C*.so"))
    return bool(built) and os.path.getmtime(built[0]) > max(map(os.path.getmtime, [*sources(), *linked]))


def tree():
    """The folder to give to pip: a copy of the package beside links to the sources. pip writes its build folder there, and nothing is left in
    the source tree."""
    folder = os.path.join(FOLDER, "tree")
    os.makedirs(os.path.join(folder, "python/lockstep"), exist_ok=True)
    for name in ("src", "include"):
        if not os.path.islink(os.path.join(folder, name)):
            os.symlink(os.path.join(SOURCE, name), os.path.join(folder, name))
    own = glob.glob(os.path.join(SOURCE, "python/*.*")) + glob.glob(os.path.join(SOURCE, "python/lockstep/*.*"))
    for path in filter(os.path.isfile, own):  # an installation may leave folders there
        copy_if_changed(path, os.path.join(folder, os.path.relpath(path, SOURCE)))
    return os.path.join(folder, "python")


def pip(python, *arguments, built=None):
    """Runs it on the package, which is compiled in this environment and links the library `built`. Raises with pip's output."""
    command = [python, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps", *arguments[1:], tree()]
    environment = dict(os.environ, **({"LOCKSTEP_LIBRARY": built} if built else {}))
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")


def build(python=sys.executable):
    """The folder for PYTHONPATH. Raises with pip's output if the package does not build."""
    built = library(python)
    if not is_current([built] if built else []):
        pip(python, "install", "--upgrade", "--target", SITE, built=built)
    return SITE


def copy_if_changed(source, target):
    with open(source, "rb") as file:
        content = file.read()
    if os.path.exists(target):
        with open(target, "rb") as file:
            if file.read() == content:
                return
    with open(target, "wb") as file:
        file.write(content)


if __name__ == "__main__":
    print(build())
