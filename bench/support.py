"""What the bench scripts share: places, facts about the machine, and running a command with a deadline."""

import os
import platform
import shutil
import signal
import subprocess

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.environ.get("LOCKSTEP_BUILD_DIR", os.path.join(SOURCE, "build"))
BIN = os.path.join(BUILD, "bin")
LOCKSTEP = os.path.join(BIN, "lockstep")

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(**more):
    """This process's environment without what a launcher around it may have set."""
    clean = {key: value for key, value in os.environ.items()
             if key not in LAUNCHER_VARIABLES and not key.startswith(("OMPI_", "PMI", "SLURM_", "LOCKSTEP_"))}
    clean.update(more)
    return clean


def run(command, timeout, cwd=None):
    """Runs a command to its end; raises RuntimeError with its output when it fails or takes longer than `timeout` s."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env=clean_environment(), cwd=cwd, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise RuntimeError(f"{command} is not done after {timeout} s\n{output}") from None
    if process.returncode != 0:
        raise RuntimeError(f"{command} ended with {process.returncode}\n{output}")
    return output


def python_with_torch():
    """The Python that has the torch of this build, or None when LibTorch is no part of a Python."""
    try:
        with open(os.path.join(SOURCE, ".setup/torch_dir")) as file:
            folder = file.read().strip()  # <prefix>/lib/pythonX/site-packages/torch/share/cmake/Torch
    except OSError:
        return None
    beside = os.path.join(os.path.abspath(os.path.join(folder, *[".."] * 7)), "bin/python")
    for python in (beside, shutil.which("python3")):
        if python and os.path.exists(python) and not subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
            return python
    return None


def host_facts():
    """The machine, for the head of a file of figures."""
    model = platform.machine()
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "kernel": platform.release(),
            "load_average": round(os.getloadavg()[0], 2)}
