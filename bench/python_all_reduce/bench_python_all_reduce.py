#!/usr/bin/env python3
"""torch.distributed.all_reduce from Python: the "lockstep" backend against Gloo, in the same processes.

    bench_python_all_reduce.py [--ranks 2] [--rounds 12] [--layers] [--json FILE] [--tiny]

fp32 sums in place. Rounds alternate between the systems; the figures are medians over all calls of all rounds, each
call timed on rank 0 after a barrier that all ranks passed. Every result is checked before anything is timed. Private
tensors are torch's own, resident ones come from the backend (as DistributedDataParallel's buckets do). With --layers
instead: what 4 bytes cost in each layer, from torch.distributed's functions to the engine (layers.py).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE), os.path.join(os.path.dirname(os.path.dirname(HERE)), "tests", "python")]

import layers  # noqa: E402

SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20]
SYSTEMS = ("lockstep private", "lockstep resident", "gloo private")


def all_reduce_rank(rank, options, path):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=options.ranks)
    if options.layers:
        rows = layers.measure(dist, torch, rank, options.ranks, options.tiny)
        return finish(dist, rank, path, rows)
    groups = {"gloo": dist.group.WORLD, "lockstep": dist.new_group(backend="lockstep")}
    rows = []
    for size in options.sizes:
        tensors = {}
        for system in SYSTEMS:
            backend, placement = system.split()
            if placement == "resident":
                memory = groups[backend]._get_backend(torch.device("cpu"))
                tensors[system] = memory.allocate_tensor(size // 4, dtype=torch.float32, device=torch.device("cpu"))
            else:
                tensors[system] = torch.empty(size // 4)
            verify(dist, torch, tensors[system], groups[backend], rank, options.ranks)
        calls = 3 if options.tiny else max(5, min(2000, (64 << 20) // size))
        times = {system: [] for system in SYSTEMS}
        for _ in range(options.rounds):
            for system in SYSTEMS:
                group = groups[system.split()[0]]
                # A twentieth of the calls for the slow one, else large part of the run is waiting for it.
                for _ in range(calls if system != "gloo private" else max(3, calls // 20)):
                    dist.barrier(groups["lockstep"])
                    started = time.perf_counter()
                    dist.all_reduce(tensors[system], group=group)
                    times[system].append(time.perf_counter() - started)
        rows += [{"bytes": size, "ranks": options.ranks, "system": system.split()[0], "placement": system.split()[1],
                  "median_us": statistics.median(times[system]) * 1e6, "min_us": min(times[system]) * 1e6}
                 for system in SYSTEMS]
    finish(dist, rank, path, rows)


def finish(dist, rank, path, rows):
    if rank == 0:
        with open(path + ".rows", "w") as file:
            json.dump(rows, file)
    dist.barrier()
    dist.destroy_process_group()


def verify(dist, torch, tensor, group, rank, ranks):
    values = torch.arange(tensor.numel()) % 1000
    tensor.copy_(values + rank)
    dist.all_reduce(tensor, group=group)
    if not torch.equal(tensor, (values * ranks + ranks * (ranks - 1) // 2).float()):
        raise SystemExit(f"a wrong result of {tensor.nbytes} bytes")
    tensor.zero_()  # whose sum stays as it is


def measure(options):
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "meet")
        mp.spawn(all_reduce_rank, (options, path), nprocs=options.ranks)
        with open(path + ".rows") as file:
            return json.load(file)


def report(rows, ranks):
    print(f"{'bytes':>10} {'private':>11} {'resident':>11} {'Gloo':>11}   Gloo / private, resident   private moves")
    for size in sorted({row["bytes"] for row in rows}):
        private, resident, gloo = (next(row["median_us"] for row in rows if row["bytes"] == size
                                        and f"{row['system']} {row['placement']}" == system) for system in SYSTEMS)
        moved = 2 * (ranks - 1) / ranks * size / private / 1e3  # what NCCL's tests call bus bandwidth
        print(f"{size:>10} {private:>8.1f} us {resident:>8.1f} us {gloo:>8.1f} us {gloo / private:>11.1f}x "
              f"{gloo / resident:>8.1f}x {moved:>14.2f} GB/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", action="store_true", help="the cost of each layer of a call of 4 bytes")
    parser.add_argument("--json")
    parser.add_argument("--tiny", action="store_true", help="only show that it works")
    options = parser.parse_args()
    options.sizes = [4, 64 << 10] if options.tiny else SIZES
    options.rounds = 2 if options.tiny else options.rounds
    if os.environ.get("LOCKSTEP_BENCH_PYTHON") != "1":
        return in_python_with_torch()
    import support

    rows = measure(options)
    layers.report(rows) if options.layers else report(rows, options.ranks)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"host": support.host_facts(), "rows": rows}, file, indent=1)
    return 0


def in_python_with_torch():
    """Runs this file in the Python of the build's torch, with the package, built from this tree, on its path."""
    import package
    import support

    python = support.python_with_torch()
    if python is None:
        print("no Python with torch was found; scripts/setup installs one", file=sys.stderr)
        return 77
    environment = support.clean_environment(PYTHONPATH=package.build(python), LOCKSTEP_BENCH_PYTHON="1")
    return subprocess.run([python, os.path.abspath(__file__), *sys.argv[1:]], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
