#!python
"""The command `lockstep` of a wheel: becomes the launcher that lies in the package. scripts/wheel installs it."""

import os
import sys

for folder in sys.path:
    launcher = os.path.join(folder, "lockstep", "bin", "lockstep")
    if os.access(launcher, os.X_OK):
        os.execv(launcher, ["lockstep", *sys.argv[1:]])
sys.exit(f"lockstep: no folder on Python's path holds the launcher; install Lockstep's wheel again for {sys.executable}")
