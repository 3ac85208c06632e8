"""SIGKILL at any instant of the first second of a start, of a restart and of a resize, of a training that saves to memory alone: as long as there are
restarts left, the run ends as if nothing had happened."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from support import BIN, LOCKSTEP, environment, main, marked_processes, run

RANK = os.path.join(BIN, "elastic_rank")
STEPS = 60
ROUNDS = 200 if os.environ.get("LOCKSTEP_NIGHTLY") else 24  # two kills in each


class FirstSecond(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.mark = f"LOCKSTEP_TEST_MARK={self.folder}"
        self.environment = environment(LOCKSTEP_TEST_MARK=self.folder)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def command(self, name, *options):
        return [LOCKSTEP, "run", "--run-dir", self.path(name), *map(str, options), "--", RANK, "world=" + self.path(name + ".world"), f"steps={STEPS}",
                "checkpoint=" + self.path(name + ".state"), "result=" + self.path(name + ".result"), "memory=1", "disk_every=1000000"]

    def result(self, name):
        with open(self.path(name + ".result")) as file:
            return file.read()

    def ranks(self):
        return [pid for pid, rank in marked_processes(self.mark).items() if rank is not None]

    def kill_one(self, process, draw, after):
        """A rank, so long after now; whether there was one. The time is often next to none, and never above a second."""
        wait = draw.choice((draw.uniform(0, 0.03), draw.uniform(0, 0.3), draw.uniform(0, 1)))
        time.sleep(wait)
        ranks = self.ranks()
        if process.poll() is not None or not ranks:
            return False
        try:
            os.kill(draw.choice(ranks), signal.SIGKILL)
        except ProcessLookupError:
            return False
        after.append(f"killed after {wait:.3f} s")
        return True

    def resize(self, name, process, ranks):
        while process.poll() is None:
            done = subprocess.run([LOCKSTEP, "resize", self.path(name), str(ranks), "--timeout", "20"], capture_output=True, text=True, env=environment(), timeout=120)
            if done.returncode == 0 or "has ended before" in done.stderr:
                return
            time.sleep(0.01)  # it has no record before its ranks are started

    def disturb(self, name, draw, options):
        """A training whose ranks are killed in the first second of its start, and after a resize or during the restart. Returns the kills."""
        ranks = draw.randint(1, 4)
        done = [f"{ranks} ranks"]
        with open(self.path(name + ".err"), "w+") as errors:
            process = subprocess.Popen(self.command(name, "-n", ranks, *options), stdout=subprocess.DEVNULL, stderr=errors, env=self.environment)
            self.addCleanup(lambda: process.poll() is None and process.kill())
            kills = int(self.kill_one(process, draw, done))
            if draw.random() < 0.7:
                ranks = draw.randint(1, 4)
                done.append(f"resized to {ranks}")
                self.resize(name, process, ranks)
            kills += self.kill_one(process, draw, done)
            code = process.wait(timeout=120)
            errors.seek(0)
            output = errors.read()
        self.assertEqual(code, 0, f"{done}\n{output}")
        self.assertEqual(self.result(name), self.result("straight"), done)
        self.assertEqual(marked_processes(self.mark), {}, done)
        return kills

    def test_each_kill_is_one_restart_whenever_it_comes(self):
        run(*self.command("straight", "-n", 1))
        seed = int(os.environ.get("LOCKSTEP_FUZZ_SEED", time.time_ns() % 1_000_000))
        print("seed", seed)
        kills = 0
        for number in range(ROUNDS):
            with self.subTest(seed=seed, number=number):
                # As many restarts as there are kills, and at the most ranks that --elastic allows and at the fewest.
                elastic = ("1:4", "1:4", "4:4")[number % 3]
                draw = random.Random(f"{seed} {number}")
                if elastic == "4:4":
                    kills += self.disturb_fixed(f"run{number}", draw)
                else:
                    kills += self.disturb(f"run{number}", draw, ("--elastic", elastic, "--max-restarts", 2))
        # Two are drawn for each round; a fast machine has ended some trainings before they come. This only sees to it that
        # most rounds had one: what each kill leads to is compared above.
        self.assertGreater(kills, ROUNDS // 2)

    def disturb_fixed(self, name, draw):
        """At the minimum of --elastic no place can be left out."""
        done = []
        with open(self.path(name + ".err"), "w+") as errors:
            process = subprocess.Popen(self.command(name, "-n", 4, "--elastic", "4:4", "--max-restarts", 2), stdout=subprocess.DEVNULL, stderr=errors,
                                       env=self.environment)
            self.addCleanup(lambda: process.poll() is None and process.kill())
            kills = sum(self.kill_one(process, draw, done) for _ in range(2))
            code = process.wait(timeout=120)
            errors.seek(0)
            self.assertEqual(code, 0, f"{done}\n{errors.read()}")
        self.assertEqual(self.result(name), self.result("straight"), done)
        return kills

    def test_the_block_of_a_start_that_has_not_read_its_state_names_it(self):
        """Its ranks are killed as soon as they are there, long before they know of a checkpoint."""
        program = os.path.join(BIN, "dies_and_goes_on")
        with open(self.path("early.err"), "w+") as errors:
            process = subprocess.Popen([LOCKSTEP, "run", "-n", "2", "--max-restarts", "3", "--run-dir", self.path("early"), "--", program, self.path("early_checkpoints"), "3000"],
                                       stdout=subprocess.PIPE, stderr=errors, text=True, env=self.environment)
            self.addCleanup(process.stdout.close)
            self.addCleanup(lambda: process.poll() is None and process.kill())
            next(line for line in process.stdout if line.startswith("step 8 "))
            before = self.ranks()
            os.kill(before[-1], signal.SIGKILL)
            for _ in range(2):
                deadline = time.monotonic() + 60
                while not (new := [pid for pid in self.ranks() if pid not in before]):
                    self.assertLess(time.monotonic(), deadline)
                os.kill(new[-1], signal.SIGKILL)
                before += self.ranks() + new
            begins = int(next(line for line in process.stdout if line.startswith("begins at ")).split()[2])
            process.kill()
            process.wait(timeout=60)
            errors.seek(0)
            output = errors.read()
        kept = [int(step) for step in re.findall(r"kept      step (\d+) in the launcher's memory", output)]
        self.assertEqual(len(kept), 3, output)
        self.assertGreaterEqual(kept[0], 7)
        self.assertEqual(kept, [begins] * 3, output)

    def test_the_block_says_where_the_state_is_when_the_budget_is_used_up(self):
        """And the next start goes on from it."""
        program = os.path.join(BIN, "dies_and_goes_on")
        for ranks in (2, 3):
            name = f"last{ranks}"
            checkpoints = self.path(name + "_checkpoints")
            command = [LOCKSTEP, "run", "-n", ranks, "--run-dir", self.path(name), "--"]
            died = run(*command, program, checkpoints, 9, 6, 1, "forward", check=False, env=self.environment)
            self.assertEqual(died.returncode, 41, died.stderr)
            self.assertRegex(died.stderr, r"kept      step 5 in \S+, written from the launcher's memory now")
            with open(self.path(name, "report.json")) as file:
                kept = json.load(file)["state_kept"]
            self.assertEqual((kept["step"], kept["written_from_memory"]), (5, True))
            again = run(*command, program, checkpoints, 9, env=self.environment)
            self.assertIn("begins at 5 ", again.stdout)
            straight = run(*command[:-2], self.path(name + "_straight"), "--", program, checkpoints + "_straight", 9, env=self.environment)
            self.assertEqual(again.stdout.split("ends with ")[1], straight.stdout.split("ends with ")[1])


if __name__ == "__main__":
    main()
