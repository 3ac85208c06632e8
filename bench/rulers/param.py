"""PARAM's comms.py, unchanged, over torch.distributed with Gloo and with Lockstep, in turns.

    python3 bench/rulers/param.py --param DIR [--ranks 2] [--rounds 3] [--collectives all_reduce ...] [--modes blocking async]
                                  [--bytes 8 67108864] [--json FILE] [--tiny]

DIR has the sources (https://github.com/facebookresearch/param), as they come. Blocking runs are first checked by PARAM's
own validation. A figure is PARAM's p50 over ranks of a call's average time (async: many calls in flight, then all waits);
the table has medians over rounds, and the median of the rounds' ratios: Gloo's time over Lockstep's. The package for
Python must be there: tests/python/package.py builds it.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
from rounds import Figures, Rounds, print_table  # noqa: E402
from support import BUILD, LOCKSTEP, clean_environment, finish, python_with_torch  # noqa: E402

SITE = os.path.join(BUILD, "python", "site")
COLLECTIVES = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]
MODES = {"blocking": 1, "async": 0}
# The greatest size of a range, and how many calls it is measured by.
BANDS = [(64 << 10, 200), (2 << 20, 30), (1 << 40, 8)]


def command(options, python, backend, mode, collectives, sizes, calls, more, meeting):
    # Not bound to cores: Gloo has threads of its own, which would share a rank's.
    return [LOCKSTEP, "run", "-n", str(options.ranks), "--", "env", f"PYTHONPATH={SITE}", "OMP_NUM_THREADS=1", python,
            os.path.join(HERE, "param_rank.py"), options.param, meeting, "--device", "cpu", "--backend", backend, "--z", str(MODES[mode]),
            "--collective", ",".join(collectives), "--b", str(sizes[0]), "--e", str(sizes[1]), "--f", str(options.factor),
            "--n", str(calls), "--w", str(max(2, calls // 5)), *more]


def p50s(text):
    """(collective, total bytes) -> p50 in microseconds, from PARAM's lines of results."""
    rows = re.findall(r"COMMS-RES-(\w+)-float32\s+(\d+)\s+\d+\s+([\d.]+)", text)
    return {(name, int(size)): float(taken) for name, size, taken in rows}


def run(options, python, backend, mode, collectives, sizes, calls, more=()):
    with tempfile.TemporaryDirectory(prefix="lockstep_param_") as folder:
        words = command(options, python, backend, mode, collectives, sizes, calls, more, os.path.join(folder, "meet"))
        done = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=clean_environment(), timeout=300)
    found = p50s(done.stdout)
    # Not the exit code: a rank may abort in Gloo as its interpreter ends, after all results.
    counts = {name: sum(name == other for other, _ in found) for name in collectives}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        least = [name for name, count in counts.items() if count == min(counts.values())]
        raise RuntimeError(f"PARAM has no results of {', '.join(least)} on {backend}\n{done.stdout[-1000:]}\n{done.stderr[-1000:]}")
    return found


def bands(options):
    """Ranges of sizes, each with the number of calls. Sizes go up by a factor from the least one; the greatest one comes last in any case."""
    least, greatest = options.bytes
    sizes = [least]
    while sizes[-1] * options.factor <= greatest:
        sizes.append(sizes[-1] * options.factor)
    parts, below = [], 0
    for most, calls in BANDS:
        parts.append(([size for size in sizes if below < size <= most], calls))
        below = most
    if sizes[-1] < greatest:
        parts.append(([greatest], next(calls for most, calls in BANDS if greatest <= most)))
    return [((part[0], part[-1]), 3 if options.tiny else calls) for part, calls in parts if part]


def checked(options, python, missing):
    """The collectives that both backends know and get right: all of them in one run, and one by one if that fails."""
    def check(names):
        for backend in ("gloo", "lockstep"):
            run(options, python, backend, "blocking", names, (options.bytes[0], min(options.bytes[1], 1 << 20)), 2, ["--c", "1"])

    try:
        check(options.collectives)
        return options.collectives
    except RuntimeError:
        good = []
    for name in options.collectives:
        try:
            check([name])
            good.append(name)
        except RuntimeError as error:
            missing[name] = str(error)
    return good


def measure(options, python, missing, save):
    """`save` gets the rows after every round, so that a run may be cut short."""
    rounds = Rounds()
    collectives = checked(options, python, missing)
    for number in range(options.rounds if collectives else 0):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        for mode in options.modes:
            for sizes, calls in bands(options):
                found = {backend: run(options, python, backend, mode, collectives, sizes, calls)
                         for backend in (("gloo", "lockstep") if number % 2 == 0 else ("lockstep", "gloo"))}
                for (name, size), ours in found["lockstep"].items():
                    rounds.add((f"{name}, {mode}", size), "gloo", ours, found["gloo"][name, size])
        save(sorted(rounds.rows(), key=lambda row: (row["case"], row["bytes"])))


def options_of():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--param", required=True, help="the folder with PARAM's train/")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--collectives", nargs="+", default=COLLECTIVES)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--bytes", nargs=2, type=int, default=(8, 64 << 20), help="the least and the greatest size")
    parser.add_argument("--factor", type=int, default=8, help="from one size to the next")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--tiny", action="store_true", help="one short round: does it work at all?")
    options = parser.parse_args()
    options.param = os.path.abspath(options.param)
    if not os.path.isfile(os.path.join(options.param, "train/comms/pt/comms.py")):
        parser.error(f"{options.param} has no train/comms/pt/comms.py: --param is the folder of PARAM's sources")
    if options.tiny:
        options.rounds = 1
    return options


def main():
    options = options_of()
    missing = {}
    figures = Figures(options, missing)
    python = python_with_torch()
    if not python:
        missing["PARAM"] = "no Python here has LibTorch in it"
    elif not os.path.isdir(os.path.join(SITE, "lockstep")):
        missing["PARAM"] = f"no {SITE} (tests/python/package.py builds it)"
    else:
        measure(options, python, missing, figures.save)
    print_table(figures.rows, ["gloo"])
    finish(options, figures.all())
    return 0 if figures.rows else 77


if __name__ == "__main__":
    sys.exit(main())
