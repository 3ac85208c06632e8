"""Figures of two kinds of systems, taken in turns: medians, and ratios of what was measured in the same round."""

import json
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from support import host_facts  # noqa: E402


class Rounds:
    """Microseconds by case, opponent and round: what Lockstep took, and what the opponent took beside it."""

    def __init__(self):
        self.pairs = {}

    def add(self, case, opponent, ours, theirs):
        self.pairs.setdefault(case, {}).setdefault(opponent, []).append((ours, theirs))

    def rows(self):
        """One row a case: `ratio` is the opponent's time over Lockstep's, so that more than 1 is faster than it."""
        rows = []
        for case, opponents in self.pairs.items():
            row = {"case": case[0], "bytes": case[1], "lockstep_us": median(ours for pairs in opponents.values() for ours, _ in pairs),
                   "opponents": {}}
            for name, pairs in opponents.items():
                row["opponents"][name] = {"us": median(theirs for _, theirs in pairs),
                                          "ratio": median(theirs / max(ours, 0.01) for ours, theirs in pairs), "rounds": len(pairs)}
            row["least_ratio"] = min(opponent["ratio"] for opponent in row["opponents"].values())
            rows.append(row)
        return rows


class Figures:
    """What a driver's file holds; saved after every round."""

    def __init__(self, options, missing):
        self.options, self.missing, self.rows, self.host = options, missing, [], host_facts()

    def all(self):
        return {"host": self.host, "ranks": self.options.ranks, "rows": self.rows, "missing": self.missing}

    def save(self, rows):
        self.rows = rows
        if self.options.json:
            with open(self.options.json, "w") as file:
                json.dump(self.all(), file, indent=2)


def median(values):
    return round(statistics.median(values), 3)


def print_table(rows, opponents):
    print(f"{'':<24}{'bytes':>10}{'Lockstep us':>13}" + "".join(f"{name:>22}" for name in opponents) + f"{'least':>8}")
    for row in rows:
        cells = (row["opponents"].get(name) for name in opponents)
        print(f"{row['case']:<24}{row['bytes']:>10}{row['lockstep_us']:>13.2f}" +
              "".join(f"{cell['us']:>14.2f} {cell['ratio']:>6.2f}x" if cell else f"{'-':>22}" for cell in cells) + f"{row['least_ratio']:>7.2f}x")
    least = [row["least_ratio"] for row in rows]
    if least:
        print(f"least ratio {min(least):.2f}, median {statistics.median(least):.2f}; below 1 in {sum(ratio < 1 for ratio in least)} of {len(least)} rows")
