"""What gpt_text sends between machines, and what it learns, with DiLoCo and with DistributedDataParallel.

The machines are those of bench_hosts.py; bytes are what their interfaces have sent, by the kernel's counters, of which
the start and the end are taken off by the difference of a run of two epochs and one of one.

    python3 bench/hosts/bench_hosts_diloco.py bytes --ranks 1 1
    python3 bench/hosts/bench_hosts_diloco.py loss --ranks 1 1 --seeds 1 2 3
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile

from bench_hosts import SOURCE, Machines, run

DDP = "ddp"
TEXT = "/usr/share/common-licenses/GPL-3"


class Trainings:
    """Runs of gpt_text on the ranks of all machines."""

    def __init__(self, machines, ranks, build):
        self.machines, self.build, self.port = machines, build, 29600
        self.placement = [machine for machine, count in enumerate(ranks) for _ in range(count)]

    def sent(self):
        """Bytes that the machines' interfaces have sent."""
        return sum(int(json.loads(run("ip", "-j", "-s", "-n", name, "link", "show", "net0"))[0]["stats64"]["tx"]["bytes"])
                   for name in self.machines.names)

    def train(self, system, every, *options):
        """The figures of gpt_text, and what was sent. `system`: DDP, or WIRE:FRAGMENTS:OVERLAP:OUTER_LR:OUTER_MOMENTUM, of which
        the last may be left out."""
        if system != DDP:
            names = ("--wire", "--fragments", "--overlap", "--outer-lr", "--outer-momentum")
            options = (*options, "--sync-every", every, *(part for pair in zip(names, system.split(":")) for part in pair))
        self.port += 1
        before = self.sent()
        with tempfile.TemporaryDirectory() as folder:
            path, ranks = os.path.join(folder, "figures.json"), []
            for rank, machine in enumerate(self.placement):
                here = [r for r, m in enumerate(self.placement) if m == machine]
                env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(len(self.placement)), LOCAL_RANK=str(here.index(rank)),
                           LOCAL_WORLD_SIZE=str(len(here)), MASTER_ADDR=self.machines.address(0), MASTER_PORT=str(self.port),
                           OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
                command = ["ip", "netns", "exec", self.machines.names[machine], os.path.join(self.build, "bin/gpt_text"), "--generate", "1",
                           "--json", path, *map(str, options)]
                ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
            errors = [rank.communicate()[1] for rank in ranks]
            if any(rank.returncode for rank in ranks):
                sys.exit(f"{system} failed:\n" + "\n".join(errors))
            with open(path) as file:
                return json.load(file), self.sent() - before


def measure_bytes(trainings, options):
    per_step = {}
    with tempfile.NamedTemporaryFile() as text:
        # 2 * every steps an epoch, after which a round has just ended: there is nothing left for finish() to send.
        batch, block = 16, 16
        steps = 2 * options.every
        samples = steps * batch * len(trainings.placement)
        wanted = math.ceil((samples + batch) * (block // 4) / 0.9)
        with open(TEXT, "rb") as whole:
            content = whole.read()
        text.write((content * (1 + wanted // len(content)))[:wanted])
        text.flush()
        for system in options.systems:
            figures, sent = zip(*(trainings.train(system, options.every, "--text", text.name, "--batch-size", batch, "--block-length", block,
                                                  "--width", options.width, "--layers", options.layers, "--epochs", epochs)
                                  for epochs in (1, 2)))
            count = figures[1]["steps"] - figures[0]["steps"]
            if count % options.every:
                sys.exit(f"{count} steps in an epoch are no multiple of {options.every}")
            per_step[system] = (sent[1] - sent[0]) / count
            told = [one.get("bytes_between_machines") for one in figures]
            own = f"{(told[1] - told[0]) / count:12.0f}" if told[0] is not None else " " * 12
            ratio = f"1/{per_step[DDP] / per_step[system]:.0f}" if DDP in per_step else ""
            print(f"{system:18} {per_step[system]:12.0f} bytes a step on the interfaces, {own} by stats()  {ratio}", flush=True)


def measure_loss(trainings, options):
    for seed in options.seeds:
        losses = {}
        for system in options.systems:
            figures, _ = trainings.train(system, options.every, "--text", options.text, "--seed", seed, "--epochs", options.epochs,
                                         "--width", options.width, "--layers", options.layers)
            losses[system] = figures["validation_loss"]
            ratio = f"{losses[system] / losses[DDP]:.4f}" if DDP in losses else ""
            print(f"seed {seed} {system:18} {figures['steps']} steps, {figures['seconds']:.1f} s, validation loss {losses[system]:.4f}  {ratio}",
                  flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("bytes", "loss"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 1], help="on each machine")
    parser.add_argument("--systems", nargs="+", default=[DDP, "fp32", "bf16", "int8", "int4"], help="ddp, or WIRE[:FRAGMENTS[:OVERLAP[:OUTER_LR[:OUTER_MOMENTUM]]]]")
    parser.add_argument("--every", type=int, default=100, help="steps between two synchronisations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--text", default=TEXT, help="the file to learn from")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rate", help="of every machine's link, such as 100mbit")
    parser.add_argument("--build", default=os.path.join(SOURCE, "build"))
    options = parser.parse_args()
    with Machines(len(options.ranks), options.rate) as machines:
        trainings = Trainings(machines, options.ranks, options.build)
        (measure_bytes if options.what == "bytes" else measure_loss)(trainings, options)


if __name__ == "__main__":
    main()
