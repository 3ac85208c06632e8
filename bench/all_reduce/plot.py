"""Draws what bench_all_reduce measured as an SVG: time over size, and bandwidth over size with the memory bound.

    python3 bench/all_reduce/plot.py FILE OUT.svg [--operation all_reduce] [--dtype fp32]

Nothing but the standard library.
"""

import argparse
import math
from html import escape

from figures import LABELS, OPERATIONS, Figures, size_text

# Colours that stay apart for colour-blind readers; Lockstep thick, the others thin.
STYLES = {
    ("shm", "resident"): ("Lockstep shm, resident buffers", "#0b4f9e", 3.2, ""),
    ("shm", "private"): ("Lockstep shm, private buffers", "#4a9be8", 2.6, ""),
    ("mpich", "private"): (LABELS["mpich"], "#d55e00", 1.7, ""),
    ("openmpi", "private"): (LABELS["openmpi"], "#009e73", 1.7, ""),
    ("openmpi-debian", "private"): (LABELS["openmpi-debian"], "#009e73", 1.4, "5 3"),
    ("impi", "private"): (LABELS["impi"], "#8a3ea8", 1.7, ""),
    ("gloo", "private"): (LABELS["gloo"], "#6b6b6b", 1.7, ""),
}
BOUND_STYLE = ("#b00020", 1.6, "2 3")
WIDTH, HEIGHT = 1080, 520
TOP, BOTTOM = 118, 64  # the legend stands above the panels
INK, FAINT = "#222", "#dddddd"
TIME_NAMES = {-2: "10 ns", -1: "100 ns", 0: "1 us", 1: "10 us", 2: "100 us", 3: "1 ms", 4: "10 ms", 5: "100 ms", 6: "1 s",
              7: "10 s", 8: "100 s"}


def text(x, y, content, size=12, anchor="middle", color=INK, more=""):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" {more}>'
            f"{escape(content)}</text>")


def line(x1, y1, x2, y2, color=FAINT, width=1.0, dash=""):
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"{dashes}/>'


class Panel:
    """Axes between `left` and `right`; x is log2 of the size, y whatever `place` makes of a value."""

    def __init__(self, left, right, sizes, low, high, logarithmic):
        self.left, self.right = left, right
        self.first, self.last = math.log2(sizes[0]), max(math.log2(sizes[-1]), math.log2(sizes[0]) + 1)
        self.logarithmic = logarithmic
        self.low, self.high = (math.log10(low), math.log10(high)) if logarithmic else (low, high)

    def x(self, size):
        return self.left + (math.log2(size) - self.first) / (self.last - self.first) * (self.right - self.left)

    def y(self, value):
        value = math.log10(value) if self.logarithmic else value
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - BOTTOM - TOP)

    def frame(self, title, sizes, ticks):
        """Grid, tick labels and titles; `ticks` are pairs of value and label."""
        parts = [text(self.left, TOP - 14, title, 14, "start", more='font-weight="600"')]
        for value, label in ticks:
            parts.append(line(self.left, self.y(value), self.right, self.y(value)))
            parts.append(text(self.left - 8, self.y(value) + 4, label, anchor="end"))
        for size in x_ticks(sizes):
            parts.append(line(self.x(size), HEIGHT - BOTTOM, self.x(size), HEIGHT - BOTTOM + 5, INK))
            parts.append(text(self.x(size), HEIGHT - BOTTOM + 20, size_text(size)))
        parts.append(line(self.left, HEIGHT - BOTTOM, self.right, HEIGHT - BOTTOM, INK))
        parts.append(text((self.left + self.right) / 2, HEIGHT - 18, "size of one rank's buffer"))
        return parts

    def curve(self, points, style):
        _, color, width, dash = style
        path = " ".join(f"{self.x(size):.1f},{self.y(value):.1f}" for size, value in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dashes} '
                 'stroke-linejoin="round"/>']
        parts += [f'<circle cx="{self.x(size):.1f}" cy="{self.y(value):.1f}" r="{width * 0.9 + 0.6:.1f}" fill="{color}"/>'
                  for size, value in points]
        return parts


