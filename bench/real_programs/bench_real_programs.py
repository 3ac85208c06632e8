#!/usr/bin/env python3
"""Steps per second of the example programs: two ranks with a thread each, over one process with two threads.

Beside them two processes of one thread run side by side, each with half the batch and nothing between them: what two ranks
would reach if communication took no time. Runs of the three kinds alternate. Each run is made with few and with many steps,
and the difference counts, so that starting a program does not. Prints a line for each program: the median rate of each, and
the median, least and largest ratio of two ranks, and of side by side, over one process.
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

# Program -> arguments, its batch, and few and many steps.
PROGRAMS = {
    "distillation": ([], 48, 20, 2020),
    "fine_tune": (["--first-steps", "2"], 48, 10, 1510),
    "gradient_penalty": ([], 48, 10, 510),
    "grow_and_prune": ([], 1536, 20, 1220),
    "point_cloud": ([], 48, 10, 210),
    "sequence_to_sequence": ([], 48, 5, 155),
    "solver_with_network": ([], 24, 5, 105),
}
KINDS = ("one_process", "side_by_side", "two_ranks")


def seconds(program, kind, steps):
    """Of one run of a kind."""
    arguments, batch, _, _ = PROGRAMS[program]
    environment = dict(os.environ, OMP_NUM_THREADS="2" if kind == "one_process" else "1")
    with tempfile.TemporaryDirectory() as folder:
        command = [os.path.join(BIN, program), "--steps", str(steps), *arguments]
        if kind == "two_ranks":
            command = [LOCKSTEP, "run", "-n", "2", "--run-dir", os.path.join(folder, "run"), "--", *command]
        if kind == "side_by_side":
            command += ["--batch-size", str(batch // 2)]
        began = time.monotonic()
        processes = []
        for number in range(2 if kind == "side_by_side" else 1):
            body = ["--checkpoint", os.path.join(folder, f"body{number}.safetensors")] if program == "fine_tune" else []
            processes.append(subprocess.Popen([*command, *body], env=environment, cwd=folder, stdout=subprocess.DEVNULL))
        if any([process.wait() for process in processes]):
            raise SystemExit(f"{program} failed")
        return time.monotonic() - began


def spread(ratios):
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


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
        _, _, few, many = PROGRAMS[program]
        if options.tiny:
            few, many = 2, 8
        rates = {kind: [] for kind in KINDS}
        for _ in range(1 if options.tiny else options.rounds):
            for kind in KINDS:
                short, long = (seconds(program, kind, steps) for steps in (few, many))
                rates[kind].append((many - few) / max(long - short, 1e-9))
        ratios, bound = ([rate / one for one, rate in zip(rates["one_process"], rates[kind])] for kind in ("two_ranks", "side_by_side"))
        results[program] = {**rates, "ratios": ratios, "bound": bound}
        print(f"{program:22}" + "".join(f" {kind} {statistics.median(rates[kind]):7.1f} steps/s " for kind in KINDS)
              + f"  ratio {spread(ratios)}, side by side {spread(bound)}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    sys.exit(main())
