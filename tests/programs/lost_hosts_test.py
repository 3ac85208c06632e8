"""Machines of a `lockstep run --hosts` are asked to leave, are cut off, die or lose a rank: what is said, how soon, and that nothing is left. In network namespaces."""

import concurrent.futures
import itertools
import json
import os
import random
import signal
import time
import unittest

from hosts_test import ADDRESSES, Hosts, OneCommandTest, kill_if_there, processes_of
from support import BIN, LOCKSTEP, environment, main, marked_processes, run


class LostHosts(OneCommandTest):
    def test_three_machines_leave_after_one_step(self):
        with Hosts(3) as hosts:
            process = self.train_for_ever(hosts, (1, 2, 1))
            process.send_signal(signal.SIGTERM)
            self.ended(process, 60)
        steps = set()
        for rank in range(4):
            with open(os.path.join(self.folder, "run", f"rank_{rank}.log")) as file:
                steps.add(file.read().split("leaves after ")[1].split()[0])
        self.assertEqual(len(steps), 1, "all ranks left after the same step")
        self.nothing_left()

    def test_a_broken_link_is_noticed_by_both_within_five_seconds(self):
        with Hosts() as hosts:
            process = self.train_for_ever(hosts, (1, 1))
            ranks = marked_processes(self.mark)
            self.assertEqual(set(ranks.values()) - {None}, {"0", "1"})
            time.sleep(0.5)  # what ranks are in is told every 0.1 s
            hosts.cut(0, 1)
            cut = time.monotonic()
            output = self.ended(process, 52, 20)
            self.assertLess(time.monotonic() - cut, 8)
            self.assertRegex(output, rf"{hosts.names[1]} has not been heard of for 4 s; it was (in|done with) \w+")
            self.assertIn("rank 1 of 2 was lost with its machine", output)
            self.nothing_left(max(0.1, cut + 8 - time.monotonic()))

    def test_a_machine_whose_processes_are_all_killed_is_lost(self):
        with Hosts() as hosts:
            process = self.train_for_ever(hosts, (1, 2))
            killed = time.monotonic()
            for pid in processes_of(hosts, 1):
                kill_if_there(pid)
            output = self.ended(process, 52, 20)
            self.assertLess(time.monotonic() - killed, 6)
        self.assertIn("was lost with its machine: " + hosts.names[1], output)
        self.nothing_left()

    def test_restarts_go_on_from_the_checkpoint(self):
        with Hosts() as hosts:
            process = self.train_for_ever(hosts, (1, 1), "--max-restarts", 1)
            victim = next(pid for pid, rank in marked_processes(self.mark).items() if rank == "1")
            os.kill(victim, signal.SIGKILL)
            for line in process.stdout:
                if line.startswith("begins at "):
                    break
            self.assertGreaterEqual(int(line.split()[2]), 25)
            for line in process.stdout:
                if line.startswith("step "):
                    break
            time.sleep(0.3)  # the coordinator hears ten times a second what the ranks do
            process.send_signal(signal.SIGTERM)
            self.ended(process, 60)
        self.nothing_left()

    def test_whatever_dies_is_named_and_nothing_is_left(self):
        nightly = bool(os.environ.get("LOCKSTEP_NIGHTLY"))
        seed, count = time.time_ns(), 200 if nightly else 20
        print(f"seed {seed}", flush=True)
        drawn = random.Random(seed)
        cases = [OneFault(kind, drawn.getrandbits(32)) for _, kind in zip(range(count), itertools.cycle(OneFault.KINDS))]
        results = [unittest.TestResult() for _ in cases]
        # Two at a time: most of a case is silence that has to last.
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda case, result: case.run(result), cases, results))
        for case, result in zip(cases, results):
            for _, trace in result.failures + result.errors:
                self.fail(f"seed {seed}, {case}:\n{trace}")
            self.assertEqual((result.testsRun, result.skipped), (1, []), str(case))
        for kind in OneFault.KINDS:
            took = sorted(case.took for case in cases if case.kind == kind)
            print(f"{kind}: {len(took)} times, told after {took[len(took) // 2]:.1f} s, at most {took[-1]:.1f} s", flush=True)


class MachinesThatCannotConnect(OneCommandTest):
    """Two of three machines, while all reach the coordinator."""

    def test_packets_are_lost(self):
        with Hosts(3) as hosts:
            hosts.lose_packets(1, 2), hosts.lose_packets(2, 1)
            self.told(hosts, (1, 1, 1), "1", "2", 20)
            self.told(hosts, (2, 2, 1), "2", "4", 20)

    def test_there_is_no_way(self):
        with Hosts(3) as hosts:
            hosts.cut(1, 2)
            self.told(hosts, (1, 1, 1), "1", "2", 20)

    def told(self, hosts, slots, low, high, within):
        began = time.monotonic()
        folder = os.path.join(self.folder, f"run{sum(slots)}")
        command = hosts.lockstep_run(slots, "--run-dir", folder, "--", os.path.join(BIN, "hello_ranks"))
        code = run(*command, env=environment(LOCKSTEP_JOIN_TIMEOUT_S="12"), check=False).returncode
        self.assertEqual(code, 40)
        self.assertLess(time.monotonic() - began, within)
        for rank in range(sum(slots)):
            with open(os.path.join(folder, f"rank_{rank}.log")) as file:
                self.assertRegex(file.read(), rf"rank {low} \(.*{ADDRESSES[1]}\) and rank {high} \(.*{ADDRESSES[2]}\) cannot connect to each other\. `lockstep doctor --hosts`")
        self.nothing_left()


