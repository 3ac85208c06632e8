"""Checkpoints in the launcher's memory: a rank dies, all are started again, and the run ends with the bits of an undisturbed one."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from support import BIN, LOCKSTEP, TRAIN, environment, main, marked_processes, run, write_small_data

PROGRAM = os.path.join(BIN, "dies_and_goes_on")
STEPS = 25  # every tenth is saved to disk


class MemoryRun(unittest.TestCase):
    """What tests on one machine and on several share."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.environment = environment(LOCKSTEP_TEST_MARK=self.folder, OMP_NUM_THREADS="1")

    def train(self, name, ranks, *death, restarts=1, code=0, launcher=True):
        """The lines of each rank's log."""
        command = [LOCKSTEP, "run", "-n", str(ranks), "--max-restarts", str(restarts), "--log-dir", name, "--", PROGRAM]
        finished = run(*command, name + "_checkpoints", STEPS, *death, cwd=self.folder, env=self.environment, check=False, timeout=60)
        self.assertEqual(finished.returncode, code, finished.stderr)
        self.assertEqual(marked_processes(f"LOCKSTEP_TEST_MARK={self.folder}"), {})
        return [self.log(name, rank) for rank in range(ranks)]

    def log(self, name, rank):
        with open(os.path.join(self.folder, name, f"rank_{rank}.log")) as file:
            return [re.sub(r"^\S+Z ", "", line) for line in file.read().splitlines()]

    @staticmethod
    def numbers(lines, what):
        return [int(found[1]) for line in lines if (found := re.match(what + r" (\d+)", line))]

    @staticmethod
    def end(lines):
        return [line for line in lines if line.startswith("ends with ")]


