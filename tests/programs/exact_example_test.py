"""train_fashion_mnist with virtual ranks: the same parameters on any number of ranks, however the steps are shared out, through deaths and resizes."""

import json
import os
import shutil
import subprocess
import tempfile
import time
import unittest

from support import LOCKSTEP, TRAIN, environment, main, run, write_small_data

VIRTUAL_RANKS = 4


class ExactExample(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        write_small_data(self.folder)

    def command(self, name, *launcher, options=(), epochs=2):
        return [str(part) for part in (LOCKSTEP, "run", "--virtual-ranks", VIRTUAL_RANKS, "--log-dir", os.path.join(self.folder, name), *launcher, "--",
                                       TRAIN, "--data", self.folder, "--batch-size", 8, "--epochs", epochs, "--json", self.json(name), *options)]

    def json(self, name):
        return os.path.join(self.folder, name + ".json")

    def figures(self, name):
        with open(self.json(name)) as file:
            return json.load(file)

    def train(self, name, *launcher, options=()):
        run(*self.command(name, *launcher, options=options), timeout=120)
        figures = self.figures(name)
        return figures["parameters_hash"], figures["train_loss"]

    def test_any_number_of_ranks_gives_the_same_parameters_and_losses(self):
        for options in ((), ("--optimizer", "adamw", "--sharded", "replicated")):
            with self.subTest(options=options):
                found = [self.train(f"on{ranks}{len(options)}", "-n", ranks, options=options) for ranks in (1, 2, 3, 4)]
                self.assertEqual(found, found[:1] * 4)
        shared = self.train("shared", "-n", 2, options=("--optimizer", "adamw", "--sharded", "shared"))
        self.assertEqual(shared, found[0])
        self.assertEqual(self.train("gloo_sharded", "-n", 3, options=(*options, "--backend", "gloo")), found[0])

    def test_the_rate_counts_each_sample_once_however_the_virtual_ranks_are_shared_out(self):
        for ranks in (1, 3, 4):
            self.train(f"rate{ranks}", "-n", ranks)
            figures = self.figures(f"rate{ranks}")
            self.assertAlmostEqual(figures["samples_per_second"] * figures["seconds"], 2 * 512, places=3)

    def test_any_engine_gives_the_same_parameters_and_losses(self):
        straight = self.train("straight", "-n", 1)
        for ranks, engine in ((2, "gloo"), (3, "gloo"), (4, "hierarchical")):
            self.assertEqual(self.train(f"{engine}{ranks}", "-n", ranks, options=("--backend", engine)), straight, engine)

    def test_a_death_changes_no_bit(self):
        straight = self.train("straight", "-n", 1)
        for ranks in (2, 3):
            died = self.train(f"died{ranks}", "-n", ranks, "--max-restarts", 1, options=("--memory-every", 1, "--die-at", 7, "--die-rank", 1))
            self.assertEqual(died, straight)

    def test_a_resize_changes_no_parameter(self):
        began = time.monotonic()
        self.train("short", "-n", 1)
        seconds = (time.monotonic() - began) / 2
        epochs = max(6, min(40, round(20 / seconds)))  # enough for two resizes, on slow machines too
        run(*self.command("straight", "-n", 1, epochs=epochs), timeout=300)
        process = subprocess.Popen(self.command("resized", "-n", 2, "--elastic", "1:4", options=("--memory-every", 1), epochs=epochs),
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment())
        self.addCleanup(process.stdout.close)
        self.addCleanup(lambda: process.poll() is None and process.kill())
        for ranks in (3, 1):
            self.assertTrue(any(line.startswith("epoch ") for line in process.stdout), "the run ended before its resize")
            run(LOCKSTEP, "resize", os.path.join(self.folder, "resized"), ranks, timeout=60)
        for _ in process.stdout:
            pass
        self.assertEqual(process.wait(timeout=300), 0)
        self.assertEqual(self.figures("resized")["parameters_hash"], self.figures("straight")["parameters_hash"])
        self.assertEqual(self.figures("resized")["world_size"], 1)

    def test_ranks_with_different_numbers_of_threads_are_refused(self):
        for ranks in (2, 3):
            command = self.command(f"threads{ranks}", "-n", ranks)
            at = command.index("--", 2) + 1
            done = run(*command[:at], "sh", "-c", 'OMP_NUM_THREADS=$((1 + RANK % 2)) exec "$@"', "sh", *command[at:], check=False, timeout=60)
            self.assertEqual(done.returncode, 40, done.stderr)
            self.assertRegex(done.stderr, r"4 virtual ranks and 1 thread on ranks? 0.*, and 4 virtual ranks and 2 threads on rank 1;")


if __name__ == "__main__":
    main()
