"""Fragments that take turns, and that travel while training continues, among machines that come and go (`lockstep run --islands`): the bits of a run without --islands, those
of a run that ends in the middle of a round and goes on, and the samples of machines that are killed or late."""

import glob
import json
import os
import shutil
import signal
import time

from hosts_test import Hosts, processes_of
from islands_test import IslandsTest
from join_test import JoinTest
from support import BIN, LOCKSTEP, main, run, thorough

FRAGMENTS, OVERLAP = 4, 2


def fragment_of(one):
    return -one["round"] % FRAGMENTS


class Bits(IslandsTest):
    """Runs of island_net: a turn every 5 steps."""

    def train(self, hosts, folder, *options, steps=67, overlap=OVERLAP, wire="fp32", pause=0, ends_at=None):
        """The hashes of the machines' parameters and buffers, or nothing if the run ends before."""
        os.makedirs(os.path.join(self.folder, folder), exist_ok=True)
        words = [os.path.join(BIN, "island_net"), os.path.join(self.folder, folder), steps, 20, FRAGMENTS, overlap, wire, pause, *([ends_at] if ends_at else [])]
        number = len([name for name in os.listdir(self.folder) if name.startswith("run")])
        process = self.begin(*hosts.lockstep_run([1] * len(hosts.names), *options, "--run-dir", f"run{number}", "--", *words))
        output = self.ended(process, 0)
        self.assertNotIn("differs", output)
        if ends_at:
            return None
        hashes = []
        for machine in range(len(hosts.names)):
            with open(os.path.join(self.folder, folder, f"machine_{machine}.json"), encoding="utf-8") as file:
                hashes.append(json.load(file))
        return hashes

    def check_equal(self, machines):
        for one in machines[1:]:
            self.assertEqual(one, machines[0])

    def test_they_are_those_of_a_run_without_islands(self):
        for machines, wire, overlap in ((2, "fp32", 2), (2, "int8", 2), (3, "fp32", 2), (2, "int8", 0), (3, "fp32", 13)):
            with self.subTest(machines=machines, wire=wire, overlap=overlap), Hosts(machines) as hosts:
                name = f"{machines}{wire}{overlap}"
                without = self.train(hosts, "without" + name, overlap=overlap, wire=wire)
                islands = self.train(hosts, "islands" + name, "--islands", overlap=overlap, wire=wire)
                self.check_equal(islands)
                self.assertEqual({one["hash"] for one in islands}, {one["hash"] for one in without})
                self.assertEqual({one["rounds"] for one in islands}, {one["rounds"] for one in without})

    @thorough
    def test_three_machines_have_equal_ones_by_int8(self):
        with Hosts(3) as hosts:
            self.check_equal(self.train(hosts, "net", "--islands", wire="int8"))

    def test_a_run_that_ends_with_a_fragment_on_its_way_goes_on_with_the_same(self):
        with Hosts(2) as hosts:
            for wire, overlap, ends in (("fp32", 2, (24, 25, 26, 27)), ("int8", 2, (26, 40)), ("int8", 13, (28,))):
                undisturbed = self.train(hosts, f"{wire}{overlap}", "--islands", wire=wire, overlap=overlap)
                for ends_at in ends:
                    with self.subTest(wire=wire, overlap=overlap, ends_at=ends_at):
                        folder = f"{wire}{overlap}_{ends_at}"
                        self.train(hosts, folder, "--islands", wire=wire, overlap=overlap, ends_at=ends_at)
                        self.assertEqual(self.train(hosts, folder, "--islands", wire=wire, overlap=overlap), undisturbed)

    def test_other_fragments_or_another_overlap_end_the_run_on_all(self):
        for line, words in (("fragments", "20 $((2 + ${LOCKSTEP_ISLAND%%/*})) 2"), ("overlap_steps", "20 2 $((2 + ${LOCKSTEP_ISLAND%%/*}))")):
            with self.subTest(line), Hosts(2) as hosts:
                own = f"exec {BIN}/island_net {self.folder} 67 {words} fp32 0"
                output = self.ended(self.begin(*hosts.lockstep_run((1, 1), "--islands", "--run-dir", line, "--", "sh", "-c", own)), 44)
                self.assertRegex(output, f"machine [01] has `{line} [23]`, and machine [01] `{line} [23]`")


