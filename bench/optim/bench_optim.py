#!/usr/bin/env python3
"""What a step of AdamW takes in one process: LibTorch's C++, Lockstep's kernels, and PyTorch's fused=True.

    bench_optim.py [--sizes 5.8m 100m] [--rounds 15] [--threads 1] [--json FILE] [--tiny]

A process each, which take turns: in every round each system makes the same number of steps. Before anything is timed,
all must have come to the same parameters. Ratios are taken within a round; medians are printed.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import support  # noqa: E402

SIZES = {
    "5.8m": ["2048x784", "2048", "2048x2048", "2048", "10x2048", "10"],  # bench_step's mlp
    "100m": ["2048x2048"] * 24,
    "tiny": ["64x63", "5"],
}
SYSTEMS = ("libtorch", "lockstep", "python_fused")
STEPS_TO_COMPARE = 3


def python_contestant(threads, *texts):
    """The other side of bench_optim.cpp."""
    import time

    import torch

    torch.set_num_threads(int(threads))
    shapes = [[int(size) for size in text.split("x")] for text in texts]

    def formula(shape, key):
        value = torch.arange(math.prod(shape), dtype=torch.float64) * 0.6180339887498949 + key * 0.3771
        return (value - value.floor() - 0.5).reshape(shape).float()

    parameters = []
    optimizer = None
    for line in sys.stdin:
        command = line.split()
        if command[0] == "make":
            parameters = [torch.nn.Parameter(formula(shape, i)) for i, shape in enumerate(shapes)]
            for i, parameter in enumerate(parameters):
                parameter.grad = formula(shapes[i], 1000 + i)
            optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True)
            print("made", flush=True)
        elif command[0] == "step":
            start = time.perf_counter()
            optimizer.step()
            print(1e3 * (time.perf_counter() - start), flush=True)
        else:
            doubles = [parameter.detach().double() for parameter in parameters]
            print(sum(float(d.sum()) for d in doubles), sum(float(d.square().sum()) for d in doubles), flush=True)


class Contestant:
    def __init__(self, system, shapes, threads):
        arguments = [str(threads), *shapes]
        if system == "python_fused":
            command = [support.python_with_torch(), os.path.abspath(__file__), "--contestant", *arguments]
        else:
            command = [os.path.join(support.BIN, "bench_optim"), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=support.clean_environment())
        self.ask(f"make {system}")

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()} at: {command}")
        return answer

    def steps(self, count):
        return statistics.median(float(self.ask("step")) for _ in range(count))

    def end(self):
        self.process.stdin.close()
        self.process.wait(60)


def verify(contestants):
    sums = {}
    for system, contestant in contestants.items():
        contestant.steps(STEPS_TO_COMPARE)
        sums[system] = [float(number) for number in contestant.ask("sum").split()]
    expected = sums["libtorch"]
    for system, mine in sums.items():
        for one, other in zip(mine, expected):
            if abs(one - other) > 1e-6 * max(sums["libtorch"][1], 1):
                raise RuntimeError(f"{system} has come to other parameters than libtorch: {sums}")


def measure(size, options):
    contestants = {}
    try:
        for system in options.systems:
            contestants[system] = Contestant(system, SIZES[size], options.threads)
        verify(contestants)
        steps = 2 if size == "100m" else 10
        times = {system: [] for system in contestants}
        for _ in range(options.rounds):
            for system, contestant in contestants.items():
                times[system].append(contestant.steps(steps))
    finally:
        for contestant in contestants.values():
            contestant.end()
    rows = []
    for system, mine in times.items():
        row = {"size": size, "system": system, "threads": options.threads, "median_ms": statistics.median(mine), "min_ms": min(mine)}
        for other in times:
            row[f"over_{other}"] = statistics.median(a / b for a, b in zip(mine, times[other]))
        rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=["5.8m", "100m"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--tiny", action="store_true", help="to see that it works")
    parser.add_argument("--contestant", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        return python_contestant(*options.contestant)
    if options.tiny:
        options.sizes, options.rounds = ["tiny"], 2
    options.systems = list(SYSTEMS)
    if support.python_with_torch() is None:
        print("bench_optim: python_fused is not measured: no Python here has LibTorch in it", file=sys.stderr)
        options.systems.remove("python_fused")
    rows = [row for size in options.sizes for row in measure(size, options)]
    print(f"{'size':6} {'system':14} {'median':>10} {'least':>10}   over " + ", ".join(options.systems))
    for row in rows:
        print(f"{row['size']:6} {row['system']:14} {row['median_ms']:7.2f} ms {row['min_ms']:7.2f} ms   " +
              ", ".join(f"{row[f'over_{other}']:.3f}" for other in options.systems))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"host": support.host_facts(), "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
