"""What scripts/soak measures of launchers, and the table that it writes."""

import os
import re
import time

BEGIN, END = "<!-- soak: written by make soak -->", "<!-- soak: end -->"
# What is measured, in which unit, and by how much it may differ from begin to end of a launcher's life: what is freed returns to malloc, not always to the
# kernel, and a file may be open at that instant.
MEASURED = {"memory": ("KiB", 1024), "descriptors": ("descriptors", 1), "processes": ("processes", 1), "files": ("files", 2)}
# Files that come with a first restart or a rank and then stay as many: the newest ten reports, and what each rank has. And the
# training's own event files, of which TensorBoard wants one a start.
BOUNDED = re.compile(r"restart_\d+\.json|starts\.jsonl|rank_\d+(\.log|_error\.json)|metrics_rank\d+\.jsonl|events\.out\.tfevents\..*")
WARM_UP = 5  # samples of a launcher that do not count: its buffers come with the first lines


def resident_kb(pid):
    with open(f"/proc/{pid}/status") as file:
        return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1])


def children_of(pid):
    count = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                count += int(file.read().rpartition(b")")[2].split()[1]) == pid
        except (OSError, IndexError):
            pass
    return count


def files_in(folder):
    return sum(not BOUNDED.fullmatch(name) for _, _, files in os.walk(folder) for name in files)


class Samples:
    """Of launchers, every few seconds. A launcher holds more for more ranks, so their number is fitted, too."""

    def __init__(self, every=1.0):
        self.every = every
        self.last = 0
        self.of_launcher = {}

    def take(self, training):
        if time.monotonic() < self.last + self.every:
            return
        record = training.record()
        pid = training.process.pid
        try:
            before = len(record["ranks"])
            taken = {"memory": resident_kb(pid), "descriptors": len(os.listdir(f"/proc/{pid}/fd")), "processes": children_of(pid),
                     "files": files_in(training.folder) + files_in(training.run)}
            after = len(training.record()["ranks"])
        except (OSError, KeyError, TypeError):
            return  # between two starts, or over
        self.last = time.monotonic()
        if before == after:
            self.of_launcher.setdefault((training.name, training.launches), []).append((self.last, before, taken))

    def growth(self):
        """By name: the slope in units an hour, what that is in the longest life of a launcher, and what is allowed."""
        groups = [samples[WARM_UP:] for samples in self.of_launcher.values() if len(samples) >= WARM_UP + 5]
        life = max((group[-1][0] - group[0][0] for group in groups), default=0)
        found = {}
        for name, (unit, allowed) in MEASURED.items():
            slope = fit([[(at, ranks, taken[name]) for at, ranks, taken in group] for group in groups])
            found[name] = {"per_hour": slope * 3600, "grown": slope * life, "allowed": allowed, "unit": unit, "life_s": life,
                           "samples": sum(map(len, groups))}
        return found


def fit(groups):
    """The slope over time of values that also depend on the number of ranks, by least squares, with a constant for each group."""
    tt = tr = rr = ty = ry = 0.0
    for group in groups:
        mean = [sum(column) / len(group) for column in zip(*group)]
        for row in group:
            t, r, y = (value - its for value, its in zip(row, mean))
            tt, tr, rr, ty, ry = tt + t * t, tr + t * r, rr + r * r, ty + t * y, ry + r * y
    determinant = tt * rr - tr * tr
    if tt == 0:
        return 0.0
    return (ty * rr - ry * tr) / determinant if rr > 0 and determinant > 1e-9 * tt * rr else ty / tt


def table(figures):
    faults = ", ".join(f"{count} x {kind}" for kind, count in sorted(figures["faults"].items()))
    rows = [("time", f"{figures['hours']:.2f} hours, seed {figures['seed']}, {figures['machine']}"),
            ("faults", f"{sum(figures['faults'].values())}, one in {figures['every_s']:.0f} s: {faults}"),
            ("trainings that ended with the bits of an undisturbed one", f"{figures['trainings']} of {figures['trainings']}"),
            ("effective steps", f"{figures['effective']:.1%}: {figures['steps_needed']:,} needed, {figures['steps_made']:,} made")]
    for name, found in figures["growth"].items():
        rows.append((f"a launcher's {name}", f"{found['per_hour']:+.1f} {found['unit']} an hour; {found['grown']:+.2f} in the longest life, "
                                             f"{found['life_s'] / 60:.0f} min, with up to {found['allowed']} allowed; {found['samples']:,} samples"))
    rows += [(f"left out: {kind}", why) for kind, why in figures["left_out"].items()]
    return "\n".join(["| soak | |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in rows)])


def write_table(path, figures):
    with open(path) as file:
        text = file.read()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{path} has no place for the table, between {BEGIN} and {END}")
    head, rest = text.split(BEGIN)
    with open(path, "w") as file:
        file.write(f"{head}{BEGIN}\n\n{table(figures)}\n\n{END}{rest.split(END)[1]}")
