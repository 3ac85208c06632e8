"""All-reduces between ranks on several machines: the hierarchical engine against Gloo alone, c10d's and Lockstep's, and
against the MPIs that are installed (Debian's openmpi-bin libopenmpi-dev and mpich libmpich-dev).

The machines are network namespaces that a bridge joins, which only root can make; with --rate, tbf shapes every
machine's link. Each system is measured in turn, several times; ratios are the first system's over the others', of medians of
the same run. hierarchical_always is the hierarchical engine also where each machine has one rank, which it leaves to Gloo's.

    python3 bench/hosts/bench_hosts.py --rate 1gbit --sizes 4194304 16777216 67108864
"""

import argparse
import json
import os
import statistics
import shutil
import signal
import subprocess
import sys
import tempfile

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SYSTEMS = ("hierarchical", "gloo", "c10d", "hierarchical_always")
MPIS = ("openmpi", "mpich")
ATTEMPTS = 3  # of an MPI that stands still


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


class Machines:
    """Network namespaces that reach each other, and nothing else, over a bridge in a namespace of its own."""

    def __init__(self, count, rate):
        self.names = [f"lockstep-bench-{os.getpid()}-{i}" for i in range(count)]
        self.switch = f"lockstep-bench-{os.getpid()}-switch"
        self.rate = rate

    def address(self, machine):
        return f"10.213.9.{machine + 1}"

    def __enter__(self):
        try:
            run("ip", "netns", "add", self.switch)
            run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", self.switch, "link", "set", "br0", "up")
            for i, name in enumerate(self.names):
                run("ip", "netns", "add", name)
                run("ip", "link", "add", f"p{i}", "netns", self.switch, "type", "veth", "peer", "name", "net0", "netns", name)
                run("ip", "-n", self.switch, "link", "set", f"p{i}", "master", "br0", "up")
                run("ip", "-n", name, "address", "add", self.address(i) + "/24", "dev", "net0")
                run("ip", "-n", name, "link", "set", "net0", "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
                if self.rate:
                    # Both directions of the link: what the machine sends, and what the switch sends to it.
                    for space, device in ((name, "net0"), (self.switch, f"p{i}")):
                        run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", self.rate,
                            "burst", "256kb", "latency", "50ms")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def measure(machines, placement, worker, system, seconds, sizes, port):
    """One run of all ranks; microseconds for each size."""
    ranks = []
    for rank, machine in enumerate(placement):
        here = [r for r, m in enumerate(placement) if m == machine]
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(len(placement)), LOCAL_RANK=str(here.index(rank)),
                   LOCAL_WORLD_SIZE=str(len(here)), MASTER_ADDR=machines.address(0), MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        command = ["ip", "netns", "exec", machines.names[machine], worker, system, str(seconds), *map(str, sizes)]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=600) for rank in ranks]
    for rank, output in zip(ranks, outputs):
        if rank.returncode != 0:
            sys.exit(f"{system}: {output[1]}")
    return {int(line.split()[0]): float(line.split()[1]) for line in outputs[0][0].splitlines()}


def build_mpi_worker(mpi, build):
    """The worker of an MPI; None, with the reason, if it cannot be had."""
    compiler = shutil.which("mpicxx." + mpi)
    if not compiler or not shutil.which("mpirun." + mpi):
        print(f"{mpi} is not measured: no mpicxx.{mpi} or mpirun.{mpi}", file=sys.stderr)
        return None
    folder = os.path.join(build, "peers", "hosts-" + mpi)
    os.makedirs(folder, exist_ok=True)
    worker = os.path.join(folder, "hosts_mpi_worker")
    source = os.path.join(SOURCE, "bench/hosts/hosts_mpi_worker.cpp")
    if not os.path.exists(worker) or os.path.getmtime(worker) < os.path.getmtime(source):
        run(compiler, "-std=c++20", "-O3", "-o", worker, source)
    return worker


