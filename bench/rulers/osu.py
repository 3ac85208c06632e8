"""The OSU micro-benchmarks, unchanged, over each MPI of this machine and over Lockstep below it, in turns.

    python3 bench/rulers/osu.py --osu DIR [--ranks 2] [--rounds 3] [--benchmarks allreduce bcast ...] [--mpis mpich ...]
                                [--bytes 4 4194304] [--json FILE] [--tiny]

DIR has the sources of version 7 (https://mvapich.cse.ohio-state.edu/benchmarks), as they come: they are configured and
built outside of it, by each MPI's compiler. Every program runs once with its own validation, over the MPI and over
Lockstep, before it is timed. A figure is the program's own average of many calls; the table has medians over rounds,
and the median of the rounds' ratios: the MPI's time over Lockstep's.
"""

import argparse
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
from mpis import all_mpis, said  # noqa: E402
from rounds import Figures, Rounds, print_table  # noqa: E402
from support import clean_environment, finish  # noqa: E402

COLLECTIVES, MESSAGES = "c/mpi/collective/blocking", "c/mpi/pt2pt/standard"
REDUCTIONS = ("allreduce", "reduce", "reduce_scatter", "reduce_scatter_block")
BENCHMARKS = {**dict.fromkeys((*REDUCTIONS, "bcast", "allgather", "alltoall", "gather", "scatter", "barrier"), COLLECTIVES),
              "latency": MESSAGES, "multi_lat": MESSAGES}
# Those that it leaves to the default: all but messages between more than two ranks.
USUAL = [name for name in BENCHMARKS if name not in ("multi_lat", "reduce_scatter_block")]
# From this size on the program's number of iterations (100, and 1000 of messages) takes too long.
LARGE = 1 << 20


def build(mpi, osu, benchmarks):
    """Builds the programs with this MPI; raises RuntimeError with the end of the log."""
    folder = os.path.join(mpi.folder, "osu")
    os.makedirs(folder, exist_ok=True)
    compiler = re.sub("mpicxx", "mpicc", mpi.compiler)
    log = os.path.join(folder, "build.log")
    commands = []
    if not os.path.exists(os.path.join(folder, "Makefile")):
        commands.append([os.path.join(osu, "configure"), f"CC={compiler}", f"CXX={mpi.compiler}"])
    for part in sorted({BENCHMARKS[name] for name in benchmarks}):
        # The files that autoconf made are taken as they are, whatever their dates.
        commands.append(["make", "-C", os.path.join(folder, part), "ACLOCAL=:", "AUTOMAKE=:", "AUTOCONF=:", "AUTOHEADER=:",
                         *(f"osu_{name}" for name in benchmarks if BENCHMARKS[name] == part)])
    with open(log, "w") as file:
        for command in commands:
            if subprocess.run(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, env=clean_environment(), timeout=900).returncode != 0:
                with open(log) as text:
                    raise RuntimeError(f"{' '.join(command[:3])} failed: {''.join(text.readlines()[-5:])}")


def program(mpi, name, sizes, more):
    command = [os.path.join(mpi.folder, "osu", BENCHMARKS[name], f"osu_{name}")]
    if name != "barrier":
        command += ["-m", f"{sizes[0]}:{sizes[1]}"]
    if name in REDUCTIONS:
        command += ["-T", "mpi_float"]
    return command + more


def latencies(text):
    """Size -> microseconds, in what a program prints; osu_barrier has one number."""
    rows = re.findall(r"^(\d+)[ \t]+([\d.]+)", text, re.MULTILINE)
    if rows:
        return {int(size): float(taken) for size, taken in rows}
    return {0: float(re.search(r"^\s+([\d.]+)\s*$", text, re.MULTILINE).group(1))}


def run(mpi, name, sizes, more, ranks, with_lockstep):
    command = mpi.command(ranks, program(mpi, name, sizes, more), mpi.interposer() if with_lockstep else None)
    text, errors = said(command, timeout=300)
    if "Fail" in text:
        raise RuntimeError(f"osu_{name} found a wrong result:\n{text}")
    if with_lockstep:
        by_lockstep, by_mpi = map(int, re.search(r"(\d+) calls by Lockstep, (\d+) by the MPI", errors).groups())
        if by_lockstep == 0 or by_mpi != 0:
            raise RuntimeError(f"osu_{name} does not measure Lockstep: it answered {by_lockstep} calls, and {by_mpi} were left to the MPI")
    return latencies(text)


def bands(options):
    """Ranges of sizes, each with the number of calls that it is measured by."""
    low, high = options.bytes
    if options.tiny:
        return [((low, high), ["-i", "3", "-x", "1"])]
    small = [((low, min(high, LARGE)), [])] if low <= LARGE else []
    return small + ([((max(low, 2 * LARGE), high), ["-i", "20", "-x", "3"])] if high > LARGE else [])


def validate(mpi, name, options):
    if name == "barrier":
        return
    for with_lockstep in (False, True):
        run(mpi, name, options.bytes, ["-c", "-i", "3", "-x", "1"], options.ranks, with_lockstep)


def measure(mpis, options, missing, save):
    """`save` gets the rows after every round, so that a run may be cut short."""
    rounds = Rounds()
    contests = []
    for mpi in mpis:
        for name in options.benchmarks:
            try:
                validate(mpi, name, options)
                contests.append((mpi, name))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                missing[f"{name}, {mpi.name}"] = str(error)
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        for mpi, name in contests:
            for sizes, more in bands(options):
                figures = {}
                for with_lockstep in ((False, True) if number % 2 == 0 else (True, False)):
                    figures[with_lockstep] = run(mpi, name, sizes, more, options.ranks, with_lockstep)
                for size, ours in figures[True].items():
                    rounds.add((name, size), mpi.name, ours, figures[False][size])
        save(sorted(rounds.rows(), key=lambda row: (options.benchmarks.index(row["case"]), row["bytes"])))


def options_of():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--osu", required=True, help="the folder with the sources' configure")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--benchmarks", nargs="+", choices=list(BENCHMARKS), default=USUAL)
    parser.add_argument("--mpis", nargs="+", choices=[mpi.name for mpi in all_mpis()], help="else all that are there")
    parser.add_argument("--bytes", nargs=2, type=int, default=(4, 4 << 20), help="the least and the greatest size")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--tiny", action="store_true", help="one short round: does it work at all?")
    options = parser.parse_args()
    options.osu = os.path.abspath(options.osu)
    if not os.path.isfile(os.path.join(options.osu, "configure")) or not os.path.isdir(os.path.join(options.osu, COLLECTIVES)):
        parser.error(f"{options.osu} has no configure and no {COLLECTIVES}: --osu is the folder of the OSU micro-benchmarks' sources, version 7")
    if options.ranks != 2:
        options.benchmarks = [name for name in options.benchmarks if name != "latency"]  # of exactly two
    if options.tiny:
        options.rounds = 1
    return options


def main():
    options = options_of()
    missing, ready = {}, []
    figures = Figures(options, missing)
    for mpi in all_mpis():
        if options.mpis and mpi.name not in options.mpis:
            continue
        reason = mpi.missing()
        try:
            if reason is None:
                mpi.interposer()
                build(mpi, options.osu, options.benchmarks)
                ready.append(mpi)
        except RuntimeError as error:
            reason = str(error)
        if reason:
            missing[mpi.name] = reason
    measure(ready, options, missing, figures.save)
    print_table(figures.rows, [mpi.name for mpi in ready])
    finish(options, figures.all())
    return 0 if figures.rows else 77


if __name__ == "__main__":
    sys.exit(main())