class FragmentsTest(IslandsTest):
    """Runs of island_rounds with fragments."""

    def begin_fragments(self, hosts, *options, overlap=OVERLAP, nan=(-1, 0), **more):
        return self.begin_islands(hosts, *options, nan=(*nan, FRAGMENTS, overlap), **more)

    def agents_of(self, hosts, host):
        agents = []
        for pid in processes_of(hosts, host):
            try:
                with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
                    if file.read().split("\0")[:2] == [LOCKSTEP, "agent"]:
                        agents.append(pid)
            except OSError:
                continue  # it has ended meanwhile
        self.assertTrue(agents)
        return agents

    def clear(self):
        for path in glob.glob(os.path.join(self.folder, "run*")) + glob.glob(os.path.join(self.folder, "machine*")):
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)

    def check_fragments(self, machines, overlap=OVERLAP, lost=(), restarts=0):
        """Each sample counted once in each fragment, on the machine that has finished last; what is learned between a turn and its end does not count."""
        last = max((self.figures(machine) for machine in machines), key=lambda figures: figures["rounds"])
        for fragment, counts_of_machines in enumerate(last["fragments"]):
            rounds = [one["took_part"] for one in self.rounds() if fragment_of(one) == fragment]
            for machine, counts in enumerate(counts_of_machines):
                own = [took_part for took_part in rounds if machine in took_part]
                allowed = {f"{1 / len(took_part):.4f}" for took_part in own} | {"0.0000"}
                what = f"samples of machine {machine} in fragment {fragment}: {counts}"
                self.assertLessEqual(set(counts), allowed, what)
                if machine not in lost:
                    self.assertLessEqual(counts.get("0.0000", 0), overlap * (len(own) + restarts), what)