class OneFault(OneCommandTest):
    """A rank, an agent, the coordinator, a link, or all processes of a machine, at a random moment of a training on two or three machines."""

    KINDS = ("rank", "agent", "coordinator", "link", "machine")

    def __init__(self, kind, seed):
        super().__init__("lose_it")
        self.kind, self.seed, self.chance, self.took = kind, seed, random.Random(seed), 0

    def __str__(self):
        return f"a lost {self.kind} ({self.seed})"

    def lose_it(self):
        slots = self.chance.choice(((2, 2), (1, 2), (2, 1, 1)))
        host_of = [host for host, count in enumerate(slots) for _ in range(count)]
        with Hosts(len(slots)) as hosts:
            process = self.train_for_ever(hosts, slots)
            time.sleep(2 * self.chance.random())
            began = time.monotonic()
            code, words = getattr(self, "lose_" + self.kind)(hosts, process, host_of)
            output = self.ended(process, code, 20)
            self.took = time.monotonic() - began
            # A link's loss is only seen by the silence, and what has hold of nobody any more kills itself after it.
            self.assertLess(self.took, 6, output)
            for word in words:
                self.assertRegex(output, word)
            self.nothing_left(max(0.1, began + 8.5 - time.monotonic()))
            # Whatever has no mark: a process that is about to end shows no environment any more.
            while (left := [pid for host in range(len(slots)) for pid in processes_of(hosts, host)]) and time.monotonic() < began + 8.5:
                time.sleep(0.05)
            self.assertEqual(left, [])

    def lose_rank(self, hosts, process, host_of):
        rank = self.chance.randrange(len(host_of))
        os.kill(next(pid for pid, its in marked_processes(self.mark).items() if its == str(rank)), signal.SIGKILL)
        return 41, [f"rank {rank} of {len(host_of)} failed first: killed by SIGKILL", f"on {hosts.names[host_of[rank]]}, "]

    def lose_agent(self, hosts, process, host_of):
        host = self.chance.choice(host_of)
        os.kill(agents_of(hosts, host)[0], signal.SIGKILL)
        return 52, [self.loss_of(hosts, host, host_of) + "is gone"]

    def lose_coordinator(self, hosts, process, host_of):
        process.kill()
        return -signal.SIGKILL, []

    def lose_link(self, hosts, process, host_of):
        host = self.chance.choice([host for host in host_of if host > 0])
        hosts.cut(0, host)
        # The kernel may say so before the silence does.
        return 52, [self.loss_of(hosts, host, host_of) + "(has not been heard of for 4 s|is gone: [A-Z][a-z ]+); it was "]

    def lose_machine(self, hosts, process, host_of):
        host = self.chance.choice([host for host in host_of if host > 0])  # the coordinator is on the first
        for pid in processes_of(hosts, host):
            kill_if_there(pid)
        return 52, [self.loss_of(hosts, host, host_of)]

    def loss_of(self, hosts, host, host_of):
        ranks = [str(rank) for rank, its in enumerate(host_of) if its == host]
        return f"rank ({'|'.join(ranks)}) of {len(host_of)} was lost with its machine: {hosts.names[host]} "


def agents_of(hosts, host):
    """The agent of a machine, before its guard, which it has forked."""
    found = []
    for pid in processes_of(hosts, host):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode().split("\0")
        if words[1:2] == ["agent"]:
            found.append(pid)
    return sorted(found)


class DoctorOfHosts(OneCommandTest):
    def doctor(self, hosts, *options):
        said = run(*hosts.on(0, LOCKSTEP, "doctor", "--hosts", ",".join(hosts.names), "--launch-command", "ip netns exec {host}", *options), check=False)
        return said.returncode, said.stdout + said.stderr

    def test_links_are_measured_and_the_slow_one_is_named(self):
        with Hosts(3) as hosts:
            one, other = hosts.names[1:]
            for host, peer in ((1, 2), (2, 1)):
                run(*hosts.on(host, "tc", "qdisc", "add", "dev", hosts.ends[host, peer], "root", "tbf", "rate", "50mbit", "burst", "32kb", "latency", "50ms"))
            code, text = self.doctor(hosts, "--json")
        self.assertEqual(code, 0, text)
        found = json.loads(text)
        self.assertEqual([(link["low"], link["high"]) for link in found["links"]], [(0, 1), (0, 2), (1, 2)])
        slow = found["links"][2]
        self.assertLess(slow["bytes_per_s_to_high"] * 8, 60e6)
        self.assertGreater(slow["bytes_per_s_to_low"] * 8, 25e6)
        for link in found["links"]:
            self.assertLess(abs(link["clock_ahead_s"]), 0.1, "they share a clock")
            self.assertLess(link["round_trip_s"], 0.1)
        self.assertEqual((found["broken"], len(found["slow"])), ([], 1))
        self.assertTrue(found["slow"][0].startswith(f"{one} and {other} have a slow link: "), text)

    def test_machines_that_cannot_reach_each_other_are_named(self):
        with Hosts(3) as hosts:
            one, other = hosts.names[1:]
            hosts.cut(1, 2)
            code, text = self.doctor(hosts)
        self.assertEqual(code, 1, text)
        self.assertIn(f"BROKEN  {one} cannot connect to {other}: ", text)
        self.assertIn(f"BROKEN  {other} cannot connect to {one}: ", text)
        self.assertEqual(text.count("BROKEN"), 2)
        self.nothing_left()


if __name__ == "__main__":
    main()