def measure_mpi(machines, placement, worker, mpi, seconds, sizes, limit):
    """The same of an MPI, whose launcher enters the namespaces as it would by ssh. There each machine has its own name
    and its own /dev/shm, or MPI would take ranks of different machines for neighbours."""
    counts = [placement.count(machine) for machine in range(len(machines.names))]
    with tempfile.TemporaryDirectory() as folder:
        enter = os.path.join(folder, "enter")
        with open(enter, "w") as file:
            file.write("#!/bin/sh\n"
                       "# HOST COMMAND...\n"
                       "while [ \"${1#-}\" != \"$1\" ]; do shift; done\n"
                       "host=$1; shift\n"
                       "exec ip netns exec \"$host\" unshare --uts --mount sh -c "
                       "'hostname \"$0\"; mount -t tmpfs none /dev/shm; eval \"$*\"' \"$host\" \"$@\"\n")
        os.chmod(enter, 0o755)
        # An address for each machine's name, which both MPIs look up.
        names = os.path.join(folder, "hosts")
        with open(names, "w") as file:
            file.write("127.0.0.1 localhost\n" + "".join(f"{machines.address(i)} {name}\n" for i, name in enumerate(machines.names)))
        network = machines.address(0).rsplit(".", 1)[0] + ".0/24"
        if mpi == "openmpi":
            launch = ["mpirun.openmpi", "--allow-run-as-root", "--mca", "plm_rsh_agent", enter, "--mca", "oob_tcp_if_include", network,
                      "--mca", "btl_tcp_if_include", network, "--mca", "btl", "self,vader,tcp", "--mca", "pml", "ob1", "--mca",
                      "mpi_yield_when_idle", "1", "--oversubscribe", "--bind-to", "none", "-H",
                      ",".join(f"{name}:{count}" for name, count in zip(machines.names, counts))]
            launch += ["--mca", "coll_han_priority", "100"]  # hierarchical: off by default
        else:
            launch = ["mpirun.mpich", "-launcher", "ssh", "-launcher-exec", enter, "-iface", "net0", "-hosts",
                      ",".join(f"{name}:{count}" for name, count in zip(machines.names, counts)), "-n", str(len(placement)),
                      # Between machines TCP alone: UCX would see that the kernel is the same one, and copy past the link.
                      "-genv", "UCX_TLS", "tcp,self", "-genv", "FI_PROVIDER", "tcp", "-genv", "FI_TCP_IFACE", "net0", "-genv", "UCX_NET_DEVICES", "net0"]
        inside = ["sh", "-c", 'hostname "$0"; mount --bind "$1" /etc/hosts; mount -t tmpfs none /dev/shm; shift; exec "$@"',
                  machines.names[0], names, *launch, worker, str(seconds), *map(str, sizes)]
        # In a space of process ids of its own, so that nothing outlives it.
        command = ["ip", "netns", "exec", machines.names[0], "unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", *inside]
        for left in range(ATTEMPTS - 1, -1, -1):
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=limit)
                break
            except subprocess.TimeoutExpired:
                # MPICH 4.0 over TCP stands still now and then, one rank spinning and the others reading their sockets.
                print(f"{mpi} was not done after {limit:.0f} s; {left} attempts are left", file=sys.stderr)
        else:
            return {}
    if done.returncode != 0:
        sys.exit(f"{mpi}: {done.stdout}{done.stderr}")
    return {int(line.split()[0]): float(line.split()[1]) for line in done.stdout.splitlines()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(SOURCE, "build"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 2], help="of each machine")
    parser.add_argument("--rate", help="of a machine's link, as tc writes it: 1gbit")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4 << 2 * i for i in range(13)], help="bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1, help="for each size, system and round")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS[:3], choices=SYSTEMS + MPIS)
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    placement = [machine for machine, count in enumerate(options.ranks) for _ in range(count)]
    worker = os.path.join(options.build, "bin", "hosts_worker")
    mpis = {mpi: build_mpi_worker(mpi, options.build) for mpi in MPIS if mpi in options.systems}
    options.systems = [system for system in options.systems if mpis.get(system, worker)]
    times = {system: {size: [] for size in options.sizes} for system in options.systems}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the machines go with it
    with Machines(len(options.ranks), options.rate) as machines:
        for turn in range(options.rounds):
            for i, system in enumerate(options.systems):
                port = 29500 + turn * len(options.systems) + i  # of a machine that exists for this run only
                if system in mpis:
                    found = measure_mpi(machines, placement, mpis[system], system, options.seconds, options.sizes,
                                        limit=20 + 5 * options.seconds * len(options.sizes))
                else:
                    found = measure(machines, placement, worker, system, options.seconds, options.sizes, port)
                for size, micros in found.items():
                    times[system][size].append(micros)
    for system in [system for system in options.systems if not all(times[system].values())]:
        print(f"{system} is left out: no attempt came to its end", file=sys.stderr)
        options.systems.remove(system)
        del times[system]
    medians = {system: {size: statistics.median(all_) for size, all_ in of.items()} for system, of in times.items()}
    first = options.systems[0]
    others = options.systems[1:]
    print(f"all_reduce, {' + '.join(map(str, options.ranks))} ranks, {options.rate or 'unshaped'}; us")
    print("bytes".rjust(10), *(system.rjust(14) for system in options.systems), *(f"/ {system}".rjust(8) for system in others))
    for size in options.sizes:
        row = [f"{medians[system][size]:14.0f}" for system in options.systems]
        ratios = [f"{medians[first][size] / medians[system][size]:8.2f}" for system in others]
        print(f"{size:10}", *row, *ratios)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"ranks": options.ranks, "rate": options.rate, "microseconds": times}, file)


if __name__ == "__main__":
    main()
