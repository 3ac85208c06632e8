"""Prints what bench_all_reduce measured: medians, and how many times faster Lockstep is, beside the targets.

    python3 bench/all_reduce/report.py FILE [--operations all_reduce] [--dtypes fp32]

A ratio that reaches its target ends in +, one that reaches the goal in ++, one that misses in -. Always exits with 0:
figures of a busy machine are no failure.
"""

import argparse
import signal
import textwrap

from figures import DTYPES, LABELS, MPI, OPERATIONS, PLACEMENTS, Figures, size_text, time_text


def verdict(ratio, target, goal=None):
    """A ratio beside what is asked of it."""
    if ratio is None:
        return "."
    text = f"{ratio:.0f}x" if ratio >= 20 else f"{ratio:.1f}x"
    if target is None:
        return text
    mark = "-" if ratio < target else "++" if goal and ratio >= goal else "+"
    return f"{text}{mark} ({target:g}x)"


def quotient(above, below):
    return above / below if above is not None and below is not None else None


def time_row(figures, operation, dtype, size):
    times = [figures.median(operation, dtype, size, placement, "shm") for placement in PLACEMENTS]
    times += [figures.median(operation, dtype, size, "private", system) for system in (*MPI, "gloo")]
    return ["." if time is None else time_text(time) for time in times]


def ratio_row(figures, operation, dtype, size):
    best = figures.best_mpi(operation, dtype, size)
    gloo = figures.median(operation, dtype, size, "private", "gloo")
    cells = []
    for placement in PLACEMENTS:
        mine = figures.median(operation, dtype, size, placement, "shm")
        target = figures.target(operation, size, placement)
        cells.append(verdict(quotient(best and best[0], mine), target.mpi, target.mpi_goal))
        cells.append(verdict(quotient(gloo, mine), target.gloo))
        if placement == "resident":
            share = quotient(figures.bound_us(size), mine) if operation == "all_reduce" and size >= 16 << 20 else None
            mark = "" if share is None or not target.bound else "-" if share < target.bound else "+"
            cells.append("." if share is None else f"{100 * share:.0f} %{mark}")
    return cells


def table(figures, operation, dtype):
    heads = ["size", "resident", "private", *(LABELS[system] for system in MPI), "Gloo", "MPI/res.", "Gloo/res.", "of bound",
             "MPI/priv.", "Gloo/priv."]
    lines = [heads] + [[size_text(size), *time_row(figures, operation, dtype, size), *ratio_row(figures, operation, dtype, size)]
                       for size in figures.sizes(operation, dtype)]
    # What could not be started has its column and says so; else a column that nobody fills is left out, so the ratios
    # appear with Lockstep's backend.
    missing = {LABELS[name] if name in MPI else "Gloo" for name in figures.json["failed"] if name in (*MPI, "gloo")}
    for line in lines[1:]:
        line[:] = ["missing" if head in missing else cell for head, cell in zip(heads, line)]
    used = [i for i in range(len(heads)) if i == 0 or any(line[i] != "." for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in used}
    print(f"\n{operation}, {dtype}, {figures.ranks} ranks")
    for line in lines:
        print("  ".join(line[i].rjust(widths[i]) for i in used))


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    options = parser.parse_args()
    figures = Figures(options.file)
    host = figures.json["host"]
    print(f"{host['cpu']}, {host['cores']} cores, load {host['load_average_before']:.1f} before; triad "
          f"{figures.triad_gb_per_s:.1f} GB/s; {figures.json['rounds']} rounds; medians; targets in brackets")
    for name, system in figures.json["systems"].items():
        print(f"  {name}: {system['version']}; {system['settings']}")
    for name, reason in figures.json["failed"].items():
        print(textwrap.shorten(f"  {name} is out: {reason}", 400))
    reasons = {(line["system"], line["reason"]) for line in figures.json["not_offered"] if line["placement"] == "private"}
    for name, reason in sorted(reasons):
        print(f"  {name} does not offer some: {reason}")
    for operation in options.operations.split(","):
        for dtype in options.dtypes.split(","):
            if figures.sizes(operation, dtype):
                table(figures, operation, dtype)


if __name__ == "__main__":
    main()