class Samples(FragmentsTest):
    def test_a_killed_machine_is_left_out_and_comes_back(self):
        for overlap, ranks in ((0, 1), (OVERLAP, 1), (13, 1), (OVERLAP, 2)):
            with self.subTest(overlap=overlap, ranks=ranks), Hosts(3) as hosts:
                process = self.begin_fragments(hosts, "--elastic", "2", overlap=overlap, ranks=ranks, pause=20)
                self.await_round(process, 9)
                time.sleep(0.05)  # with a fragment on its way
                self.kill_machine(hosts, 2)
                killed = len(self.rounds())
                output = self.ended(process, 0, seconds=90)
                after = self.rounds()[killed:]
                self.assertTrue([one for one in after if one["took_part"] == [0, 1]], output)
                self.assertTrue([one for one in after if one["took_part"] == [0, 1, 2]], output)
                self.check_wait([one for one in after if 0 in one["took_part"]][:-FRAGMENTS])
                self.assertNotIn("differs", output)
                self.assertEqual(self.figures(0)["hash"], self.figures(1)["hash"])
                self.check_fragments([0, 1, 2], overlap, restarts=1)
                self.nothing_left()
                self.clear()

    def test_a_machine_that_has_lost_its_checkpoints_repeats_its_steps(self):
        with Hosts(3) as hosts:
            process = self.begin_fragments(hosts, "--elastic", "1", pause=15, steps=200)
            self.await_round(process, 9)
            self.kill_machine(hosts, 1)
            shutil.rmtree(os.path.join(self.folder, "machine_1"))
            output = self.ended(process, 0, seconds=90)
        self.assertRegex(output, r"machine 1 comes back at step 1, and its work up to step \d+ is in the outer copy")
        self.assertNotIn("differs", output)
        self.check_fragments([0, 1, 2], restarts=1)

    @thorough
    def test_a_machine_that_is_silent_for_a_second_keeps_what_it_has_learned(self):
        for overlap in (OVERLAP, 13):
            with self.subTest(overlap=overlap), Hosts(2) as hosts:
                process = self.begin_fragments(hosts, "--elastic", "1", overlap=overlap, pause=15, steps=200)
                self.await_round(process, 9)
                for what, seconds in ((signal.SIGSTOP, 1.2), (signal.SIGCONT, 0)):
                    for pid in self.agents_of(hosts, 1):
                        os.kill(pid, what)
                    time.sleep(seconds)
                output = self.ended(process, 0, seconds=90)
                self.assertIn("machine 1 is left out: it was silent for 800 ms", output)
                self.assertNotIn("is started again", output)
                self.assertNotIn("differs", output)
                self.check_fragments([0, 1], overlap, restarts=1)
                self.clear()

    @thorough
    def test_a_slow_machine_that_is_late_contributes_later(self):
        with Hosts(3) as hosts:
            process = self.begin_fragments(hosts, "--elastic", "2", "--round-deadline", "0.3", steps=300)
            self.await_round(process, 6)
            slow = self.programs_of(hosts, 1)
            for _ in range(4):
                for what, seconds in ((signal.SIGSTOP, 0.6), (signal.SIGCONT, 0.2)):
                    for pid in slow:
                        os.kill(pid, what)
                    time.sleep(seconds)
            output = self.ended(process, 0, seconds=90)
        late = [one["round"] for one in self.rounds() if one["left_out"].get("1") == "it is late"]
        self.assertTrue(late, output)
        self.assertTrue([one for one in self.rounds() if 1 in one["took_part"] and one["round"] > late[-1]], output)
        self.assertNotIn("differs", output)
        self.check_fragments([0, 1, 2])

    @thorough
    def test_a_machine_that_is_not_finite_is_left_out_by_name(self):
        with Hosts(2) as hosts:
            output = self.ended(self.begin_fragments(hosts, nan=(1, 50)), 0)
        left_out = [one for one in self.rounds() if one["took_part"] == [0]]
        self.assertEqual([one["left_out"] for one in left_out], [{"1": "its parameters were not finite"}])
        self.assertIn("machine 1 was left out of the round of step 50: its parameters were not finite", output)
        self.assertEqual(self.figures(0)["hash"], self.figures(1)["hash"])
        self.check_fragments([0, 1], lost=[1])

    @thorough
    def test_sigterm_and_another_start(self):
        with Hosts(2) as hosts:
            process = self.begin_fragments(hosts, steps=200)
            self.await_round(process, 7)
            os.kill(self.launcher_of(hosts), signal.SIGTERM)
            self.ended(process, 60)
            run("mv", os.path.join(self.folder, "run"), os.path.join(self.folder, "before"))
            output = self.ended(self.begin_fragments(hosts, steps=200), 0)
        self.assertNotIn("differs", output)
        self.assertEqual(self.figures(0)["hash"], self.figures(1)["hash"])
        self.assertEqual([one for one in self.rounds() if one["took_part"] != [0, 1]], [])
        self.check_fragments([0, 1], restarts=12)


@thorough
class Joining(FragmentsTest, JoinTest):
    def test_a_new_machine_takes_part(self):
        with Hosts(3) as hosts:
            process = self.begin_open(hosts, 2, 3, nan=(-1, 0, FRAGMENTS, OVERLAP), pause=20)
            self.await_round(process, 6)
            joined = len(self.rounds())
            third = self.join(hosts, 2, "third")
            self.await_machine(process, 2, after=joined)
            output = self.ended(process, 0, seconds=90)
            self.ended(third, 0)
        self.assertNotIn("differs", output)
        self.check_fragments([0, 1, 2], restarts=1)
        self.nothing_left()


if __name__ == "__main__":
    main()
