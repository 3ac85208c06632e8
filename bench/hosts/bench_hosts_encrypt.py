"""All-reduces of `lockstep run --hosts --encrypt` over those without --encrypt, between machines that are network
namespaces, which only root can make; with --rate, tbf shapes every machine's link. Runs of both kinds alternate.

    python3 bench/hosts/bench_hosts_encrypt.py --ranks 2 2
    python3 bench/hosts/bench_hosts_encrypt.py --ranks 2 2 --rate 1gbit --sizes 67108864
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import bench_hosts  # noqa: E402
from support import BIN, LOCKSTEP  # noqa: E402


def measure(machines, ranks, seconds, sizes, encrypt):
    """One run of all ranks; microseconds for each size."""
    hosts = ",".join(f"{name}:{count}" for name, count in zip(machines.names, ranks))
    command = ["ip", "netns", "exec", machines.names[0], LOCKSTEP, "run", "--hosts", hosts, "--launch-command", "ip netns exec {host}",
               *(["--encrypt"] if encrypt else []), "--", os.path.join(BIN, "hosts_worker"), "hierarchical", str(seconds), *map(str, sizes)]
    done = subprocess.run(command, env=dict(os.environ, OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return {int(line.split()[0]): float(line.split()[1]) for line in done.stdout.splitlines() if line[:1].isdigit()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 2], help="of each machine")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 1 << 20, 64 << 20], help="bytes of an all-reduce")
    parser.add_argument("--rate", help="of each machine's link, such as 1gbit (default: no limit)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size and round")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--tiny", action="store_true", help="to see that it works")
    options = parser.parse_args()
    if options.tiny:
        options.sizes, options.rounds, options.seconds = [4096], 1, 0.05
    found = {False: [], True: []}
    with bench_hosts.Machines(len(options.ranks), options.rate) as machines:
        for _ in range(options.rounds):
            for encrypt in found:
                found[encrypt].append(measure(machines, options.ranks, options.seconds, options.sizes, encrypt))
    figures = {}
    for size in options.sizes:
        plain, encrypted = (statistics.median(run[size] for run in found[encrypt]) for encrypt in (False, True))
        figures[size] = {"plain_us": plain, "encrypted_us": encrypted, "ratio": encrypted / plain}
        print(f"{size:>10} bytes   plain {plain:>10.0f} us   encrypted {encrypted:>10.0f} us   ratio {encrypted / plain:.2f}   "
              f"{8e-3 * size / encrypted:.2f} Gbit/s", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
