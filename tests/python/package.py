"""Builds the Python package into a folder of the build tree, so that tests need no installed package.

    package.py         builds, if a source is newer than what is there

The folder then works on PYTHONPATH as an installed package does: `import torch` finds the entry point in it.
"""

import glob
import os
import subprocess
import sys

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("LOCKSTEP_BUILD_DIR", os.path.join(SOURCE, "build"))
FOLDER = os.path.join(BUILD, "python")
SITE = os.path.join(FOLDER, "site")


def sources():
    for pattern in ("python/*.*", "python/lockstep/*.*", "src/base/*.*", "src/collectives/shm/*.*",
                    "src/collectives/shm/backend/*.*", "include/lockstep/error.h", "src/collectives/cause.h"):
        yield from filter(os.path.isfile, glob.glob(os.path.join(SOURCE, pattern)))


def is_current():
    built = glob.glob(os.path.join(SITE, "lockstep", "_C*.so"))
    return bool(built) and os.path.getmtime(built[0]) > max(map(os.path.getmtime, sources()))


def build(python=sys.executable):
    """The folder for PYTHONPATH. Raises with pip's output if the package does not build."""
    if not is_current():
        # A link to the sources beside a copy of the package: pip writes its build folder there, and nothing is left
        # in the source tree.
        tree = os.path.join(FOLDER, "tree")
        os.makedirs(os.path.join(tree, "python/lockstep"), exist_ok=True)
        for name in ("src", "include"):
            if not os.path.islink(os.path.join(tree, name)):
                os.symlink(os.path.join(SOURCE, name), os.path.join(tree, name))
        own = glob.glob(os.path.join(SOURCE, "python/*.*")) + glob.glob(os.path.join(SOURCE, "python/lockstep/*.*"))
        for path in filter(os.path.isfile, own):  # an installation may leave folders there
            copy_if_changed(path, os.path.join(tree, os.path.relpath(path, SOURCE)))
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation",
                   "--no-deps", "--upgrade", "--target", SITE, os.path.join(tree, "python")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
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