class MemoryCheckpoint(MemoryRun):
    def goes_on(self, ranks):
        expected = [self.end(lines) for lines in self.train("straight", ranks)]
        for place, death in (("forward", 17), ("save", 18), ("all", 2), ("save", 2)):
            with self.subTest(ranks=ranks, place=place, step=death):
                logs = self.train(f"{place}{death}", ranks, death, ranks - 1, place)
                self.assertEqual([self.end(lines) for lines in logs], expected)
                begins = self.numbers(logs[0], "begins at")
                # One step more if another rank was stopped before it had saved the last one.
                self.assertIn(begins, ([0, death - 1], [0, max(0, death - 2)]))
                for lines in logs:
                    self.assertEqual(self.numbers(lines, "begins at"), begins)
                    done = self.numbers(lines, "step")
                    self.assertEqual(sorted(set(done)), list(range(1, STEPS + 1)))
                    self.assertLessEqual(len(done), STEPS + death - begins[1], "more steps were run twice than were lost")

    def test_two_ranks_end_with_the_same_bits_wherever_one_dies(self):
        self.goes_on(2)

    def test_three_ranks_end_with_the_same_bits_wherever_one_dies(self):
        self.goes_on(3)

    def test_when_the_launcher_dies_the_next_start_goes_on_from_disk(self):
        expected = [self.end(lines) for lines in self.train("straight", 2)]
        command = [LOCKSTEP, "run", "-n", "2", "--log-dir", "killed", "--", PROGRAM, "killed_checkpoints", STEPS, 15, 0, "hold"]
        process = subprocess.Popen([str(part) for part in command], cwd=self.folder, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(lambda: process.poll() is None and process.kill())
        manifest = os.path.join(self.folder, "killed_checkpoints", "step-000000000010.0.json")
        deadline = time.monotonic() + 60
        while not os.path.exists(manifest) or "step 14 " not in "\n".join(self.log("killed", 0)):
            self.assertLess(time.monotonic(), deadline, "there is no checkpoint")
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        deadline = time.monotonic() + 5
        while marked_processes(f"LOCKSTEP_TEST_MARK={self.folder}"):
            self.assertLess(time.monotonic(), deadline, "ranks live on")
            time.sleep(0.02)
        logs = self.train("killed", 2)
        self.assertEqual([self.end(lines)[-1:] for lines in logs], expected)
        self.assertEqual(self.numbers(logs[0], "begins at")[-1], 10)

    def test_the_example_ends_with_the_same_parameters(self):
        write_small_data(self.folder)
        hashes = {}
        for name, *death in (("straight",), ("middle", "--die-at", 5, "--die-rank", 1), ("last_of_an_epoch", "--die-at", 8), ("second_epoch", "--die-at", 11)):
            command = [LOCKSTEP, "run", "-n", "2", "--max-restarts", "1", "--log-dir", name, "--", TRAIN, "--data", self.folder, "--batch-size", "32"]
            finished = run(*command, "--epochs", "2", "--memory-every", "1", "--json", name + ".json", *death, cwd=self.folder, env=self.environment)
            self.assertEqual("restart 1 of 1" in finished.stderr, bool(death))
            with open(os.path.join(self.folder, name + ".json")) as file:
                figures = json.load(file)
            self.assertEqual(len(figures["train_loss"]), 2)
            hashes[name] = figures["parameters_hash"]
        self.assertEqual(set(hashes.values()), {hashes["straight"]}, hashes)

    def test_without_restarts_a_death_ends_the_run(self):
        self.train("once", 2, 5, 1, "forward", restarts=0, code=41)

    def test_a_program_that_starts_its_own_ranks_has_the_memory_too(self):
        finished = run(PROGRAM, "own", STEPS, "--ranks", "2", cwd=self.folder, env=self.environment)
        self.assertIn("ends with ", finished.stdout)

    def test_alone_it_is_an_error_that_says_what_to_do(self):
        finished = run(PROGRAM, "alone", STEPS, cwd=self.folder, env=self.environment, check=False)
        self.assertNotEqual(finished.returncode, 0)
        self.assertIn("no launcher holds memory for the states of this rank; start the program by `lockstep run`", finished.stderr)


class OverMachines(MemoryRun):
    """Several agents of this machine, each with another LOCKSTEP_MACHINE, hold memory of their own."""

    def command(self, name, hosts, *options):
        return [LOCKSTEP, "run", "--hosts", hosts, "--launch-command", "env LOCKSTEP_MACHINE={host}", "--log-dir", name, *options, "--", PROGRAM,
                name + "_checkpoints", str(STEPS)]

    def train_on(self, name, hosts, *death, options=("--max-restarts", "1")):
        finished = run(*self.command(name, hosts, *options), *death, cwd=self.folder, env=self.environment, check=False, timeout=60)
        self.assertEqual(finished.returncode, 0, finished.stderr)
        self.assertEqual(marked_processes(f"LOCKSTEP_TEST_MARK={self.folder}"), {})
        return [self.log(name, rank) for rank in range(sum(int(host.split(":")[1]) for host in hosts.split(",")))]

    def agent(self, node):
        """The agent of a machine, before its guard, which it forks."""
        found = []
        for pid in marked_processes(f"LOCKSTEP_TEST_MARK={self.folder}"):
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().decode().split("\0")
            if words[1:2] == ["agent"] and words[words.index("--node") + 1] == str(node):
                found.append(pid)
        return min(found)

    def lose_machine(self, name, hosts, node, step, rank, *options):
        """The standard error of a run in which a rank waits in a step until a machine's agent is killed."""
        process = subprocess.Popen([*self.command(name, hosts, *options), str(step), str(rank), "hold"], cwd=self.folder, env=self.environment,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.addCleanup(lambda: process.poll() is None and process.kill())
        deadline = time.monotonic() + 60
        log = os.path.join(self.folder, name, f"rank_{rank}.log")
        while not os.path.exists(log) or "dies " not in "\n".join(self.log(name, rank)):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
        time.sleep(0.3)  # the coordinator hears ten times a second what the ranks do
        os.kill(self.agent(node), signal.SIGKILL)
        said = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 0, said)
        return said

    def test_ranks_die_anywhere(self):
        for hosts, deaths in (("a:2,b:2", [("save", 18, 1)]), ("a:1,b:2", [("forward", 17, 2), ("save", 2, 0)])):
            expected = [self.end(lines) for lines in self.train_on("straight_" + hosts, hosts)]
            self.assertTrue(all(expected))
            for place, step, rank in deaths:
                with self.subTest(hosts=hosts, place=place):
                    logs = self.train_on(f"{place}{step}_{hosts}", hosts, step, rank, place)
                    self.assertEqual([self.end(lines) for lines in logs], expected)
                    for lines in logs:
                        self.assertEqual(self.numbers(lines, "begins at"), [0, step - 1])
                        self.assertLessEqual(len(self.numbers(lines, "step")), STEPS + 1, "more than one step was run twice")

    def test_a_machine_that_is_started_again_is_sent_the_state(self):
        expected = [self.end(lines) for lines in self.train_on("straight", "a:1,b:2")]
        for node, says in ((1, "the machines of ranks 1 do not have the checkpoint in memory of step 16; that of rank 0 has sent it to them"),
                           (0, "the machines of ranks 0 do not have the checkpoint in memory of step 16; that of rank 1 has sent it to them")):
            name = f"lost_{node}"
            self.lose_machine(name, "a:1,b:2", node, 17, 2, "--max-restarts", "1")
            logs = [self.log(name, rank) for rank in range(3)]
            self.assertEqual([self.end(lines) for lines in logs], expected)
            for lines in logs:
                self.assertEqual(self.numbers(lines, "begins at"), [0, 16])
            self.assertIn(says, "\n".join(logs[0]))

    def test_the_ranks_that_are_left_have_the_states_of_all(self):
        said = self.lose_machine("left", "a:2,b:2", 0, 17, 2, "--max-restarts", "1", "--elastic", "2:4", "--virtual-ranks", "4")
        self.assertIn("restart 1 of 1 with 2 ranks: a machine is gone; its 2 ranks are left out", said)
        logs = [self.log("left", rank) for rank in range(2)]
        for lines in logs:
            self.assertEqual(self.numbers(lines, "begins at"), [0, 16])
            self.assertEqual(len(self.end(lines)), 1)

    def train_exactly(self, name, *launcher):
        command = [LOCKSTEP, "run", "--log-dir", name, "--virtual-ranks", "4", *launcher, "--", TRAIN, "--data", self.folder, "--batch-size", "16", "--epochs", "12",
                   "--memory-every", "1", "--json", name + ".json"]
        process = subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.addCleanup(lambda: process.poll() is None and process.kill())
        return process

    def figures_of(self, name, process):
        said = process.communicate(timeout=100)[1]
        self.assertEqual(process.returncode, 0, said)
        with open(os.path.join(self.folder, name + ".json")) as file:
            figures = json.load(file)
        return said, (figures["parameters_hash"], figures["train_loss"])

    @staticmethod
    def text(path):
        with open(path) as file:
            return file.read()

    def wait_for_training(self, name):
        deadline = time.monotonic() + 60
        metrics = os.path.join(self.folder, name, "metrics_rank0.jsonl")
        while not os.path.exists(metrics) or '"step":6,' not in self.text(metrics):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
        time.sleep(0.3)  # the coordinator hears ten times a second what the ranks do

    def test_an_elastic_run_goes_on_without_a_machine(self):
        write_small_data(self.folder)
        expected = self.figures_of("alone", self.train_exactly("alone", "-n", "1"))[1]
        for node in (1, 0):
            name = f"without_{node}"
            process = self.train_exactly(name, "--hosts", "a:2,b:2", "--launch-command", "env LOCKSTEP_MACHINE={host}", "--max-restarts", "1", "--elastic", "2:4")
            self.wait_for_training(name)
            os.kill(self.agent(node), signal.SIGKILL)
            said, figures = self.figures_of(name, process)
            self.assertEqual(figures, expected)
            self.assertIn("restart 1 of 1 with 2 ranks: a machine is gone; its 2 ranks are left out", said)
            self.assertIn("was lost with its machine", said)
            with open(os.path.join(self.folder, name, "starts.jsonl")) as file:
                starts = [json.loads(line) for line in file]
            self.assertEqual([start["ranks"] for start in starts], [4, 2])
            self.assertGreater(starts[1]["first_step"], 0)
            self.assertLessEqual(starts[0]["first_step"] + starts[0]["steps"] - starts[1]["first_step"], 1, "more than one step was lost")


if __name__ == "__main__":
    main()
