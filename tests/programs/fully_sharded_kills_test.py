"""SIGKILL at any instant of a fully sharded training, of a pipeline, and of machines that synchronise now and then, on two machines, which two names make of one: the run
goes on from its newest checkpoint, and ends with the bits of the undisturbed one. LOCKSTEP_TEST_KILLS=100 says how many of each kind."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
import unittest

from support import LOCKSTEP, TextTraining, main, marked_processes

NIGHTLY = bool(os.environ.get("LOCKSTEP_NIGHTLY"))


class Kills(TextTraining):
    """Of the program whose arguments are in PROGRAM."""

    KILLS = 50 if NIGHTLY else 15

    def launcher(self, name):
        return [LOCKSTEP, "run", "-n", "4", "--max-restarts", "3", "--run-dir", self.path(name), "--", "sh", "-c",
                'export LOCKSTEP_MACHINE=m$((RANK / 2)); exec "$@"', "sh"]

    def victims(self):
        return [pid for pid, rank in marked_processes(self.mark).items() if rank is not None]

    def check_starts(self, name):
        pass

    def start(self, name):
        return self.train(self.launcher(name), *self.PROGRAM, "--folder", self.path(name + ".states"), "--json", self.path(name + ".json"))

    def figures(self, name):
        with open(self.path(name + ".json")) as file:
            found = json.load(file)
        return found["steps"], found["parameters_hash"]

    def test_ends_with_the_undisturbed_bits(self):
        began = time.monotonic()
        process = self.start("straight")
        _, errors = process.communicate(timeout=300)
        self.assertEqual(process.returncode, 0, errors)
        length = time.monotonic() - began
        expected = self.figures("straight")
        seed = int(os.environ.get("LOCKSTEP_FUZZ_SEED", time.time_ns() % 1_000_000))
        print("seed", seed, "length", round(length, 1), flush=True)
        draw = random.Random(seed)
        killed = 0
        kills, number = int(os.environ.get("LOCKSTEP_TEST_KILLS", self.KILLS)), 0
        while killed < kills:
            self.assertLess(number, 4 * kills, f"only {killed} of the runs were killed")
            name = f"kill{number}"
            number += 1
            began = time.monotonic()
            process = self.start(name)
            wait = draw.uniform(0, length)
            try:
                _, errors = process.communicate(timeout=wait)
                length = min(length, time.monotonic() - began)  # the first run was slower
            except subprocess.TimeoutExpired:
                killed += self.kill_one(draw)
                _, errors = process.communicate(timeout=300)
            self.assertEqual(process.returncode, 0, f"killed after {wait:.3f} s\n{errors}")
            self.assertEqual(self.figures(name), expected, f"killed after {wait:.3f} s\n{errors}")
            self.assertEqual(marked_processes(self.mark), {})
            self.check_starts(name)
            shutil.rmtree(self.path(name + ".states"))
        print(killed, "kills in", number, "runs", flush=True)

    def kill_one(self, draw):
        """Whether there was one to kill: none has started yet, or all have ended."""
        try:
            os.kill(draw.choice(self.victims()), signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            return False
        return True


class FullyShardedKills(Kills, unittest.TestCase):
    PROGRAM = ("gpt_text", "--fully-sharded", "--generate", "1")


class PipelineKills(Kills, unittest.TestCase):
    PROGRAM = ("pipeline_text", "--stages", "2", "--batch-size", "16")


class InMemory(Kills):
    """Each step is saved to the launchers' memory, in slices. At most one step is made twice after a kill."""

    PROGRAM = ("gpt_text", "--fully-sharded", "--generate", "1", "--memory-every", "1")
    HOSTS = ""
    KILLS = 50 if NIGHTLY else 7  # of each kind
    MOST_LOST = 1  # steps

    def launcher(self, name):
        if not self.HOSTS:
            return super().launcher(name)
        return [LOCKSTEP, "run", "--hosts", self.HOSTS, "--launch-command", "env LOCKSTEP_MACHINE={host}", "--max-restarts", "3", "--run-dir", self.path(name), "--"]

    def victims(self):
        """The ranks, and the agents, with each of which a machine loses its memory."""
        found = super().victims()
        for pid in marked_processes(self.mark) if self.HOSTS else ():
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    if file.read().split(b"\0")[1:2] == [b"agent"]:
                        found.append(pid)
            except OSError:
                pass
        return found

    def check_starts(self, name):
        if not os.path.exists(self.path(name, "starts.jsonl")):
            return  # nothing was started again: it was too late, or a guard of an agent
        with open(self.path(name, "starts.jsonl")) as file:
            starts = [json.loads(line) for line in file]
        for before, after in zip(starts, starts[1:]):
            if before["steps"] > 0 and after["steps"] > 0:
                self.assertLessEqual(before["first_step"] + before["steps"] - after["first_step"], self.MOST_LOST, f"more steps were lost: {starts}")


class PipelineKillsInMemory(InMemory, unittest.TestCase):
    PROGRAM = ("pipeline_text", "--stages", "2", "--batch-size", "16", "--memory-every", "1")
    HOSTS = "a:2,b:2"


class FullyShardedKillsInMemory(InMemory, unittest.TestCase):
    pass


class FullyShardedKillsOfMachines(InMemory, unittest.TestCase):
    HOSTS = "a:2,b:2"


class FullyShardedKillsOfFourMachines(InMemory, unittest.TestCase):
    HOSTS = "a:1,b:1,c:1,d:1"


class DiLoCoKillsInMemory(InMemory, unittest.TestCase):
    """Of ranks; in most steps of the training a part of the model is on its way between the machines. A machine may have made a step while the other still
    saves the one before, which then counts for neither."""

    MOST_LOST = 2

    PROGRAM = ("gpt_text", "--sync-every", "6", "--fragments", "3", "--overlap", "2", "--wire", "int8", "--generate", "1", "--memory-every", "1")


class DiLoCoKillsOfMachines(DiLoCoKillsInMemory):
    HOSTS = "a:2,b:2"


if __name__ == "__main__":
    main()
