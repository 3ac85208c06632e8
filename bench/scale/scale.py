"""How training would scale to many machines: a model fitted to all-reduces measured here, and a simulation with it.

    python3 bench/scale/scale.py measure measured.json     # as root: between network namespaces, 10 minutes
    python3 bench/scale/scale.py fit measured.json         # the model, and how far it is off where it was not fitted
    python3 bench/scale/scale.py simulate measured.json --svg docs/scale.svg --json scale.json

`measured.json` beside this file is what docs/scale.md shows.

The model of an all-reduce of S bytes between m machines with L ranks each, of which C cores serve all:

    seconds = meeting + message c n + link (bytes that leave a machine) + byte c S,    c = max(1, m L / C)

n are the messages that a rank sends: (m - 1) for each piece that travels as a whole, else 2 (m - 1) / m for each
(src/collectives/hierarchical/pieces.cpp says how a slice is cut). Machines that are namespaces of one host share its
cores, therefore c; on machines of their own it is 1. Of several rounds, each of which is a median of many all-reduces, the
fastest counts.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "hosts"))

import bench_hosts  # noqa: E402
import plot  # noqa: E402
import support  # noqa: E402

RATE = "1gbit"
# Of a link's bits, what is payload of TCP: headers take the rest of each 1514 bytes. The rate is shaped, so it is known; a fit
# cannot tell it from the cost of adding bytes.
LINK_S_PER_BYTE = 8 / (1e9 * 1448 / 1514)
FITTED = {"ranks": ([2, 2], [2, 2, 2]), "bytes": (4, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 16 << 20)}
LEFT_OUT = {"ranks": ([3, 3], [2, 2, 2, 2]), "bytes": (64, 4 << 10, 64 << 10, 1 << 20, 32 << 20)}
TERMS = ("meeting_s", "message_s", "link_s_per_byte", "byte_s")

# What is simulated. Steps and buckets of bench_step's models on one machine (docs/step.md): seconds of forward, seconds of
# backward, parameters. The last is not measured, but a model that is large for a machine without a GPU.
WORKS = {
    "MLP, 5.8 M parameters, 30 ms": (0.010, 0.020, 5.8e6),
    "transformer, 4.8 M parameters, 200 ms": (0.065, 0.135, 4.8e6),
    "100 M parameters, 1 s": (0.33, 0.67, 1e8),
}
NETWORKS = {"1 Gbit/s": (1e9 / 8, 50e-6), "10 Gbit/s": (10e9 / 8, 25e-6), "100 Gbit/s": (100e9 / 8, 10e-6)}
RANKS = 8
ALGORITHMS = ("lockstep", "direct", "ring", "halving_doubling", "tree")
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
JITTER = 0.02

# Machines that synchronise every SYNC_EVERY steps (docs/slow_networks.md), by kInt8: a number and its share of a block's scale.
SITES = {"100 Mbit/s, 20 ms": (1e8 / 8, 20e-3)}
SYNC_EVERY, OVERLAPS, WIRE_BYTES, ROUNDS = 100, (0, 20), 1 + 2 / 64, 3


def measure(options):
    """All-reduces of the hierarchical engine at every point, in turns."""
    worker = os.path.join(options.build, "bin", "hosts_worker")
    sizes = sorted(FITTED["bytes"] + LEFT_OUT["bytes"])
    points, port = {}, 29500
    for _ in range(options.rounds):
        for ranks in (*FITTED["ranks"], *LEFT_OUT["ranks"]):
            placement = [machine for machine, count in enumerate(ranks) for _ in range(count)]
            with bench_hosts.Machines(len(ranks), RATE) as machines:
                port += 1  # of machines that exist for this run only
                for size, micros in bench_hosts.measure(machines, placement, worker, "hierarchical", options.seconds, sizes, port).items():
                    points.setdefault((tuple(ranks), size), []).append(micros)
    figures = {"host": support.host_facts(), "rate": RATE,
               "points": [{"ranks": ranks, "bytes": size, "microseconds": sorted(micros)} for (ranks, size), micros in points.items()]}
    with open(options.file, "w") as file:
        json.dump(figures, file, indent=1)


def shape(ranks, size):
    """Messages that a rank sends, and bytes that leave its machine, in an all-reduce of `size` bytes."""
    machines, rails = len(ranks), min(ranks)
    slices = min(max(size // (16 << 10), 1), rails)
    at_once = size <= 32 << 10 or machines == 2
    multiple = 1 if at_once else machines
    parts = multiple * max(1, math.ceil(size / slices / (multiple * (256 << 10))))
    # A machine whose ranks form several subtrees sends a sum of each, together (docs/several_machines.md, Placement).
    sums = max(bin(count).count("1") for count in ranks)
    if at_once:
        return parts * (machines - 1), sums * (machines - 1) * size
    return 2 * parts * (machines - 1) / machines, (sums + 1) * (machines - 1) / machines * size


def terms(point, cores):
    """What each of TERMS is multiplied by."""
    messages, leaving = shape(point["ranks"], point["bytes"])
    shared = max(1, sum(point["ranks"]) / cores)
    return (1, shared * messages, leaving, shared * point["bytes"])


def solve(rows, right):
    """Least squares by the normal equations; None if they have no one solution."""
    n = len(rows[0])
    table = [[sum(row[i] * row[j] for row in rows) for j in range(n)] + [sum(row[i] * y for row, y in zip(rows, right))] for i in range(n)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda row: abs(table[row][i]))
        if table[pivot][i] == 0:
            return None
        table[i], table[pivot] = table[pivot], table[i]
        for row in range(n):
            if row != i:
                factor = table[row][i] / table[i][i]
                table[row] = [a - factor * b for a, b in zip(table[row], table[i])]
    return [table[i][n] / table[i][i] for i in range(n)]


def fit(figures):
    """The terms, none below zero, that are off by the least share of each fitted point: least squares of the ratio."""
    cores = figures["host"]["cores"]
    points = [point for point in figures["points"] if list(point["ranks"]) in list(map(list, FITTED["ranks"])) and point["bytes"] in FITTED["bytes"]]
    seconds = [point["microseconds"][0] * 1e-6 for point in points]
    link = TERMS.index("link_s_per_byte")
    every = [[term / y for term in terms(point, cores)] for point, y in zip(points, seconds)]
    right = [1 - LINK_S_PER_BYTE * row[link] for row in every]
    best = None
    free = [i for i in range(len(TERMS)) if i != link]
    for kept in itertools.chain.from_iterable(itertools.combinations(free, k) for k in range(1, len(free) + 1)):
        found = solve([[row[i] for i in kept] for row in every], right)
        if found is None or min(found) < 0:
            continue
        values = [LINK_S_PER_BYTE if i == link else 0 for i in range(len(TERMS))]
        for i, value in zip(kept, found):
            values[i] = value
        error = sum((sum(v * x for v, x in zip(values, row)) - 1) ** 2 for row in every)
        if best is None or error < best[0]:
            best = (error, values)
    return dict(zip(TERMS, best[1]))


def check(figures, model):
    """For each point: whether it was fitted, what the model says, and what was measured, in seconds."""
    for point in figures["points"]:
        fitted = list(point["ranks"]) in list(map(list, FITTED["ranks"])) and point["bytes"] in FITTED["bytes"]
        said = sum(model[name] * term for name, term in zip(TERMS, terms(point, figures["host"]["cores"])))
        yield point, fitted, said, point["microseconds"][0] * 1e-6


def print_fit(figures, model):
    link = model["link_s_per_byte"]
    print(f"meeting {model['meeting_s'] * 1e6:.1f} us, message {model['message_s'] * 1e6:.1f} us, "
          f"link {8e-9 / link if link else math.inf:.2f} Gbit/s of {figures['rate']}, byte {model['byte_s'] * 1e9:.3f} ns")
    print(f"{'ranks':>12} {'bytes':>10} {'measured':>12} {'model':>12} {'off by':>8}")
    errors = {True: [], False: []}
    for point, fitted, said, measured in check(figures, model):
        errors[fitted].append(abs(said / measured - 1))
        print(f"{' + '.join(map(str, point['ranks'])):>12} {point['bytes']:>10} {measured * 1e6:>9.0f} us {said * 1e6:>9.0f} us "
              f"{said / measured - 1:>+8.0%}{'' if fitted else '  left out'}")
    for fitted, name in ((True, "fitted"), (False, "left out")):
        print(f"{name}: median {statistics.median(errors[fitted]):.0%} off, at most {max(errors[fitted]):.0%}")


def buckets_of(parameters):
    """Bytes of the buckets, in the order in which they fill."""
    rest, sizes = 4 * parameters, []
    while rest > 0:
        sizes.append(min(rest, BUCKET if sizes else FIRST_BUCKET))
        rest -= sizes[-1]
    return sizes


def simulate(binary, model, network, forward, buckets, runs, jitter=JITTER, steps=2, core=1, more=()):
    """Seconds of a step for each of `runs`, (machines, algorithm)."""
    bandwidth, latency = network
    lines = [f"link {bandwidth} {latency}", f"core {core}", f"cost {model['meeting_s']} {model['message_s']} {model['byte_s']}",
             f"jitter {jitter}", f"steps {steps}", f"forward {forward}", *more, *(f"bucket {seconds} {size}" for seconds, size in buckets),
             *(f"run {machines} {RANKS} {algorithm}" for machines, algorithm in runs)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        done = subprocess.run([binary, file.name], capture_output=True, text=True, timeout=7200)
    if done.returncode != 0:
        raise RuntimeError(f"{binary} ended with {done.returncode}\n{done.stderr}")
    found = {}
    for line in done.stdout.splitlines():
        machines, algorithm, seconds = line.split()
        found[int(machines), algorithm] = float(seconds)
    return found


def efficiencies(binary, model, machines):
    """A row for each network, work, algorithm and number of machines: a step of one machine over one of many."""
    rows = []
    for network, link in NETWORKS.items():
        for work, (forward, backward, parameters) in WORKS.items():
            sizes = buckets_of(parameters)
            buckets = [(backward * size / sum(sizes), size) for size in sizes]
            runs = [(1, "direct"), *itertools.product(machines, ALGORITHMS)]
            seconds = simulate(binary, model, link, forward, buckets, runs)
            for (count, algorithm), value in seconds.items():
                if count > 1:
                    rows.append({"network": network, "work": work, "algorithm": algorithm, "machines": count,
                                 "step_s": value, "efficiency": seconds[1, "direct"] / value})
    return rows


def sites(binary, model, machines):
    """A row for each network, work, overlap and number of machines that synchronise every SYNC_EVERY steps."""
    rows = []
    for (network, link), (work, (forward, backward, parameters)), overlap in itertools.product(SITES.items(), WORKS.items(), OVERLAPS):
        seconds = simulate(binary, model, link, forward, [(backward, 0)], [(count, "diloco") for count in (1, *machines)],
                           steps=ROUNDS * SYNC_EVERY + overlap, more=[f"diloco {SYNC_EVERY} {overlap} {parameters * WIRE_BYTES}"])
        rows += [{"network": network, "work": work, "overlap_steps": overlap, "machines": count, "step_s": seconds[count, "diloco"],
                  "efficiency": seconds[1, "diloco"] / seconds[count, "diloco"]} for count in machines]
    return rows


def crossings(binary, model, machines, sizes):
    """The fastest algorithm of one all-reduce, for each number of machines and size."""
    rows = []
    for network, link in NETWORKS.items():
        for size in sizes:
            seconds = simulate(binary, model, link, 0, [(0, size)], list(itertools.product(machines, ALGORITHMS)), jitter=0, steps=1)
            for count in machines:
                times = {algorithm: seconds[count, algorithm] for algorithm in ALGORITHMS}
                rows.append({"network": network, "machines": count, "bytes": size, "seconds": times, "fastest": min(times, key=times.get)})
    return rows


def print_simulation(steps, fastest, machines):
    for network in NETWORKS:
        print(f"\n{network}: efficiency, a step on one machine over a step on many, simulated")
        print(f"{'':40} {'':17}", *(f"{count:>6}" for count in machines))
        for work in WORKS:
            for algorithm in ALGORITHMS:
                cells = {row["machines"]: row["efficiency"] for row in steps if (row["network"], row["work"], row["algorithm"]) == (network, work, algorithm)}
                print(f"{work:40} {algorithm:17}", *(f"{cells[count]:>6.2f}" for count in machines))
        print(f"{network}: the fastest algorithm of one all-reduce, simulated")
        for size in sorted({row["bytes"] for row in fastest}):
            cells = {row["machines"]: row["fastest"] for row in fastest if (row["network"], row["bytes"]) == (network, size)}
            print(f"{size:>12}", *(f"{cells[count]:>17}" for count in machines))


def print_sites(rows, machines):
    print(f"\nDiLoCo, sync_every {SYNC_EVERY}, kInt8: efficiency, a step on one machine over a step on many, simulated")
    print(f"{'':73}", *(f"{count:>6}" for count in machines))
    for network, work, overlap in itertools.product(SITES, WORKS, OVERLAPS):
        cells = {row["machines"]: row["efficiency"] for row in rows if (row["network"], row["work"], row["overlap_steps"]) == (network, work, overlap)}
        print(f"{network:18} {work:40} overlap {overlap:>3}  ", *(f"{cells[count]:>6.2f}" for count in machines))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "fit", "simulate"))
    parser.add_argument("file", nargs="?", default=os.path.join(HERE, "measured.json"), help="what was measured")
    parser.add_argument("--build", default=support.BUILD)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each size and round")
    parser.add_argument("--svg", help="file for the picture")
    parser.add_argument("--json", help="file for what was simulated")
    parser.add_argument("--tiny", action="store_true", help="to see that it works")
    options = parser.parse_args()
    if options.what == "measure":
        return measure(options)
    with open(options.file) as file:
        figures = json.load(file)
    model = fit(figures)
    print_fit(figures, model)
    if options.what == "fit":
        return
    machines = (8, 64) if options.tiny else (8, 16, 32, 64, 128, 256, 512, 1024)
    sizes = (1 << 10, 16 << 20) if options.tiny else (64, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)
    binary = os.path.join(options.build, "bin", "simulate_step")
    steps, fastest = efficiencies(binary, model, machines), crossings(binary, model, machines, sizes)
    print_simulation(steps, fastest, machines)
    many_sites = (2, 8) if options.tiny else (2, 8, 16, 32, 64)
    synchronised = sites(binary, model, many_sites)
    print_sites(synchronised, many_sites)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"model": model, "steps": steps, "fastest": fastest, "sites": synchronised}, file, indent=1)
    if options.svg:
        with open(options.svg, "w") as file:
            file.write(plot.draw(steps, machines, list(WORKS), list(NETWORKS)))


if __name__ == "__main__":
    main()
