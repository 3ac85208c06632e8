"""Programs whose ranks share out the optimizer's steps: the same bits with copies and without, killed and resumed."""

import glob
import json
import os
import random
import re
import signal
import subprocess
import time

from support import BIN, LOCKSTEP, TRAIN, ProgramTest, environment, main, marked_processes, read_safetensors, run

BITS = ("train_loss", "parameters_hash", "test_accuracy", "test_samples")
EPOCHS = 4


class ShardedOptimizer(ProgramTest):
    def setUp(self):
        super().setUp()
        self.mark = f"LOCKSTEP_TEST_MARK={self.folder}"
        self.run_dir = os.path.join(self.folder, "run")

    def command(self, ranks, epochs, run_dir, *arguments):
        return [str(word) for word in (LOCKSTEP, "run", "-n", ranks, "--", TRAIN, "--data", self.data, "--epochs", epochs,
                                       "--batch-size", 16, "--run-dir", run_dir, *arguments)]

    def trained(self, ranks, *arguments, epochs=2):
        """The figures of a training that ends by itself."""
        path = os.path.join(self.folder, "figures.json")
        run(*self.command(ranks, epochs, os.path.join(self.folder, "other"), "--json", path, *arguments), cwd=self.folder,
            env=environment(OMP_NUM_THREADS="1"))
        with open(path) as file:
            return json.load(file)

    def wait_until(self, condition, what):
        deadline = time.monotonic() + 30
        while not condition():
            self.assertLess(time.monotonic(), deadline, f"waiting for {what}")
            time.sleep(0.001)

    # ---- train_fashion_mnist ----

    def test_shared_and_replicated_parameters_have_the_same_bits(self):
        for ranks in (1, 2, 3):
            for optimizer in ("sgd", "adamw") if ranks == 2 else ("adamw",):
                shared, replicated = (self.trained(ranks, "--optimizer", optimizer, "--sharded", sharded)
                                      for sharded in ("shared", "replicated"))
                self.assertEqual([shared[key] for key in BITS], [replicated[key] for key in BITS], (ranks, optimizer))
                self.assertEqual((shared["optimizer"], shared["sharded"]), (optimizer, "shared"))
                self.assertEqual((replicated["optimizer"], replicated["sharded"]), (optimizer, "replicated"))
                self.assertLess(shared["train_loss"][1], shared["train_loss"][0])

    def test_without_sharding_nothing_changes(self):
        plain = self.trained(2)
        self.assertNotIn("optimizer", plain)
        self.assertNotIn("sharded", plain)
        for arguments in (["--optimizer", "sgd"], ["--sharded", "none"]):
            named = self.trained(2, *arguments)
            self.assertEqual((named["optimizer"], named["sharded"]), ("sgd", "none"))
            self.assertEqual([named[key] for key in BITS], [plain[key] for key in BITS])
        # LibTorch's kernels and ours differ in the last places alone.
        for optimizer in ("sgd", "adamw"):
            alone, sharded = (self.trained(2, "--optimizer", optimizer, "--sharded", how) for how in ("none", "replicated"))
            for one, other in zip(alone["train_loss"], sharded["train_loss"]):
                self.assertAlmostEqual(one, other, delta=0.02)

    def test_wrong_values_are_named(self):
        for option, value, choices in (("--sharded", "both", "none,replicated,shared"), ("--optimizer", "lbfgs", "sgd,adamw")):
            said = run(TRAIN, option, value, check=False).stderr
            self.assertIn(f"{option}: {value} not in", said)
            for choice in choices.split(","):
                self.assertIn(choice, said)

    def separately(self, name, *arguments, restarts=0):
        """The figures of a training on two machines with two ranks each."""
        path = os.path.join(self.folder, name + ".json")
        command = 'export LOCKSTEP_MACHINE=m$((RANK / 2)); exec "$@"'
        run(LOCKSTEP, "run", "-n", 4, "--max-restarts", restarts, "--", "sh", "-c", command, "sh", TRAIN, "--data", self.data, "--epochs", 2,
            "--batch-size", 8, "--run-dir", os.path.join(self.folder, name), "--json", path, *arguments, cwd=self.folder,
            env=environment(OMP_NUM_THREADS="1"))
        with open(path) as file:
            return json.load(file)

    def test_machines_synchronise_now_and_then(self):
        every_step = self.separately("ddp")
        self.assertNotIn("bytes_between_machines", every_step)
        options = ("--sync-every", 5, "--fragments", 2, "--overlap", 2)
        found = {wire: self.separately(wire, *options, "--wire", wire) for wire in ("fp32", "bf16", "int8", "int4")}
        for figures in found.values():
            self.assertEqual(figures["steps"], every_step["steps"])
            self.assertGreater(figures["seconds"], 0)
            self.assertGreater(figures["validation_loss"], 0)
            self.assertNotEqual(figures["parameters_hash"], every_step["parameters_hash"])
            self.assertLess(figures["train_loss"][1], figures["train_loss"][0])
        sent = {wire: figures["bytes_between_machines"] for wire, figures in found.items()}
        for wire, times in (("bf16", 2), ("int8", 32 / 8.25), ("int4", 32 / 4.25)):
            self.assertAlmostEqual(sent["fp32"] / sent[wire], times, delta=0.1)
        self.assertEqual(self.separately("again", *options, "--wire", "int8")["parameters_hash"], found["int8"]["parameters_hash"])
        # From memory, in the middle of a round.
        killed = self.separately("killed", *options, "--wire", "int8", "--memory-every", 1, "--die-at", 8, "--die-rank", 3, restarts=1)
        self.assertEqual([killed[key] for key in BITS], [found["int8"][key] for key in BITS])

    def start(self, epochs):
        """A training on two ranks, which share the parameters."""
        process = subprocess.Popen(self.command(2, epochs, self.run_dir, "--optimizer", "adamw", "--sharded", "shared"),
                                   cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=environment(LOCKSTEP_TEST_MARK=self.folder, OMP_NUM_THREADS="1"))
        self.addCleanup(lambda: process.poll() is None and (process.kill(), process.wait()))
        return process

    def shared_memory(self):
        return set(glob.glob("/dev/shm/*lockstep*"))

    def test_a_rank_that_is_killed_at_any_instant_ends_the_run(self):
        before = self.shared_memory()
        seed = random.randrange(1 << 32)
        instants = random.Random(seed)
        checkpoint = os.path.join(self.run_dir, "checkpoint.safetensors")
        for number in range(4):
            process = self.start(epochs=100_000)
            victim = str(number % 2)
            self.wait_until(lambda: victim in marked_processes(self.mark).values(), "the ranks")
            if number > 0:
                process.stdout.readline()  # of the first epoch
            time.sleep(instants.uniform(0, 0.5))
            os.kill(next(pid for pid, rank in marked_processes(self.mark).items() if rank == victim), signal.SIGKILL)
            _, said = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 41, f"seed {seed}: {said}")
            self.assertIn(f"rank {victim} of 2 failed first: killed by SIGKILL", said, f"seed {seed}")
            self.wait_until(lambda: not marked_processes(self.mark), "the end of all ranks")
            if number > 0:
                read_safetensors(checkpoint)
        self.assertEqual(self.shared_memory(), before)

    def test_it_resumes_where_it_was_killed_on_any_number_of_ranks(self):
        how = ["--optimizer", "adamw"]
        straight = self.trained(2, *how, "--sharded", "shared", epochs=EPOCHS)
        process = self.start(EPOCHS)
        process.stdout.readline()
        os.kill(next(pid for pid, rank in marked_processes(self.mark).items() if rank == "1"), signal.SIGKILL)
        process.communicate(timeout=30)
        done = int(read_safetensors(os.path.join(self.run_dir, "checkpoint.safetensors"))[1]["epochs_done"])
        self.assertLess(done, EPOCHS, "too late for this test")
        how += ["--resume", self.run_dir]
        for sharded in ("shared", "replicated"):
            resumed = self.trained(2, *how, "--sharded", sharded, epochs=EPOCHS)
            self.assertEqual([resumed[key] for key in BITS], [straight[key] for key in BITS], sharded)
        for ranks in (1, 3):
            figures = [self.trained(ranks, *how, "--sharded", sharded, epochs=EPOCHS) for sharded in ("shared", "replicated")]
            self.assertEqual(*([each[key] for key in BITS] for each in figures))
            self.assertEqual(figures[0]["train_loss"][:done], straight["train_loss"][:done])
            self.assertLess(figures[0]["train_loss"][-1], straight["train_loss"][0])
        libtorch = self.trained(2, *how, "--sharded", "none", epochs=EPOCHS)  # takes the state over
        self.assertAlmostEqual(libtorch["train_loss"][-1], straight["train_loss"][-1], delta=0.02)

    # ---- gpt_text ----

    def written(self, ranks, *arguments):
        return run(LOCKSTEP, "run", "-n", ranks, "--", os.path.join(BIN, "gpt_text"), "--epochs", 3, "--width", 32, "--heads", 2,
                   "--block-length", 32, "--generate", 40, *arguments, cwd=self.folder,
                   env=environment(OMP_NUM_THREADS="1")).stdout.splitlines()

    def test_gpt_text_resumes(self):
        whole = self.written(2)
        self.assertEqual(len(whole), 4)
        first = self.written(2, "--folder", "gpt", "--stop-after", 1)
        self.assertEqual(first[0], whole[0])
        self.assertEqual(len(first), 2)
        self.assertEqual(self.written(2, "--folder", "gpt"), whole[1:])  # to the bit, or the text would differ
        self.assertEqual(self.written(2, "--folder", "gpt"), whole[3:])  # nothing is left to do
        self.written(2, "--folder", "other", "--stop-after", 1)
        elsewhere = self.written(3, "--folder", "other")
        self.assertEqual(len(elsewhere), 3)
        perplexities = [float(re.fullmatch(rf"epoch {1 + i}/3 .* text (\d+\.\d)", line)[1])
                        for i, line in enumerate([whole[0], *elsewhere[:2]])]
        self.assertEqual(perplexities, sorted(perplexities, reverse=True))

    def figures(self, name, machine, *arguments):
        path = os.path.join(self.folder, name)
        command = f'export LOCKSTEP_MACHINE={machine}; exec "$@"'
        run(LOCKSTEP, "run", "-n", 4, "--", "sh", "-c", command, "sh", os.path.join(BIN, "gpt_text"), "--epochs", 1, "--width",
            32, "--heads", 2, "--layers", 3, "--block-length", 32, "--generate", 1, "--json", path, *arguments,
            cwd=self.folder, env=environment(OMP_NUM_THREADS="1"))
        with open(path) as file:
            return json.load(file)

    def test_gpt_text_fully_sharded_has_the_bits_of_one_machine(self):
        one = self.figures("one.json", "a")
        two = self.figures("two.json", "m$((RANK / 2))", "--fully-sharded")
        self.assertEqual([one[key] for key in ("steps", "parameters_hash")], [two[key] for key in ("steps", "parameters_hash")])
        self.assertGreater(two["bytes_between_machines"], 0)
        self.assertEqual(len(two["peak_mib"]), 4)

    def test_gpt_text_in_16_bits_has_the_same_bits_on_any_machines_and_sends_half(self):
        one, two, four = (self.figures(f"{parts}_{number}.json", machine, "--fully-sharded", "--parts", parts)
                          for parts, number, machine in (("bf16", 1, "a"), ("bf16", 2, "m$((RANK / 2))"), ("bf16", 4, "m$RANK")))
        self.assertEqual(one["parameters_hash"], two["parameters_hash"])
        self.assertEqual(one["parameters_hash"], four["parameters_hash"])
        wide = self.figures("float.json", "m$RANK", "--fully-sharded")
        self.assertEqual(2 * four["bytes_between_machines"], wide["bytes_between_machines"])
        self.assertAlmostEqual(four["validation_loss"], wide["validation_loss"], delta=0.01)

    def test_gpt_text_synchronises_machines_now_and_then(self):
        everywhere = self.figures("ddp.json", "m$((RANK / 2))")
        options = ("--sync-every", 10, "--fragments", 3, "--overlap", 2)
        sent = {}
        for wire in ("fp32", "int8", "int4"):
            figures = self.figures(wire + ".json", "m$((RANK / 2))", *options, "--wire", wire)
            sent[wire] = figures["bytes_between_machines"]
            self.assertEqual(figures["steps"], everywhere["steps"])
            self.assertGreater(figures["seconds"], 0)
            self.assertRegex(figures["parameters_hash"], "^[0-9a-f]{16}$")
            self.assertLess(figures["validation_loss"], 1.15 * everywhere["validation_loss"])
        self.assertAlmostEqual(sent["fp32"] / sent["int8"], 32 / 8.25, delta=0.1)
        self.assertAlmostEqual(sent["fp32"] / sent["int4"], 32 / 4.25, delta=0.2)
        again = self.figures("again.json", "m$((RANK / 2))", *options, "--wire", "int4")
        self.assertEqual(again["parameters_hash"], figures["parameters_hash"])

    def test_gpt_text_resumes_between_synchronisations(self):
        options = ("--sync-every", 50, "--fragments", 2, "--overlap", 7, "--wire", "int8")
        whole = self.written(2, *options)
        self.assertEqual(self.written(2, *options, "--folder", "apart", "--stop-after", 1)[0], whole[0])
        self.assertEqual(self.written(2, *options, "--folder", "apart"), whole[1:])


if __name__ == "__main__":
    main()
