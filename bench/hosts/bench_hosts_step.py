"""Training steps of ranks on several machines: Lockstep against PyTorch's DistributedDataParallel on Gloo, and with
hooks that compress what goes from machine to machine.

The machines are those of bench_hosts.py, and the workers those of bench/step. Every system trains in turn, several
times; ratios are of medians of the same run.

    python3 bench/hosts/bench_hosts_step.py --rate 1gbit
    python3 bench/hosts/bench_hosts_step.py --rate 100mbit --systems lockstep lockstep_bf16 lockstep_bf16_between
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from bench_hosts import SOURCE, Machines

sys.path.insert(0, os.path.join(SOURCE, "scripts"))
from python_with_torch import python_with_torch  # noqa: E402

PYTORCH = "pytorch_ddp_gloo"


class Job:
    """The ranks of one system, which answer the commands of bench/step/step_job.h."""

    def __init__(self, machines, placement, system, options, port):
        self.folder = tempfile.TemporaryDirectory()
        path = os.path.join(self.folder.name, "socket")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(len(placement))
        listener.settimeout(120)
        self.ranks = []
        for rank, machine in enumerate(placement):
            here = [r for r, m in enumerate(placement) if m == machine]
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(len(placement)), LOCAL_RANK=str(here.index(rank)),
                       LOCAL_WORLD_SIZE=str(len(here)), MASTER_ADDR=machines.address(0), MASTER_PORT=str(port), OMP_NUM_THREADS="1",
                       MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="net0", PYTHONPATH=os.path.join(options.build, "python/site"))
            worker = ([options.python, os.path.join(SOURCE, "bench/step/step_worker.py")] if system.startswith("pytorch_")
                      else [os.path.join(options.build, "bin/step_worker")])
            command = ["ip", "netns", "exec", machines.names[machine], *worker, "--socket", path, "--system", system, "--model",
                       options.model, "--optimizer", options.optimizer]
            self.ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        try:
            self.lines = [listener.accept()[0].makefile("rw") for _ in placement]
        except TimeoutError:
            self.end()
            sys.exit(f"{system}: not all ranks have come\n" + "\n".join(rank.stderr.read() for rank in self.ranks))
        self.lines.sort(key=lambda line: int(line.readline().split()[1]))  # hello RANK VERSION

    def ask(self, command):
        for line in self.lines:
            line.write(command + "\n")
            line.flush()
        answers = [line.readline().split() for line in self.lines]
        if not all(answers):
            time.sleep(1)  # until they have said why
            self.end()
            sys.exit(f"{command} failed:\n" + "\n".join(rank.stderr.read() for rank in self.ranks))
        return answers

    def time(self, warm, steps):
        """Milliseconds of each step, of the rank that was slowest in it, and the mean of the slowest rank."""
        ranks = [list(map(float, answer[1:answer.index("cpu")])) for answer in self.ask(f"time {warm} {steps}")]
        return [max(step) for step in zip(*ranks)], max(sum(rank) for rank in ranks) / max(steps, 1)

    def end(self):
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        self.folder.cleanup()


def measure(machines, placement, system, options, port):
    """The losses of the first two steps, by rank; milliseconds of each step, and their mean; MiB on the fullest machine; bytes that the
    machine that sends most has sent to others in a step, if the system counts them."""

    def of_machines(numbers):
        return max(sum(number for number, m in zip(numbers, placement) if m == machine) for machine in set(placement))

    job = Job(machines, placement, system, options, port)
    job.ask("attach")
    losses = [answer[1:3] for answer in job.ask("check 2")]
    job.ask("peak")  # ends the thread that looks for it
    job.time(options.settling, 0)  # lets go of what only the start and the check have needed
    job.ask("watch")
    job.time(2, 0)
    memory = of_machines([float(answer[1]) for answer in job.ask("peak")])
    before = [int(answer[1]) for answer in job.ask("sent")]
    times, mean = job.time(options.warm, options.steps)
    sent = [int(answer[1]) - old for answer, old in zip(job.ask("sent"), before)]
    job.end()
    return losses, times, mean, memory, of_machines(sent) / (options.warm + options.steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(SOURCE, "build"))
    parser.add_argument("--python", default=python_with_torch(), help="with torch")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 2], help="of each machine")
    parser.add_argument("--rate", help="of a machine's link, as tc writes it: 1gbit")
    parser.add_argument("--model", default="mlp", choices=("mlp", "resnet", "transformer", "small_1000", "linear_100m", "gpt_24"))
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "adamw"))
    parser.add_argument("--systems", nargs="+", default=("lockstep", PYTORCH))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=3, help="steps before those that are timed")
    parser.add_argument("--settling", type=int, default=4, help="steps before the two in which memory is looked at")
    parser.add_argument("--steps", type=int, default=10, help="of each system and round")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    if PYTORCH in options.systems and not options.python:
        sys.exit("no Python with torch was found; scripts/setup installs one, or name one by --python")
    placement = [machine for machine, count in enumerate(options.ranks) for _ in range(count)]
    times, means = ({system: [] for system in options.systems} for _ in range(2))
    first, memory, sent = {}, {}, {}
    with Machines(len(options.ranks), options.rate) as machines:
        for turn in range(options.rounds):
            for i, system in enumerate(options.systems):
                port = 29500 + turn * len(options.systems) + i
                first[system], found, mean, memory[system], sent[system] = measure(machines, placement, system, options, port)
                times[system] += found
                means[system].append(mean)
    # All have begun with the same weights and inputs.
    expected = first[options.systems[0]]
    for system, losses in first.items():
        for loss, other in zip(sum(losses, []), sum(expected, [])):
            if abs(float(loss) - float(other)) > 1e-3 * abs(float(other)):
                sys.exit(f"{system} has other losses than {options.systems[0]}: {losses}, {expected}")
    print(f"step of {options.model}, {' + '.join(map(str, options.ranks))} ranks, {options.rate or 'unshaped'}; ms; MiB on the "
          "fullest machine; MB that it sends in a step, where that is counted")
    print("system".ljust(28), "median".rjust(8), "fastest".rjust(8), f"/ {options.systems[-1]}".rjust(24), "mean".rjust(8), "MiB".rjust(8),
          "MB".rjust(8))
    medians = {system: statistics.median(all_) for system, all_ in times.items()}
    for system in options.systems:
        print(f"{system:28} {medians[system]:8.1f} {min(times[system]):8.1f} {medians[system] / medians[options.systems[-1]]:24.2f}"
              f" {statistics.median(means[system]):8.1f} {memory[system]:8.0f} {f'{sent[system] / 1e6:.1f}' if sent[system] else '':>8}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"ranks": options.ranks, "rate": options.rate, "model": options.model, "milliseconds": times, "means": means,
                       "mib": memory, "sent_bytes": sent}, file)


if __name__ == "__main__":
    main()
