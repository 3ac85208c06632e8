#!/usr/bin/env python3
"""The memory that all ranks of a training by AdamW hold together: each with a copy, sharing out the steps, and with
parameters that lie once in shared memory.

    bench_memory.py [--ranks 2] [--layers 24] [--width 2048] [--json FILE] [--tiny]

24 layers of 2048 x 2048 are 100 million parameters. bench_memory.cpp says what is measured.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import support  # noqa: E402

SYSTEMS = ("libtorch", "sharded", "shared")


def measure(system, options):
    folder = tempfile.mkdtemp(prefix="lockstep_bench_")
    try:
        path = os.path.join(folder, "figures.json")
        support.run([support.LOCKSTEP, "run", "-n", str(options.ranks), "--run-dir", os.path.join(folder, "run"), "--",
                     os.path.join(support.BIN, "bench_memory"), "--system", system, "--folder", os.path.join(folder, "checkpoints"),
                     "--layers", str(options.layers), "--width", str(options.width), "--json", path], timeout=1800, cwd=folder)
        with open(path) as file:
            return json.load(file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--tiny", action="store_true", help="to see that it works")
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.width = 4, 1024
    rows = [measure(system, options) for system in SYSTEMS]
    if rows[1]["state_hash"] != rows[2]["state_hash"]:
        raise RuntimeError("shared parameters have come to another state than copies")
    print(f"{options.ranks} ranks, {rows[0]['parameters_mib']:.0f} MiB of parameters, {rows[0]['state_mib']:.0f} MiB of state")
    print(f"{'system':10} {'all ranks hold':>15} {'over what they need':>20} {'to save, a rank':>16} {'to load, a rank':>16}")
    for row in rows:
        print(f"{row['system']:10} {row['held_mib']:11.0f} MiB {row['held_over_needed']:20.3f} "
              f"{row['private_to_save_mib']:12.0f} MiB {row['private_to_load_mib']:12.0f} MiB")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"host": support.host_facts(), "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
