"""Trainings that are killed resume from their checkpoint as if nothing had happened, whatever the instant of the kill."""

import json
import os
import random
import signal
import subprocess
import time

from support import LOCKSTEP, TRAIN, ProgramTest, environment, main, marked_processes, read_safetensors, run, write_small_data

EPOCHS = 4


class Resume(ProgramTest):
    def setUp(self):
        super().setUp()
        self.mark = f"LOCKSTEP_TEST_MARK={self.folder}"
        self.run_dir = os.path.join(self.folder, "run")
        self.checkpoint = os.path.join(self.run_dir, "checkpoint.safetensors")

    def launched(self, ranks, name, *arguments):
        """The figures of a training that ends by itself."""
        path = os.path.join(self.folder, name + ".json")
        run(LOCKSTEP, "run", "-n", ranks, "--", TRAIN, "--data", self.data, "--epochs", EPOCHS, "--batch-size", 16,
            "--run-dir", os.path.join(self.folder, name), "--json", path, *arguments, cwd=self.folder,
            env=environment(OMP_NUM_THREADS="1"))
        with open(path) as file:
            return json.load(file)

    def start(self, *command):
        process = subprocess.Popen([str(part) for part in command], cwd=self.folder, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, env=environment(LOCKSTEP_TEST_MARK=self.folder, OMP_NUM_THREADS="1"))
        self.addCleanup(lambda: process.poll() is None and (process.kill(), process.wait()))
        return process

    def wait_until(self, condition, what):
        deadline = time.monotonic() + 30
        while not condition():
            self.assertLess(time.monotonic(), deadline, f"waiting for {what}")

    def epochs_done(self):
        return int(read_safetensors(self.checkpoint)[1]["epochs_done"])

    def killed_after_the_first_epoch(self, victim):
        """A training on two ranks in which one process, `victim` (a rank, or None: the launcher), is killed."""
        launcher = self.start(LOCKSTEP, "run", "-n", 2, "--", TRAIN, "--data", self.data, "--epochs", EPOCHS, "--batch-size", 16,
                              "--run-dir", self.run_dir)
        self.wait_until(lambda: os.path.exists(self.checkpoint), "the first checkpoint")
        ranks = {rank: pid for pid, rank in marked_processes(self.mark).items()}
        os.kill(ranks[str(victim)] if victim is not None else launcher.pid, signal.SIGKILL)
        self.assertEqual(launcher.wait(timeout=30), 41 if victim is not None else -signal.SIGKILL)
        self.wait_until(lambda: not marked_processes(self.mark), "the end of all ranks")
        self.assertLess(self.epochs_done(), EPOCHS, "too late for this test")

    def expect_same_end(self, victim):
        straight = self.launched(2, "straight")
        self.killed_after_the_first_epoch(victim)
        resumed = self.launched(2, "resumed", "--resume", self.run_dir)
        for key in ("train_loss", "parameters_hash", "test_accuracy", "test_samples"):
            self.assertEqual(resumed[key], straight[key], key)

    def test_a_killed_rank_costs_no_bit(self):
        self.expect_same_end(0)

    def test_a_killed_launcher_costs_no_bit(self):
        self.expect_same_end(None)

    def test_on_other_numbers_of_ranks(self):
        self.killed_after_the_first_epoch(1)
        _, metadata, _ = read_safetensors(self.checkpoint)
        for ranks in (1, 3):
            figures = self.launched(ranks, f"on_{ranks}", "--resume", self.checkpoint)
            before = json.loads(metadata["train_loss"])
            self.assertEqual(figures["world_size"], ranks)
            self.assertEqual(figures["train_loss"][:len(before)], before)
            self.assertEqual(len(figures["train_loss"]), EPOCHS)
            self.assertLess(figures["train_loss"][-1], before[0])
            self.assertEqual(figures["test_samples"], 99)
            self.assertGreater(figures["test_accuracy"], 0.3)  # 0.1 is chance

    def test_a_kill_at_any_instant_leaves_a_checkpoint(self):
        # Epochs of a few milliseconds, so that much of the time goes into saving. Each round goes on from where the
        # one before was killed.
        write_small_data(self.data, train=32, test=8)
        partial = self.checkpoint + ".partial"
        seed = random.randrange(1 << 32)
        instants = random.Random(seed)
        done, left_partial, rounds = 0, 0, 0
        while rounds < 10 or (left_partial == 0 and rounds < 60):
            rounds += 1
            resume = ["--resume", self.run_dir] if os.path.exists(self.checkpoint) else []
            process = self.start(TRAIN, "--data", self.data, "--epochs", 1_000_000, "--batch-size", 32, "--run-dir", self.run_dir, *resume)
            if rounds % 2 == 0:
                seen = os.stat(self.checkpoint).st_mtime_ns if resume else 0
                self.wait_until(lambda: process.poll() is not None or (
                    os.path.exists(self.checkpoint) and os.stat(self.checkpoint).st_mtime_ns != seen), "a checkpoint")
                time.sleep(instants.uniform(0, 0.1))
                self.wait_until(lambda: process.poll() is not None or os.path.exists(partial), "a save under way")
            else:
                time.sleep(instants.uniform(0.1, 0.6))
            self.assertIsNone(process.poll(), f"it ended by itself; seed {seed}, round {rounds}")
            process.kill()
            process.wait()
            left_partial += os.path.exists(partial)
            if os.path.exists(self.checkpoint):
                now = self.epochs_done()
                self.assertGreaterEqual(now, done, f"seed {seed}, round {rounds}")
                done = now
            else:
                self.assertEqual(done, 0, f"the checkpoint is lost; seed {seed}, round {rounds}")
        self.assertGreater(done, 0)
        self.assertGreater(left_partial, 0, "no kill fell into a save")
        run(TRAIN, "--data", self.data, "--epochs", done + 1, "--batch-size", 32, "--run-dir", self.run_dir, "--resume", self.run_dir)
        self.assertEqual(self.epochs_done(), done + 1)
        self.assertEqual([name for name in os.listdir(self.run_dir) if "checkpoint" in name or "partial" in name], ["checkpoint.safetensors"])

    def test_a_partial_file_is_no_checkpoint(self):
        run(TRAIN, "--data", self.data, "--epochs", 1, "--batch-size", 64, "--run-dir", self.run_dir)
        os.rename(self.checkpoint, self.checkpoint + ".partial")
        result = run(TRAIN, "--data", self.data, "--run-dir", self.run_dir, "--resume", self.run_dir, check=False)
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"cannot read {self.checkpoint}: No such file", result.stderr)


if __name__ == "__main__":
    main()
