#!/usr/bin/env python3
"""Draws docs/ports.svg: the losses of the example programs in fp32 on one, two and three ranks, over each other.

Prints, for each program, by how much two and three ranks differ from one: the largest difference of a point over the range of the curve.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from html import escape

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from support import BIN, LOCKSTEP  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Program -> names of its curves, and steps of a run. Where there are several runs, each gives one point: the loss of all its steps.
PROGRAMS = {
    "distillation": (("teacher", "student, taught"), range(50, 401, 50)),
    "fine_tune": (("all layers",), range(20, 161, 20)),
    "gradient_penalty": (("critic", "penalty"), (800,)),
    "grow_and_prune": (("error",), (1000,)),
    "point_cloud": (("loss",), (800,)),
    "sequence_to_sequence": (("loss",), (800,)),
    "solver_with_network": (("loss",), (400,)),
}
CURVES_OF = {"distillation": (0, 2), "fine_tune": (1,)}  # which of the program's losses; otherwise all
# Number of ranks -> colour, width and dashes.
RANKS = {1: ("#999999", 6, ""), 2: ("#0b4f9e", 2.4, ""), 3: ("#d55e00", 1.4, "4 4")}
PANEL, HIGH, GAP, LEFT, TOP, COLUMNS = 230, 140, 56, 60, 84, 3
INK, FAINT = "#222", "#dddddd"


def losses(program, ranks, steps):
    """Of one run, as the program writes them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [os.path.join(BIN, program), "--json", "figures.json", "--steps", str(steps)]
        if program == "fine_tune":
            command += ["--checkpoint", "body.safetensors"]
        launcher = [LOCKSTEP, "run", "-n", str(ranks), "--run-dir", os.path.join(folder, "run"), "--"]
        subprocess.run(launcher + command, check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(os.path.join(folder, "figures.json"), encoding="utf-8") as file:
            return json.load(file)["losses"]


def curves(program, ranks, tiny):
    """A list of points for each name of the program's curves."""
    lengths = (8, 16) if tiny else PROGRAMS[program][1]
    runs = [losses(program, ranks, steps) for steps in lengths]
    rows = runs if len(PROGRAMS[program][1]) > 1 else [row if isinstance(row, list) else [row] for row in runs[-1]]
    return [[row[i] for row in rows] for i in CURVES_OF.get(program, range(len(rows[0])))]


def text(x, y, content, size=12, anchor="middle", more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{INK}" {more}>{escape(content)}</text>'


def panel(x, y, title, runs):
    """`runs`: number of ranks -> points."""
    points = [value for run in runs.values() for value in run]
    low, high = min(points), max(points)
    room = (high - low or 1) * 0.05
    low, high = max(low - room, 0), high + room
    parts = [text(x, y - 8, title, 12, "start")]
    for share in (0, 0.5, 1):
        at = y + HIGH * (1 - share)
        parts += [f'<line x1="{x}" y1="{at:.1f}" x2="{x + PANEL}" y2="{at:.1f}" stroke="{FAINT}"/>',
                  text(x - 6, at + 4, f"{low + share * (high - low):.3g}", 10, "end")]
    for ranks, (color, width, dashes) in RANKS.items():
        run = runs[ranks]
        line = " ".join(f"{x + i / max(len(run) - 1, 1) * PANEL:.1f},{y + HIGH * (high - value) / (high - low):.1f}" for i, value in enumerate(run))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="{width}" stroke-dasharray="{dashes}"/>')
    return parts


def draw(panels):
    rows = -(-len(panels) // COLUMNS)
    width, height = LEFT + COLUMNS * (PANEL + GAP), TOP + rows * (HIGH + GAP)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
             'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">', f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
             text(LEFT, 26, "Losses in fp32 from the first step to the last: the same program on one, two and three ranks", 16, "start", 'font-weight="600"')]
    for i, (ranks, (color, stroke, dashes)) in enumerate(RANKS.items()):
        x = LEFT + 110 * i
        parts += [f'<line x1="{x}" y1="47" x2="{x + 26}" y2="47" stroke="{color}" stroke-width="{stroke}" stroke-dasharray="{dashes}"/>',
                  text(x + 32, 51, f"{ranks} rank{'s' if ranks > 1 else ''}", anchor="start")]
    for i, (title, runs) in enumerate(panels):
        parts += panel(LEFT + i % COLUMNS * (PANEL + GAP), TOP + i // COLUMNS * (HIGH + GAP), title, runs)
    return "\n".join([*parts, "</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="of: " + ", ".join(PROGRAMS))
    parser.add_argument("--svg", default=os.path.join(ROOT, "docs/ports.svg"), help="the picture (default: docs/ports.svg)")
    parser.add_argument("--tiny", action="store_true", help="a few steps: whether it works")
    options = parser.parse_args()
    unknown = set(options.programs) - set(PROGRAMS)
    if unknown:
        parser.error("no such program: " + ", ".join(sorted(unknown)))
    panels = []
    for program in options.programs or PROGRAMS:
        runs = {ranks: curves(program, ranks, options.tiny) for ranks in RANKS}
        for i, name in enumerate(PROGRAMS[program][0]):
            points = {ranks: run[i] for ranks, run in runs.items()}
            span = max(points[1]) - min(points[1]) or 1
            apart = {ranks: max(abs(a - b) for a, b in zip(points[ranks], points[1], strict=True)) / span for ranks in (2, 3)}
            print(f"{program:22} {name:20} {len(points[1]):3} points   two ranks {apart[2]:.1e}   three {apart[3]:.1e}", flush=True)
            panels.append((f"{program}: {name}", points))
    with open(options.svg, "w", encoding="utf-8") as file:
        file.write(draw(panels))


if __name__ == "__main__":
    sys.exit(main())
