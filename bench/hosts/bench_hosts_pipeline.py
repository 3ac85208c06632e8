"""A pipeline whose stages are on several machines, those of bench_hosts.py: bench_pipeline, and the same by PyTorch.

    python3 bench/hosts/bench_hosts_pipeline.py --rate 1gbit
"""

import argparse
import os
import subprocess
import sys

from bench_hosts import SOURCE, Machines

sys.path.insert(0, os.path.join(SOURCE, "scripts"))
from python_with_torch import python_with_torch  # noqa: E402


def measure(machines, placement, command, port):
    """What rank 0 writes."""
    ranks = []
    for rank, machine in enumerate(placement):
        here = [r for r, m in enumerate(placement) if m == machine]
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(len(placement)), LOCAL_RANK=str(here.index(rank)),
                   LOCAL_WORLD_SIZE=str(len(here)), MASTER_ADDR=machines.address(0), MASTER_PORT=str(port), OMP_NUM_THREADS="1",
                   MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="net0")
        ranks.append(subprocess.Popen(["ip", "netns", "exec", machines.names[machine], *command], env=env, stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=600) for rank in ranks]
    for rank, output in zip(ranks, outputs):
        if rank.returncode != 0:
            sys.exit(f"{command[0]}: {output[1]}")
    return outputs[0][0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(SOURCE, "build"))
    parser.add_argument("--python", default=python_with_torch(), help="with torch")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 1, 1, 1], help="of each machine")
    parser.add_argument("--rate", help="of a machine's link, as tc writes it: 1gbit")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--wait", default="10")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    placement = [machine for machine, count in enumerate(options.ranks) for _ in range(count)]
    given = ["--wait", options.wait] + (["--tiny"] if options.tiny else [])
    commands = [[os.path.join(options.build, "bin/bench_pipeline"), *given]]
    if options.python:
        commands.append([options.python, os.path.join(SOURCE, "bench/pipeline/pytorch_pipeline.py"), *given])
    else:
        print("PyTorch is not measured: no Python with torch was found", file=sys.stderr)
    with Machines(len(options.ranks), options.rate) as machines:
        for turn in range(options.rounds):
            for i, command in enumerate(commands):
                print(measure(machines, placement, command, 29700 + turn * len(commands) + i), end="", flush=True)


if __name__ == "__main__":
    main()
