"""A fully sharded training whose state lies in slices in the launchers' memory: a run that gives up, and a machine that is lost for good."""

import json
import os
import re
import signal
import subprocess
import time
import unittest

from support import LOCKSTEP, TextTraining, environment, main, marked_processes


class FullyShardedMemory(TextTraining, unittest.TestCase):
    def start(self, run, states, *launcher):
        """A training that saves each epoch to disk, and each step to memory."""
        return self.train([LOCKSTEP, "run", *launcher, "--run-dir", self.path(run), "--"], "gpt_text", "--fully-sharded", "--memory-every", "1",
                          "--generate", "1", "--folder", self.path(states), "--json", self.path(run + ".json"))

    def end(self, process, code):
        errors = process.communicate(timeout=200)[1]
        self.assertEqual(process.returncode, code, errors)
        self.assertEqual(marked_processes(self.mark), {})
        return errors

    def hash(self, run):
        with open(self.path(run + ".json")) as file:
            return json.load(file)["parameters_hash"]

    def starts(self, run):
        with open(self.path(run, "starts.jsonl")) as file:
            return [json.loads(line) for line in file]

    def wait_for_step(self, run, step):
        """Until all ranks have passed it."""
        deadline = time.monotonic() + 100
        passed = []
        while not passed or min(passed) <= step:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
            said = subprocess.run([LOCKSTEP, "status", self.path(run)], capture_output=True, text=True, env=environment()).stdout
            passed = [int(found) for found in re.findall(r"(?m)^rank .*?  step (\d+)", said)]

    def kill_a_rank(self):
        os.kill(max(pid for pid, rank in marked_processes(self.mark).items() if rank is not None), signal.SIGKILL)

    @staticmethod
    def placed(machines):
        return ("--hosts", machines, "--launch-command", "env LOCKSTEP_MACHINE={host}") if ":" in machines else ("-n", machines)

    def give_up(self, machines):
        """What is said at the end of a run that gives up; the next one ends with the bits of an undisturbed one."""
        straight = self.start("straight" + machines, "straight_states" + machines, *self.placed(machines))
        self.end(straight, 0)
        process = self.start("first" + machines, "states" + machines, *self.placed(machines))
        with open(self.path("straight" + machines + ".json")) as file:
            half = json.load(file)["steps"] // 2
        self.wait_for_step("first" + machines, half + 2)  # the second epoch is on disk
        self.kill_a_rank()
        said = self.end(process, 41)
        self.end(self.start("next" + machines, "states" + machines, *self.placed(machines)), 0)
        self.assertEqual(self.hash("next" + machines), self.hash("straight" + machines))
        return said

    def test_a_run_that_gives_up_writes_the_state_to_disk(self):
        for machines in ("2", "a:2,b:2"):
            with self.subTest(machines=machines):
                said = self.give_up(machines)
                kept = re.search(r"step (\d+) in \S+, written from the launcher's memory now", said)
                self.assertTrue(kept, said)
                with open(self.path("straight" + machines + ".json")) as file:
                    self.assertGreater(int(kept[1]), json.load(file)["steps"] // 2, "the last epoch on disk is older")

    def test_where_no_machine_can_it_says_so(self):
        said = self.give_up("a:1,b:1,c:1,d:1")
        self.assertRegex(said, r"holds the slices of ranks \d, \d alone, of 4, and one machine writes a checkpoint. The next run resumes the newest checkpoint on disk")

    def test_a_machine_that_is_lost_for_good_costs_one_step(self):
        process = self.start("lost", "states", *self.placed("a:2,b:2"), "--elastic", "2:4", "--max-restarts", "1")
        self.wait_for_step("lost", 8)
        time.sleep(0.3)  # the coordinator hears ten times a second what the ranks do
        agents = []
        for pid in marked_processes(self.mark):
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().decode().split("\0")
            if words[1:2] == ["agent"] and words[words.index("--node") + 1] == "1":
                agents.append(pid)
        os.kill(min(agents), signal.SIGKILL)
        said = self.end(process, 0)
        self.assertIn("a machine is gone; its 2 ranks are left out", said)
        before, after = self.starts("lost")
        self.assertEqual((before["ranks"], after["ranks"]), (4, 2))
        self.assertGreater(after["first_step"], 0)
        self.assertLessEqual(before["first_step"] + before["steps"] - after["first_step"], 1, "more than one step was lost")


if __name__ == "__main__":
    main()
