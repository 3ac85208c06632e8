"""How long `lockstep run --hosts` takes from its start to its end: with 2 x 2 ranks that add up one number, beside
torchrun on two nodes, and with many agents whose ranks do nothing.

    python3 bench/hosts/bench_start.py [--rounds 5] [--agents 16 64 250 1000] [--json FILE]

The two machines are network namespaces, which only root can make; the many agents are all on this machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from bench_hosts import Machines  # noqa: E402
from support import BIN, LOCKSTEP, clean_environment, host_facts, python_with_torch, run  # noqa: E402

ONE_ALL_REDUCE = os.path.join(BIN, "one_all_reduce")
TIMEOUT_S = 120


def seconds(start):
    began = time.monotonic()
    start()
    return time.monotonic() - began


def two_machines(machines, folder):
    """The two systems, by name."""
    names = machines.names

    def by_lockstep():
        run(["ip", "netns", "exec", names[0], LOCKSTEP, "run", "--hosts", f"{names[0]}:2,{names[1]}:2", "--launch-command",
             "ip netns exec {host}", "--", ONE_ALL_REDUCE], timeout=TIMEOUT_S, cwd=folder)

    def by_torchrun():
        nodes = [subprocess.Popen(["ip", "netns", "exec", names[node], python_with_torch(), "-m", "torch.distributed.run", "--no-python",
                                   "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2", "--master-addr", machines.address(0),
                                   "--master-port", "29500", ONE_ALL_REDUCE], env=clean_environment(), cwd=folder,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for node in (0, 1)]
        for node in nodes:
            output = node.communicate(timeout=TIMEOUT_S)[0]
            if node.returncode != 0:
                raise RuntimeError(output)
    found = {"lockstep run --hosts, 2 x 2, one_all_reduce": by_lockstep}
    if python_with_torch():
        found["torchrun, two nodes, 2 x 2, one_all_reduce"] = by_torchrun
    return found


def many_agents(count, folder):
    hosts = ",".join(f"127.0.{i // 250}.{i % 250 + 1}:1" for i in range(count))

    def start():
        run([LOCKSTEP, "run", "--hosts", hosts, "--launch-command", "env LOCKSTEP_MACHINE={host}", "--", "true"], timeout=TIMEOUT_S, cwd=folder)
    return start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agents", type=int, nargs="*", default=[16, 64, 250, 1000])
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    times = {}
    with tempfile.TemporaryDirectory(prefix="lockstep_bench_") as folder, Machines(2, None) as machines:
        cases = two_machines(machines, folder)
        cases |= {f"lockstep run --hosts, {count} agents, true": many_agents(count, folder) for count in options.agents}
        for number in range(options.rounds + 1):
            for name, start in cases.items():
                took = seconds(start)
                if number > 0:  # the first round fills the page cache
                    times.setdefault(name, []).append(took)
    print(f"{'starting and ending, s':<50}{'median':>9}{'min':>9}{'max':>9}")
    for name, all_ in times.items():
        print(f"{name:<50}{statistics.median(all_):>9.2f}{min(all_):>9.2f}{max(all_):>9.2f}")
    medians = [statistics.median(all_) for all_ in times.values()]
    if python_with_torch():
        print(f"2 x 2: lockstep / torchrun {medians[0] / medians[1]:.2f}")
    else:
        print("torchrun: not measured: LibTorch here is no part of a Python")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"host": host_facts(), "seconds": times}, file, indent=2)


if __name__ == "__main__":
    main()
