"""Reads what bench_all_reduce writes: the one place that knows the JSON's keys and the targets."""

import json
from collections import namedtuple

MPI = ("mpich", "openmpi", "openmpi-debian", "impi")
LABELS = {"shm": "Lockstep shm", "gloo": "Gloo (LibTorch)", "lockstep-gloo": "Lockstep over Gloo", "mpich": "MPICH",
          "openmpi": "Open MPI", "openmpi-debian": "Open MPI, Debian", "impi": "Intel MPI"}
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
DTYPES = ("fp32", "bf16")
PLACEMENTS = ("resident", "private")

# How many times faster than the best MPI and than Gloo; the share of the memory bound. None: nothing is asked.
Target = namedtuple("Target", "mpi mpi_goal gloo bound", defaults=(None, None, None, None))

KIB, MIB = 1 << 10, 1 << 20


class Figures:
    """The figures of one file. Times are medians in microseconds; None where there is none."""

    def __init__(self, path):
        with open(path) as file:
            self.json = json.load(file)
        self.ranks = self.json["ranks"]
        self.triad_gb_per_s = self.json["triad_gb_per_s"]
        self.oversubscribed = self.ranks > self.json["host"]["cores"]
        self._rows = {(row["operation"], row["dtype"], row["bytes"], row["placement"], row["system"]): row
                      for row in self.json["rows"]}

    def sizes(self, operation, dtype):
        return sorted({key[2] for key in self._rows if key[:2] == (operation, dtype)})

    def median(self, operation, dtype, size, placement, system):
        row = self._rows.get((operation, dtype, size, placement, system))
        return row["median_us"] if row else None

    def best_mpi(self, operation, dtype, size):
        """(median, system) of the fastest MPI, or None."""
        times = [(self.median(operation, dtype, size, "private", system), system) for system in MPI]
        return min((entry for entry in times if entry[0] is not None), default=None)

    def bound_us(self, size):
        """The least time of an all-reduce of resident buffers: 2 N buffers through memory at the triad's rate."""
        return 2 * self.ranks * size / (self.triad_gb_per_s * 1e3)

    def target(self, operation, size, placement):
        if self.oversubscribed or operation != "all_reduce":
            return Target(mpi=1)
        if size <= 4 * KIB:
            return Target(mpi=1, mpi_goal=1.5, gloo=300)
        if size < 64 * KIB:
            return Target()
        if placement == "private":
            return Target(mpi=2, gloo=4)
        if size <= 4 * MIB:
            return Target(mpi=5, mpi_goal=8, gloo=50)
        if size >= 16 * MIB:
            return Target(mpi=3, mpi_goal=4, gloo=5, bound=0.8)
        return Target()


def size_text(size):
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def time_text(microseconds):
    for unit, name in ((1e6, "s"), (1e3, "ms")):
        if microseconds >= unit:
            return f"{microseconds / unit:.3g} {name}"
    return f"{microseconds:.3g} us"
