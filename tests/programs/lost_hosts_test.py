"""Machines of a `lockstep run --hosts` are asked to leave, are cut off, die or lose a rank: what is said, how soon, and that nothing is left. In network namespaces."""

import json
import os
import random
import signal
import time

from hosts_test import Hosts, OneCommandTest
from support import LOCKSTEP, main, marked_processes, run


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
            hosts.cut(0, 1)
            cut = time.monotonic()
            output = self.ended(process, 52, 20)
            self.assertLess(time.monotonic() - cut, 8)
            self.assertIn(f"{hosts.names[1]} has not been heard of for 4 s; it was in all_reduce", output)
            self.assertIn("rank 1 of 2 was lost with its machine", output)
            self.nothing_left(max(0.1, cut + 8 - time.monotonic()))

    def test_a_machine_whose_processes_are_all_killed_is_lost(self):
        with Hosts() as hosts:
            process = self.train_for_ever(hosts, (1, 2))
            killed = time.monotonic()
            self.lose_a_machine(hosts, process, None)
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
        """A rank, an agent, the coordinator, a link, or all processes of a machine, at a random moment of a training."""
        nightly = bool(os.environ.get("LOCKSTEP_NIGHTLY"))
        seed = time.time_ns() if nightly else 18
        chance = random.Random(seed)
        faults = [self.lose_a_rank, self.lose_an_agent, self.lose_the_coordinator, self.lose_a_link, self.lose_a_machine]
        for number in range(200 if nightly else len(faults)):
            fault = faults[number % len(faults)]
            with self.subTest(fault=fault.__name__, number=number, seed=seed), Hosts() as hosts:
                process = self.train_for_ever(hosts, (2, 2))
                time.sleep(chance.random())
                began = time.monotonic()
                code, words = fault(hosts, process, chance)
                output = self.ended(process, code, 20)
                # A link's loss is only seen by the silence, and what has hold of nobody any more kills itself after it.
                self.assertLess(time.monotonic() - began, 6.5, output)
                for word in words:
                    self.assertIn(word, output)
                self.nothing_left(max(0.1, began + 8.5 - time.monotonic()))

    def lose_a_rank(self, hosts, process, chance):
        rank = chance.choice("0123")
        os.kill(next(pid for pid, its in marked_processes(self.mark).items() if its == rank), signal.SIGKILL)
        return 41, [f"rank {rank} of 4 failed first: killed by SIGKILL", f"on {hosts.names[int(rank) // 2]}, "]

    def lose_an_agent(self, hosts, process, chance):
        host = chance.choice((0, 1))
        agents = [pid for pid in self.agents(hosts, host)]
        os.kill(agents[0], signal.SIGKILL)
        return 52, [f"was lost with its machine: {hosts.names[host]} is gone"]

    def lose_the_coordinator(self, hosts, process, chance):
        process.kill()
        return -signal.SIGKILL, []

    def lose_a_link(self, hosts, process, chance):
        hosts.cut(0, 1)
        return 52, [f"was lost with its machine: {hosts.names[1]} has not been heard of for 4 s; it was "]

    def lose_a_machine(self, hosts, process, chance):
        for pid in run("ip", "netns", "pids", hosts.names[1]).stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass  # its agent's death has ended it
        return 52, [f"was lost with its machine: {hosts.names[1]}"]

    def agents(self, hosts, host):
        """The agent of a machine, before its guard, which it has forked."""
        found = []
        for pid in map(int, run("ip", "netns", "pids", hosts.names[host]).stdout.split()):
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
