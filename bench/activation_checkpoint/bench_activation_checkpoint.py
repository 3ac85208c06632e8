"""Time and memory of a step whose activations backward computes again, over a plain one's, here and in PyTorch, whose
workers take turns; one thread.

    python3 bench/activation_checkpoint/bench_activation_checkpoint.py
"""

import argparse
import json
import os
import statistics
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from support import BIN, python_with_torch, run  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="whether it runs at all")
    parser.add_argument("--python", default=python_with_torch(), help="with torch; without one Lockstep is measured alone")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    size = ["--layers", "2", "--width", "32", "--length", "16", "--batch", "2", "--steps", "2"] if options.tiny else []
    workers = {"Lockstep": [os.path.join(BIN, "activation_worker"), *size]}
    if options.python:
        workers["PyTorch"] = [options.python, os.path.join(HERE, "activation_worker.py"), *size]
    found = {name: [] for name in workers}
    for _ in range(1 if options.tiny else options.rounds):
        for name, command in workers.items():
            found[name].append(json.loads(run(command, 300).splitlines()[-1]))
            if found[name][-1]["plain"]["losses"] != found[name][-1]["checkpointed"]["losses"]:
                sys.exit(f"{name}: checkpointed steps have other losses than plain ones")
    print("".ljust(12), "plain ms", " again", "ratio", "  plain MiB", " again", "ratio")
    figures = {}
    for name, rounds in found.items():
        one = {kind + " " + what: statistics.median(each[kind][what] for each in rounds) for kind in ("plain", "checkpointed") for what in ("ms", "mib")}
        one["time"], one["memory"] = (statistics.median(each["checkpointed"][what] / max(each["plain"][what], 1e-9) for each in rounds) for what in ("ms", "mib"))
        figures[name] = one
        print(f"{name:12} {one['plain ms']:8.1f} {one['checkpointed ms']:6.1f} {one['time']:5.2f} {one['plain mib']:11.1f} {one['checkpointed mib']:6.1f} {one['memory']:5.2f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
