#!/usr/bin/env python3
"""Steps per second of the example programs: two ranks with a thread each, over one process with two threads.

Runs of both kinds alternate. Each run is made with few and with many steps, and the difference counts, so that starting a
program does not. Prints a line for each program: the median rate of both, and the median, least and largest ratio.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from support import BIN, LOCKSTEP  # noqa: E402

# Program -> arguments, and few and many steps.
PROGRAMS = {
    "distillation": ([], 20, 2020),
    "fine_tune": (["--first-steps", "2"], 10, 1510),
    "gradient_penalty": ([], 10, 510),
    "grow_and_prune": ([], 20, 1220),
    "point_cloud": ([], 10, 210),
    "sequence_to_sequence": ([], 5, 155),
    "solver_with_network": ([], 5, 105),
}


def seconds(program, ranks, steps):
    """Of a run; `ranks` 1: a process with two threads."""
    with tempfile.TemporaryDirectory() as folder:
        command = [os.path.join(BIN, program), "--steps", str(steps), *PROGRAMS[program][0]]
        if program == "fine_tune":
            command += ["--checkpoint", os.path.join(folder, "body.safetensors")]
        environment = dict(os.environ, OMP_NUM_THREADS=str(3 - ranks))
        if ranks > 1:
            command = [LOCKSTEP, "run", "-n", str(ranks), "--run-dir", os.path.join(folder, "run"), "--", *command]
        began = time.monotonic()
        subprocess.run(command, check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
        return time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="of: " + ", ".join(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs of each kind (default: 5)")
    parser.add_argument("--json", help="file for the rates")
    parser.add_argument("--tiny", action="store_true", help="one round of a few steps: whether it works")
    options = parser.parse_args()
    unknown = set(options.programs) - set(PROGRAMS)
    if unknown:
        parser.error("no such program: " + ", ".join(sorted(unknown)))
    results = {}
    for program in options.programs or PROGRAMS:
        _, few, many = PROGRAMS[program]
        if options.tiny:
            few, many = 2, 8
        rates = {1: [], 2: []}
        for _ in range(1 if options.tiny else options.rounds):
            for ranks in rates:
                short, long = (seconds(program, ranks, steps) for steps in (few, many))
                rates[ranks].append((many - few) / max(long - short, 1e-9))
        ratios = [two / one for one, two in zip(rates[1], rates[2])]
        results[program] = {"one_process": rates[1], "two_ranks": rates[2], "ratios": ratios}
        print(f"{program:22} one process {statistics.median(rates[1]):8.1f} steps/s   two ranks {statistics.median(rates[2]):8.1f}"
              f"   ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    sys.exit(main())
