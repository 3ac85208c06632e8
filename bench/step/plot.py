"""Draws what bench_step measured as an SVG: each model's step, as a multiple of the same programs side by side.

    python3 bench/step/plot.py FILE OUT.svg

Nothing but the standard library.
"""

import json
import math
import sys
from html import escape

# Colours that stay apart for colour-blind readers.
SYSTEMS = {
    "side_by_side_kept": ("side by side, no communication", "#999999"),
    "side_by_side": ("side by side, memory not kept", "#bbbbbb"),
    "side_by_side_fused": ("side by side, fused optimizer", "#777777"),
    "side_by_side_python": ("side by side, in Python", "#9a9a80"),
    "one_process": ("one process, all cores", "#c0a060"),
    "lockstep": ("Lockstep", "#0b4f9e"),
    "lockstep_sharded": ("Lockstep, sharded step", "#117a8b"),
    "lockstep_shared": ("Lockstep, shared parameters", "#66b2b2"),
    "python_attach": ("lockstep.attach() in Python", "#8a6fd1"),
    "python_attach_zero": ("lockstep.attach(), sharded step, in Python", "#c7a8ef"),
    "pytorch_ddp_lockstep": ("PyTorch DDP on Lockstep's backend", "#4a9be8"),
    "c10d_reducer_gloo": ("c10d::Reducer on Gloo, C++", "#009e73"),
    "pytorch_ddp_gloo": ("PyTorch DDP on Gloo", "#d55e00"),
    "pytorch_zero_gloo": ("PyTorch ZeroRedundancyOptimizer on Gloo", "#e69f00"),
}
MODELS = {"mlp": "MLP 784-2048-2048-10", "resnet": "small ResNet, 28x28", "transformer": "transformer, 6 x 256",
          "small_1000": "1000 parameters of 64", "small_10000": "10000 parameters of 64"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1080, 430, 64, 20, 104, 56
INK, FAINT = "#222", "#dddddd"


def text(x, y, content, size=12, anchor="middle", more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{INK}" {more}>{escape(content)}</text>'


def legend(systems):
    parts, x, y = [], LEFT, 58
    for system in systems:
        label, color = SYSTEMS[system]
        length = 40 + 6.6 * len(label)
        if x + length > WIDTH - RIGHT:
            x, y = LEFT, y + 20
        parts += [f'<rect x="{x}" y="{y - 10}" width="14" height="12" fill="{color}"/>', text(x + 20, y, label, anchor="start")]
        x += length
    return parts


def draw(figures):
    rows = {((row["model"], row["optimizer"]), row["system"]): row for row in figures["rows"] if "ratio" in row}
    optimizers = sorted({row["optimizer"] for row in figures["rows"]}, reverse=True)
    works = [(model, optimizer) for model in MODELS for optimizer in optimizers
             if any(key[0] == (model, optimizer) for key in rows)]
    systems = [system for system in SYSTEMS if any(key[1] == system for key in rows)]
    if not rows:
        raise SystemExit("the file holds no timed step")
    top = math.ceil(max(row["ratio"] for row in rows.values()) * 1.1 * 2) / 2
    scale = (HEIGHT - TOP - BOTTOM) / top
    host = figures["host"]
    title = f"A step of {figures['ranks']} ranks over the same programs side by side, {host['cores']} cores ({host['cpu']})"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
             'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
             text(LEFT, 30, title, 17, "start", 'font-weight="600"'), *legend(systems)]
    for i in range(round(top * 2) + 1):
        y = HEIGHT - BOTTOM - i / 2 * scale
        color = INK if i == 2 else FAINT
        parts += [f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{color}"/>',
                  text(LEFT - 8, y + 4, f"{i / 2:g}", anchor="end")]
    group = (WIDTH - LEFT - RIGHT) / len(works)
    bar = min(44, group * 0.86 / len(systems))
    for w, work in enumerate(works):
        middle = LEFT + (w + 0.5) * group
        parts.append(text(middle, HEIGHT - 26, MODELS[work[0]] + (f", {work[1]}" if len(optimizers) > 1 else ""), 13))
        for s, system in enumerate(systems):
            row = rows.get((work, system))
            if not row:
                continue
            x, height = middle + (s - len(systems) / 2) * bar, row["ratio"] * scale
            parts += [f'<rect x="{x + 1:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" width="{bar - 2:.1f}" height="{height:.1f}" '
                      f'fill="{SYSTEMS[system][1]}"/>',
                      text(x + bar / 2, HEIGHT - BOTTOM - height - 5, f"{row['ratio']:.2f}", 11)]
        alone = rows.get((work, "side_by_side_kept")) or rows.get((work, "side_by_side"))
        if alone:
            parts.append(text(middle, HEIGHT - 8, f"side by side {alone['median_ms']:.1f} ms", 11))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main():
    with open(sys.argv[1]) as file:
        figures = json.load(file)
    with open(sys.argv[2], "w") as file:
        file.write(draw(figures))


if __name__ == "__main__":
    main()
