"""Draws what scale.py simulated as an SVG: a panel for each network and work, efficiency over machines."""

import math
from html import escape

# Colours that stay apart for colour-blind readers.
COLORS = {"lockstep": "#0b4f9e", "direct": "#cc79a7", "ring": "#d55e00", "halving_doubling": "#009e73", "tree": "#999999"}
LABELS = {"lockstep": "Lockstep", "direct": "direct", "ring": "ring", "halving_doubling": "halving and doubling", "tree": "tree"}
PANEL, HIGH, GAP, LEFT, TOP, BOTTOM = 300, 190, 46, 60, 96, 60
INK, FAINT = "#222", "#dddddd"


def text(x, y, content, size=12, anchor="middle", more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{INK}" {more}>{escape(content)}</text>'


def panel(x, y, title, rows, machines):
    first, last = math.log2(machines[0]), math.log2(machines[-1])
    across = lambda count: x + (math.log2(count) - first) / (last - first) * PANEL  # noqa: E731
    up = lambda share: y + HIGH * (1 - share)  # noqa: E731
    parts = [text(x, y - 8, title, 12, "start")]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts += [f'<line x1="{x}" y1="{up(share):.1f}" x2="{x + PANEL}" y2="{up(share):.1f}" stroke="{FAINT}"/>',
                  text(x - 6, up(share) + 4, f"{share:g}", 11, "end")]
    parts += [text(across(count), y + HIGH + 15, str(count), 10) for count in machines]
    for algorithm, color in reversed(COLORS.items()):  # Lockstep's last: it lies over the algorithm that it chose
        points = sorted((row["machines"], row["efficiency"]) for row in rows if row["algorithm"] == algorithm)
        line = " ".join(f"{across(count):.1f},{up(share):.1f}" for count, share in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(count):.1f}" cy="{up(share):.1f}" r="2.5" fill="{color}"/>' for count, share in points]
    return parts


def draw(rows, machines, works, networks):
    width = LEFT + len(works) * (PANEL + GAP)
    height = TOP + len(networks) * (HIGH + GAP) + BOTTOM - GAP
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
             'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">', f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
             text(LEFT, 26, "Efficiency: a step on one machine over a step on many, simulated (8 ranks a machine)", 17, "start", 'font-weight="600"')]
    x = LEFT
    for algorithm, color in COLORS.items():
        parts += [f'<rect x="{x}" y="42" width="14" height="12" fill="{color}"/>', text(x + 20, 52, LABELS[algorithm], anchor="start")]
        x += 50 + 6.6 * len(LABELS[algorithm])
    for i, network in enumerate(networks):
        for j, work in enumerate(works):
            mine = [row for row in rows if (row["network"], row["work"]) == (network, work)]
            parts += panel(LEFT + j * (PANEL + GAP), TOP + i * (HIGH + GAP), f"{network}: {work}", mine, machines)
    parts.append(text(width / 2, height - 14, "machines"))
    return "\n".join([*parts, "</svg>"]) + "\n"
