"""How long a launcher takes to start ranks and to see them end: lockstep run, and torchrun beside it in the same rounds.

    python3 bench/launch/bench_launch.py [--rounds 10] [--json FILE] [--tiny]

A round runs every case once; medians over the rounds. `true` shows the launcher alone; one_all_reduce loads LibTorch,
joins two ranks and adds up one number. The promise: two ranks of an empty training program are done within a second.
"""

import os
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from support import BIN, LOCKSTEP, finish, host_facts, options_of, python_with_torch, run  # noqa: E402

ONE_ALL_REDUCE = os.path.join(BIN, "one_all_reduce")
TARGET_MS = {"lockstep run -n 2 -- one_all_reduce": 1000}


def cases():
    """Name, program started, ranks, and command of each case; and the reasons for those that are missing."""
    found, missing = [], {}
    for ranks in (2, 8, 64):
        found.append((f"lockstep run -n {ranks} -- true", ranks, [LOCKSTEP, "run", "-n", str(ranks), "--", "true"]))
    found.append(("one_all_reduce", 1, [ONE_ALL_REDUCE]))
    found.append(("lockstep run -n 2 -- one_all_reduce", 2, [LOCKSTEP, "run", "-n", "2", "--", ONE_ALL_REDUCE]))
    name = "torchrun --nproc-per-node 2 one_all_reduce"
    python = python_with_torch()
    if python:
        found.append((name, 2, [python, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2",
                                ONE_ALL_REDUCE]))
    else:
        missing[name] = "LibTorch here is no part of a Python, so there is no torchrun"
    return found, missing


def measure(found, rounds):
    """Milliseconds of every round, by name; one round before them fills the page cache and is not counted."""
    times = {name: [] for name, _, _ in found}
    with tempfile.TemporaryDirectory(prefix="lockstep_bench_") as folder:
        for number in range(rounds + 1):
            for name, _, command in found:
                start = time.monotonic()
                run(command, timeout=120, cwd=folder)
                if number > 0:
                    times[name].append((time.monotonic() - start) * 1000)
    return times


def main():
    options = options_of(__doc__, 10)
    found, missing = cases()
    facts = host_facts()
    times = measure(found, options.rounds)
    rows = [{"case": name, "ranks": ranks, "median_ms": round(statistics.median(times[name]), 2),
             "min_ms": round(min(times[name]), 2), "max_ms": round(max(times[name]), 2), "target_ms": TARGET_MS.get(name)}
            for name, ranks, _ in found]

    print(f"{'starting and ending, ms':<46}{'median':>9}{'min':>9}{'max':>9}{'target':>9}")
    for row in rows:
        target = f"< {row['target_ms']}" if row["target_ms"] else ""
        print(f"{row['case']:<46}{row['median_ms']:>9.1f}{row['min_ms']:>9.1f}{row['max_ms']:>9.1f}{target:>9}")
    finish(options, {"host": facts, "rounds": options.rounds, "rows": rows, "missing": missing})


if __name__ == "__main__":
    main()
