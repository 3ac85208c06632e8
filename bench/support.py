"""What the bench scripts share: paths, options, facts about the machine, running a command with a deadline, and the end of a report."""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(SOURCE, "scripts"))
from python_with_torch import python_with_torch  # noqa: E402, F401
BUILD = os.path.abspath(os.environ.get("LOCKSTEP_BUILD_DIR", os.path.join(SOURCE, "build")))
BIN = os.path.join(BUILD, "bin")
LOCKSTEP = os.path.join(BIN, "lockstep")

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(**more):
    """This process's environment without variables that an outer launcher may have set."""
    clean = {key: value for key, value in os.environ.items()
             if key not in LAUNCHER_VARIABLES and not key.startswith(("OMPI_", "PMI", "SLURM_", "LOCKSTEP_"))}
    clean.update(more)
    return clean


def run(command, timeout, cwd=None):
    """Runs a command; raises RuntimeError with its output if it fails or takes longer than `timeout` s."""
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


def host_facts():
    """Facts about the machine, for the head of a file of figures."""
    model = platform.machine()
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "kernel": platform.release(),
            "load_average": round(os.getloadavg()[0], 2)}


def options_of(document, rounds):
    """The options of a bench that runs every case once a round."""
    parser = argparse.ArgumentParser(description=document.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--tiny", action="store_true", help="one round: does it work at all?")
    options = parser.parse_args()
    if options.tiny:
        options.rounds = 1
    return options


def finish(options, figures):
    """Says what was not measured, and writes the file of figures if it is asked for."""
    for name, reason in figures["missing"].items():
        print(f"{name}: not measured: {reason}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)
            file.write("\n")
