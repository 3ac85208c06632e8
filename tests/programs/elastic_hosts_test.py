"""Elastic runs with checkpoints in memory over machines, which are network namespaces: whatever is lost, the run goes on with fewer ranks and ends with the bits of one rank alone."""

import json
import os
import re
import shutil
import signal
import time

from hosts_test import ADDRESSES, Hosts, OneCommandTest, kill_if_there, processes_of
from lost_hosts_test import agents_of
from support import BIN, LOCKSTEP, TRAIN, main, marked_processes, write_text

RENDEZVOUS = ADDRESSES[0] + ":29517"  # in a network of its own


class ElasticHosts(OneCommandTest):
    known = {}

    def training(self, name, sharded):
        return ["--log-dir", name, "--virtual-ranks", 4, "--", TRAIN, "--data", self.data, "--batch-size", 16, "--epochs", 12,
                "--memory-every", 1, "--optimizer", "adamw", "--sharded", sharded, "--json", name + ".json"]

    def start_on(self, hosts, name, sharded, restarts, by_hand=False):
        elastic = ("--elastic", "2:4", "--max-restarts", restarts)
        if not by_hand:
            return [self.begin(*hosts.lockstep_run((2, 2), *elastic, *self.training(name, sharded)))]
        key = os.path.join(self.folder, "key")
        with open(os.open(key, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            file.write(os.urandom(32).hex() + "\n")
        return [self.begin(*hosts.on(node, LOCKSTEP, "run", "--nnodes", 2, "--node-rank", node, "--rendezvous", RENDEZVOUS, "--key-file",
                                     key, "-n", 2, *elastic, *self.training(name, sharded))) for node in (0, 1)]

    def bits(self, name):
        figures = self.read(name)
        return figures["parameters_hash"], figures["train_loss"]

    def bits_of_one_rank(self, sharded):
        if sharded not in self.known:
            self.ended(self.begin(LOCKSTEP, "run", "-n", 1, *self.training("alone", sharded)), 0)
            self.known[sharded] = self.bits("alone")
        return self.known[sharded]

    def starts(self, name):
        with open(os.path.join(self.folder, name, "starts.jsonl")) as file:
            return [json.loads(line) for line in file]

    def rank(self, number):
        return next((pid for pid, its in marked_processes(self.mark).items() if its == str(number)), None)

    def wait_for_training(self, process, name, ranks, after):
        """Until all of this number of ranks, started anew, have made steps after one that has been made."""
        metrics = os.path.join(self.folder, name, "metrics_rank0.jsonl")
        deadline = time.monotonic() + 60
        while True:
            self.assertIsNone(process.poll())
            self.assertLess(time.monotonic(), deadline, name)
            steps = [0]
            if os.path.exists(metrics):
                with open(metrics) as file:
                    steps += [int(found[1]) for line in file if (found := re.search(r'"step":(\d+),', line))]
            if steps[-1] >= after + 4 and len(set(marked_processes(self.mark).values()) - {None}) == ranks:
                time.sleep(0.3)  # the coordinator hears ten times a second what the ranks do
                return steps[-1]
            time.sleep(0.02)

    def judge(self, name, process, expected, ranks):
        output = self.ended(process, 0, 120)
        self.assertEqual(self.bits(name), expected, output)
        starts = self.starts(name)
        self.assertEqual([start["ranks"] for start in starts], ranks, output)
        for before, after in zip(starts, starts[1:]):
            self.assertGreater(after["first_step"], before["first_step"], "the state in memory was lost")
            self.assertLessEqual(before["first_step"] + before["steps"] - after["first_step"], 1, "more than one step was lost")
        self.nothing_left(8)
        return output

    def goes_on_without(self, lose, sharded="none", by_hand=False, its_end=-signal.SIGKILL):
        """All ranks but the two of the second machine end with the bits of one rank; what was started on it by hand ends with `its_end`."""
        expected = self.bits_of_one_rank(sharded)
        with Hosts() as hosts:
            processes = self.start_on(hosts, "lost", sharded, 1, by_hand)
            self.wait_for_training(processes[0], "lost", 4, 0)
            lose(hosts)
            output = self.judge("lost", processes[0], expected, [4, 2])
            self.assertIn("a machine is gone; its 2 ranks are left out", output)
            self.assertIn("was lost with its machine", output)
            for lost in processes[1:]:
                self.ended(lost, its_end)
            self.no_process_on(hosts)

    def no_process_on(self, hosts, seconds=2):
        """Not even one without a mark: a process that is about to end shows no environment any more."""
        deadline = time.monotonic() + seconds
        while (left := [pid for host in (0, 1) for pid in processes_of(hosts, host)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual(left, [])

    @staticmethod
    def lose_machine(hosts):
        for pid in processes_of(hosts, 1):
            kill_if_there(pid)

    @staticmethod
    def lose_agent(hosts):
        os.kill(agents_of(hosts, 1)[0], signal.SIGKILL)

    def test_a_machine_is_lost(self):
        self.goes_on_without(self.lose_machine)

    @staticmethod
    def lose_link(hosts):
        hosts.cut(0, 1)

    def test_an_agent_is_killed(self):
        self.goes_on_without(self.lose_agent)

    def test_a_link_is_cut(self):
        """Either side lives, but only the coordinator's goes on."""
        self.goes_on_without(self.lose_link, by_hand=True, its_end=52)

    def test_the_machine_with_the_coordinator_is_lost(self):
        with Hosts() as hosts:
            first, second = self.start_on(hosts, "headless", "none", 1, by_hand=True)
            self.wait_for_training(first, "headless", 4, 0)
            lost = time.monotonic()
            for pid in processes_of(hosts, 0):
                kill_if_there(pid)
            output = self.ended(second, 52, 20)
            self.assertLess(time.monotonic() - lost, 6)
            self.assertIn(" has lost the coordinator: ", output)
            self.ended(first, -signal.SIGKILL)
            self.nothing_left(max(0.1, lost + 8.5 - time.monotonic()))
            self.no_process_on(hosts)

    def test_another_number_of_ranks_is_asked_for(self):
        expected = self.bits_of_one_rank("none")
        with Hosts() as hosts:
            process, = self.start_on(hosts, "resized", "none", 0)
            step = self.wait_for_training(process, "resized", 4, 0)
            for ranks in (2, 3):
                resized = self.begin(*hosts.on(0, LOCKSTEP, "resize", "resized", ranks))
                self.ended(resized, 0)
                step = self.wait_for_training(process, "resized", ranks, step)
            self.judge("resized", process, expected, [4, 2, 3])

    def test_a_rank_is_killed_while_it_saves(self):
        def end_of_ranks(name, *death):
            process = self.begin(*hosts.lockstep_run((2, 2), "--log-dir", name, "--elastic", "2:4", "--max-restarts", 1, "--",
                                                     os.path.join(BIN, "dies_and_goes_on"), name + "_checkpoints", 24, *death))
            output = self.ended(process, 0)
            logs = []
            for rank in range(4):
                with open(os.path.join(self.folder, name, f"rank_{rank}.log")) as file:
                    logs.append(file.read())
            ends = [re.findall(r"(?m)ends with .*$", log) for log in logs]
            self.assertTrue(all(len(end) == 1 for end in ends), output)
            return ends, [[int(step) for step in re.findall(r"begins at (\d+)", log)] for log in logs]
        with Hosts() as hosts:
            expected, starts = end_of_ranks("straight")
            self.assertEqual(starts, [[0]] * 4)
            for rank in (1, 3):
                self.assertEqual(end_of_ranks(f"killed_{rank}", 18, rank, "save"), (expected, [[0, 17]] * 4))

    def test_an_agent_is_killed_under_a_sharded_optimizer(self):
        self.goes_on_without(self.lose_agent, "replicated")

    def test_a_machine_is_lost_under_a_sharded_optimizer_with_shared_parameters(self):
        self.goes_on_without(self.lose_machine, "shared")

    def test_a_machine_is_lost_under_a_fully_sharded_model(self):
        """Which is saved on disk alone, in slices: half the ranks, on one machine, go on as half the ranks that resume there do."""
        write_text(os.path.join(self.folder, "text"), 6000)

        def training(name, states):
            return ["--log-dir", name, "--", os.path.join(BIN, "gpt_text"), "--fully-sharded", "--text", "text", "--generate", 1, "--epochs", 8,
                    "--width", 32, "--heads", 2, "--layers", 3, "--block-length", 32, "--folder", states, "--json", name + ".json"]
        states = os.path.join(self.folder, "states")
        with Hosts() as hosts:
            process = self.begin(*hosts.lockstep_run((2, 2), "--elastic", "2:4", "--max-restarts", 1, *training("whole", "states")))
            deadline = time.monotonic() + 60
            while not os.path.isdir(states) or len(os.listdir(states)) < 3:
                self.assertIsNone(process.poll())
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.02)
            self.lose_machine(hosts)
            shutil.copytree(states, os.path.join(self.folder, "copied"))
            output = self.ended(process, 0, 120)
            self.assertIn("a machine is gone; its 2 ranks are left out", output)
            self.assertEqual([start["ranks"] for start in self.starts("whole")], [4, 2], output)
            self.no_process_on(hosts)
        self.ended(self.begin(LOCKSTEP, "run", "-n", 2, *training("half", "copied")), 0)
        whole, half = self.read("whole"), self.read("half")
        self.assertEqual((whole["steps"], whole["parameters_hash"]), (half["steps"], half["parameters_hash"]))

    def test_a_machine_that_was_started_by_hand_is_lost(self):
        self.goes_on_without(self.lose_machine, by_hand=True)

    def test_a_rank_that_is_killed_twice_costs_its_machine_a_place(self):
        expected = self.bits_of_one_rank("none")
        with Hosts() as hosts:
            process, = self.start_on(hosts, "twice", "none", 2)
            step = 0
            for _ in range(2):
                step = self.wait_for_training(process, "twice", 4, step)
                os.kill(self.rank(3), signal.SIGKILL)
            self.judge("twice", process, expected, [4, 4, 3])


if __name__ == "__main__":
    main()
