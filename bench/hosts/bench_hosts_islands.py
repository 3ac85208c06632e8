"""How long machines of `lockstep run --islands` wait for one that is lost, and when it is back.

Four machines of one rank, network namespaces of bench_hosts.py, count samples in rounds of 20 steps of 10 ms (island_rounds of
the tests). One is killed with all its processes at a random instant, when the one before is back; or its link is cut. Figures
are those of the launcher's rounds.jsonl. Each run is verified: every sample of every machine has counted once, but for those of
a machine that is cut off.

    python3 bench/hosts/bench_hosts_islands.py --runs 10 --kills 3 --cuts 5
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

from bench_hosts import SOURCE, Machines, run

STATE = "it gets the outer state"
EVERY, PAUSE_MS = 20, 10


class Training:
    """A run of island_rounds on all machines. `patient`: a lost machine is started again."""

    def __init__(self, machines, folder, build, steps, patient):
        self.machines, self.folder, self.steps = machines, folder, steps
        hosts = ",".join(name + ":1" for name in machines.names)
        limits = [] if patient else ["--max-restarts", "0"]
        self.output = open(os.path.join(folder, "output"), "w+", encoding="utf-8")
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", machines.names[0], os.path.join(build, "bin/lockstep"), "run", "--hosts", hosts, "--launch-command", "ip netns exec {host}",
             "--islands", "--elastic", "2", *limits, "--run-dir", "run", "--", os.path.join(build, "bin/island_rounds"), folder, str(steps), str(EVERY), str(PAUSE_MS)],
            cwd=folder, stdout=self.output, stderr=subprocess.STDOUT, env=dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"))

    def rounds(self):
        try:
            with open(os.path.join(self.folder, "run", "rounds.jsonl"), encoding="utf-8") as lines:
                return [json.loads(line) for line in lines.read().split("\n")[:-1]]
        except FileNotFoundError:
            return []

    def fail(self, why):
        self.process.kill()
        self.output.seek(0)
        sys.exit(f"{why}\n{self.output.read()}")

    def wait_for(self, condition, what, at_most=60):
        until = time.monotonic() + at_most
        while not condition(self.rounds()):
            if time.monotonic() > until or self.process.poll() is not None:
                self.fail(f"no {what}")
            time.sleep(0.01)

    def kill(self, machine):
        for pid in run("ip", "netns", "pids", self.machines.names[machine]).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass  # another's death has ended it

    def cut(self, machine, state="down"):
        run("ip", "-n", self.machines.names[machine], "link", "set", "net0", state)

    def end(self, lost=()):
        """Verifies the samples."""
        if self.process.wait(timeout=180) != 0:
            self.fail("the run failed")
        rounds, last = self.rounds(), None
        for machine in set(range(len(self.machines.names))) - set(lost):
            with open(os.path.join(self.folder, f"machine_{machine}.json"), encoding="utf-8") as file:
                figures = json.load(file)
            last = figures if last is None or figures["rounds"] > last["rounds"] else last
        for machine, counts in enumerate(last["machines"]):
            allowed = {f"{1 / len(one['took_part']):.4f}" for one in rounds if machine in one["took_part"]} | ({"0.0000"} if machine in lost else set())
            if set(counts) - allowed:
                self.fail(f"samples of machine {machine} have counted {counts}")


def back_in(rounds, machine):
    """The rounds from the one in which the machine asked for the outer state to the first in which it takes part; None: not yet."""
    asked = next((one["round"] for one in rounds if one["left_out"].get(str(machine)) == STATE), None)
    taken = next((one["round"] for one in rounds if machine in one["took_part"] and asked is not None and one["round"] > asked), None)
    return taken and taken - asked


def killed(machines, options, chance):
    """For each kill: seconds that the others waited at most until the machine was back, and rounds after its asking."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        # A machine is started again after 1 s, 2 s, 4 s.
        training = Training(machines, folder, options.build, 200 + options.kills * 500, patient=True)
        training.wait_for(lambda rounds: len(rounds) >= 3, "round")
        for _ in range(options.kills):
            victim = chance.randrange(1, len(machines.names))
            time.sleep(chance.uniform(0, 2 * EVERY * PAUSE_MS / 1000))
            training.kill(victim)
            count = len(training.rounds())
            training.wait_for(lambda rounds: back_in(rounds[count:], victim), f"way back of machine {victim}")
            since = training.rounds()[count:]
            figures.append((max(one["seconds_waited"] for one in since), back_in(since, victim)))
        training.end()
    return figures


def cut_off(machines, options, chance):
    with tempfile.TemporaryDirectory() as folder:
        training = Training(machines, folder, options.build, 400, patient=False)
        training.wait_for(lambda rounds: len(rounds) >= 3, "round")
        victim = chance.randrange(1, len(machines.names))
        time.sleep(chance.uniform(0, EVERY * PAUSE_MS / 1000))
        training.cut(victim)
        count = len(training.rounds())
        training.wait_for(lambda rounds: any(victim not in one["took_part"] for one in rounds[count:]), "round without it")
        waited = max(one["seconds_waited"] for one in training.rounds()[count:])
        training.end(lost=[victim])
        training.cut(victim, "up")
    return waited


def counted(number, word):
    return f"{number} {word}{'' if number == 1 else 's'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(SOURCE, "build"))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kills", type=int, default=3, help="in each run")
    parser.add_argument("--cuts", type=int, default=5, help="runs with one each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="one run with one kill, and one with a cut")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    if options.tiny:
        options.runs = options.kills = options.cuts = 1
    chance = random.Random(options.seed)
    with Machines(4, None) as machines:
        kills = [figure for _ in range(options.runs) for figure in killed(machines, options, chance)]
        cuts = [cut_off(machines, options, chance) for _ in range(options.cuts)]
    if kills:
        counts = {rounds: sum(back == rounds for _, back in kills) for rounds in sorted({back for _, back in kills})}
        print(f"{counted(len(kills), 'kill')}: the others waited at most {max(waited for waited, _ in kills):.3f} s, back after "
              + ", ".join(f"{counted(rounds, 'round')} ({counted(count, 'time')})" for rounds, count in counts.items()))
    if cuts:
        print(f"{counted(len(cuts), 'link')} cut: the others waited {min(cuts):.2f} to {max(cuts):.2f} s")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"kills": kills, "cuts": cuts}, file)


if __name__ == "__main__":
    main()
