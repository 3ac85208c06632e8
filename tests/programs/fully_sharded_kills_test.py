"""SIGKILL at any instant of a fully sharded training, and of a pipeline, on two machines, which two names make of one: the run goes on from its newest checkpoint, and
ends with the bits of the undisturbed one."""

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from support import BIN, LOCKSTEP, environment, main, marked_processes

KILLS = 50 if os.environ.get("LOCKSTEP_NIGHTLY") else 15


class Kills:
    """Of the program whose arguments are in PROGRAM."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.mark = f"LOCKSTEP_TEST_MARK={self.folder}"
        with open("/usr/share/common-licenses/GPL-3", "rb") as whole, open(self.path("text"), "wb") as part:
            part.write(whole.read(6000))

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def start(self, name):
        command = [LOCKSTEP, "run", "-n", "4", "--max-restarts", "3", "--run-dir", self.path(name), "--", "sh", "-c",
                   'export LOCKSTEP_MACHINE=m$((RANK / 2)); exec "$@"', "sh", os.path.join(BIN, self.PROGRAM[0]), *self.PROGRAM[1:], "--text", self.path("text"),
                   "--epochs", "4", "--width", "32", "--heads", "2", "--layers", "3", "--block-length", "32", "--folder",
                   self.path(name + ".states"), "--json", self.path(name + ".json")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                   env=environment(OMP_NUM_THREADS="1", LOCKSTEP_TEST_MARK=self.folder))
        self.addCleanup(lambda: process.poll() is None and process.kill())
        return process

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
        for number in range(KILLS):
            name = f"kill{number}"
            process = self.start(name)
            wait = draw.uniform(0, length)
            time.sleep(wait)
            ranks = [pid for pid, rank in marked_processes(self.mark).items() if rank is not None]
            if process.poll() is None and ranks:
                try:
                    os.kill(draw.choice(ranks), signal.SIGKILL)
                    killed += 1
                except ProcessLookupError:
                    pass
            _, errors = process.communicate(timeout=300)
            self.assertEqual(process.returncode, 0, f"killed after {wait:.3f} s\n{errors}")
            self.assertEqual(self.figures(name), expected, f"killed after {wait:.3f} s\n{errors}")
            self.assertEqual(marked_processes(self.mark), {})
            shutil.rmtree(self.path(name + ".states"))
        print(killed, "kills", flush=True)
        self.assertGreater(killed, KILLS // 2)


class FullyShardedKills(Kills, unittest.TestCase):
    PROGRAM = ("gpt_text", "--fully-sharded", "--generate", "1")


class PipelineKills(Kills, unittest.TestCase):
    PROGRAM = ("pipeline_text", "--stages", "2", "--batch-size", "16")


if __name__ == "__main__":
    main()