def x_ticks(sizes):
    """The powers of two among the sizes, thinned until they can be read."""
    powers = [size for size in sizes if math.log2(size).is_integer()]
    step = max(1, math.ceil(len(powers) / 6))
    return powers[::step]


def collect(figures, operation, dtype):
    """Points (size, microseconds) of every curve that has any."""
    curves = {}
    for system, placement in STYLES:
        points = [(size, figures.median(operation, dtype, size, placement, system)) for size in figures.sizes(operation, dtype)]
        points = [(size, time) for size, time in points if time]
        if points:
            curves[system, placement] = points
    return curves


def legend(entries):
    """`entries` are label, colour, width and dashes."""
    parts, x, y = [], 70, 60
    for label, color, width, dash in entries:
        length = 52 + 6.4 * len(label)
        if x + length > WIDTH - 20:
            x, y = 70, y + 20
        parts += [line(x, y - 4, x + 26, y - 4, color, width, dash), text(x + 33, y, label, anchor="start")]
        x += length
    return parts


def time_panel(curves, sizes):
    times = [time for points in curves.values() for _, time in points]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    panel = Panel(70, WIDTH / 2 - 30, sizes, 10.0 ** low, 10.0 ** high, logarithmic=True)
    parts = panel.frame("Time of one operation (median)", sizes, [(10.0 ** e, TIME_NAMES[e]) for e in range(low, high + 1)])
    for key, points in reversed(curves.items()):
        parts += panel.curve(points, STYLES[key])
    return parts


def nice_step(high):
    return next(step * 10 ** e for e in range(-3, 6) for step in (1, 2, 5) if high / (step * 10.0 ** e) <= 6)


def bandwidth_panel(curves, sizes, bound, with_bound):
    sizes = [size for size in sizes if size >= 4096] or sizes
    rates = {key: [(size, size / time / 1e3) for size, time in points if size in sizes] for key, points in curves.items()}
    high = max([rate for points in rates.values() for _, rate in points] + ([bound] if with_bound else []))
    step = nice_step(high)
    top = step * math.ceil(high * 1.02 / step)
    panel = Panel(WIDTH / 2 + 60, WIDTH - 40, sizes, 0, top, logarithmic=False)
    ticks = [(i * step, f"{i * step:g}") for i in range(round(top / step) + 1)]
    parts = panel.frame("Buffer size over time, GB/s", sizes, ticks)
    if with_bound:
        parts.append(line(panel.left, panel.y(bound), panel.right, panel.y(bound), *BOUND_STYLE))
    for key, points in reversed(rates.items()):
        if points:
            parts += panel.curve(points, STYLES[key])
    return parts


def draw(figures, operation, dtype):
    curves = collect(figures, operation, dtype)
    if not curves:
        raise SystemExit(f"the file holds no {operation} of {dtype}")
    sizes = sorted({size for points in curves.values() for size, _ in points})
    with_bound = operation == "all_reduce"
    bound = figures.triad_gb_per_s / (2 * figures.ranks)
    entries = [STYLES[key] for key in curves]
    if with_bound:
        entries.append((f"memory bound: triad {figures.triad_gb_per_s:.0f} GB/s over 2N = {bound:.1f}", *BOUND_STYLE))
    host = figures.json["host"]
    title = f"{operation.replace('_', '-')}, {dtype}, {figures.ranks} ranks on {host['cores']} cores ({host['cpu']})"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
             'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
             text(70, 32, title, 17, "start", more='font-weight="600"'), *legend(entries), *time_panel(curves, sizes),
             *bandwidth_panel(curves, sizes, bound, with_bound), "</svg>"]
    return "\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("out")
    parser.add_argument("--operation", choices=OPERATIONS, default="all_reduce")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args()
    with open(options.out, "w") as file:
        file.write(draw(Figures(options.file), options.operation, options.dtype))


if __name__ == "__main__":
    main()
