"""Example programs print what their first comment says, explain themselves, and refuse wrong input."""

import glob
import json
import os
import random
import re
import shlex
import shutil
import tarfile
import tempfile
import unittest

import support

EXAMPLES = sorted(os.path.basename(path).removesuffix(".cpp")
                  for path in glob.glob(os.path.join(support.SOURCE, "examples", "*.cpp"))
                  if "mpi_" not in path)  # mpi_programs_test.py has it
STACKS = re.compile(r"frame #|Traceback|terminate called|what\(\):|Exception raised from|0x[0-9a-f]{8}")


def promised(example):
    """The commands of the example's first comment, each with the lines it prints."""
    with open(os.path.join(support.SOURCE, "examples", example + ".cpp"), encoding="utf-8") as file:
        comment = file.read().split("\n\n")[0]
    steps, prints = [], False
    for line in comment.splitlines():
        text = line.removeprefix("//")
        if not text.startswith("     "):
            prints = text.strip().startswith("prints") if text.strip() else prints
        elif text.strip().startswith("lockstep run"):
            steps.append((shlex.split(text), []))
        elif prints:
            steps[-1][1].append(text.strip())
    return steps


def program(example):
    return os.path.join(support.BIN, example)


class Examples(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def ranks(self, count, example, *arguments, timeout=240):
        """What the example prints on this many ranks, line by line."""
        return support.run(support.LOCKSTEP, "run", "-n", count, "--run-dir", os.path.join(self.folder, "launched"), "--",
                           program(example), *arguments, cwd=self.folder, timeout=timeout).stdout.splitlines()

    def as_promised(self, example, commands=1):
        steps = promised(example)
        self.assertEqual(len(steps), commands)
        for command, lines in steps:
            self.assertGreater(len(lines), 0)
            self.assertEqual(command[:5], ["lockstep", "run", "-n", "2", "--"])
            self.assertEqual(command[5], "build/bin/" + example)
            self.assertEqual(self.ranks(2, example, *command[6:]), lines)

    def refused(self, example, parts, *arguments):
        """The program by itself ends with an error that has all of `parts`, and prints nothing else."""
        result = support.run(program(example), *arguments, check=False, cwd=self.folder)
        self.assertNotEqual(result.returncode, 0, arguments)
        for part in parts:
            self.assertIn(part, result.stderr, arguments)
        self.assertIsNone(STACKS.search(result.stderr), result.stderr)
        self.assertNotRegex(result.stdout, r"(epoch|step|rank) \d")

    # ---- what they print ----

    def test_edit_live_model(self):
        self.as_promised("edit_live_model")
        lines = [line.split(":  ") for line in self.ranks(3, "edit_live_model")]
        self.assertEqual([" ".join(result[-1].split()) for result in lines], [
            "5.0 0.5 0.5", "5.0 5.0 5.0", "drawn differently", "the same, and trained",
            "parameter 6 is `forgotten.weight: Float [2, 2] on cpu, new` on rank 0",
            "1.0 2.0 3.0", "2.0 apart", "0.0 apart"])

    def test_hello_ranks(self):
        self.as_promised("hello_ranks")
        self.assertEqual(self.ranks(3, "hello_ranks")[-1], "1 + ... + 3 = 6")

    def test_collectives(self):
        self.as_promised("collectives")
        self.assertIn("all_reduce, sum           30 33            30 33            30 33", self.ranks(3, "collectives"))

    def test_accumulate_and_clip(self):
        self.as_promised("accumulate_and_clip")
        for ranks in (1, 3):
            lines = self.ranks(ranks, "accumulate_and_clip", "--accumulate", 3, "--batch-size", 5, "--steps", 2)
            self.assertEqual(lines[-1], "one batch of 15 on each rank instead: the same weights to 1e-6")

    def test_ema_checkpoint_resume(self):
        self.as_promised("ema_checkpoint_resume", commands=2)
        whole = self.ranks(2, "ema_checkpoint_resume", "--folder", "whole")
        self.assertEqual(whole, ["starts anew", promised("ema_checkpoint_resume")[1][1][-1]])
        averages = []
        for folder in ("ema", "whole"):
            with open(os.path.join(self.folder, folder, "average.safetensors"), "rb") as file:
                averages.append(file.read())
        self.assertEqual(*averages)  # to the bit
        python = support.python_with_torch()
        if python is None:
            self.skipTest("no Python with torch: average.pt is not looked at")
        loads = "import torch; print(*torch.load('ema/average.pt')['weight'].shape)"
        self.assertEqual(support.run(python, "-c", loads, cwd=self.folder).stdout, "1 8\n")

    @support.thorough
    def test_train_torchscript(self):
        python = support.python_with_torch()
        if python is None or not os.path.isdir(support.DATA):
            self.skipTest("no Python with torch, or no dataset-fashion-mnist")
        script = os.path.join(support.SOURCE, "examples", "train_torchscript.py")
        support.run(python, script, "net.pt", cwd=self.folder)
        self.as_promised("train_torchscript")
        moved = ("import torch; a, b = (torch.jit.load(name).state_dict() for name in ('net.pt', 'trained.pt'));"
                 "print(a.keys() == b.keys() and not any(torch.equal(a[key], b[key]) for key in a))")
        self.assertEqual(support.run(python, "-c", moved, cwd=self.folder).stdout, "True\n")
        with open(os.path.join(self.folder, "net.pt"), "rb") as file:
            whole = file.read()
        for name, content in (("cut.pt", whole[:len(whole) // 2]), ("notes.pt", b"Remember to train.\n" * 10)):
            with open(os.path.join(self.folder, name), "wb") as file:
                file.write(content)
            self.refused("train_torchscript", [name + " cannot be read as TorchScript"], name, "out.pt")

    def test_pipeline_text(self):
        for ranks, stages in ((2, 2), (3, 3), (4, 2)):
            lines = self.ranks(ranks, "pipeline_text", "--width", 16, "--heads", 2, "--layers", 3, "--block-length", 32, "--stages", stages)
            self.assertEqual(len(lines), 2)
            perplexities = []
            for number, line in enumerate(lines):
                match = re.fullmatch(rf"epoch {number + 1}/2  loss \d\.\d{{4}}  perplexity of unseen text (\d+\.\d)", line)
                self.assertTrue(match, line)
                perplexities.append(float(match[1]))
            self.assertLess(perplexities[1], perplexities[0])

    def test_gpt_text_estimates(self):
        lines = support.run(program("gpt_text"), "--estimate", "2x4", "--layers", 3).stdout.splitlines()
        self.assertEqual(len(lines), 7)
        self.assertRegex(lines[4], r"^FullyShardedDataParallel +\d+ MiB +\d+ MiB +\d+ MiB  fits$")
        for wrong in ("2", "0x2", "2x", "2x2x2", "axb"):
            self.refused("gpt_text", ["--estimate needs numbers of machines and of ranks on each, such as 2x4"], "--estimate", wrong)

    def test_gpt_text(self):
        lines = self.ranks(2, "gpt_text", "--epochs", 2, "--width", 32, "--heads", 2, "--block-length", 32, "--generate", 40)
        self.assertEqual(len(lines), 3)
        perplexities = []
        for number, line in enumerate(lines[:2]):
            match = re.fullmatch(rf"epoch {number + 1}/2  loss \d\.\d{{4}}  perplexity of unseen text (\d+\.\d)", line)
            self.assertTrue(match, line)
            perplexities.append(float(match[1]))
        self.assertLess(perplexities[1], perplexities[0])
        self.assertLess(perplexities[1], 30)  # of 256
        self.assertRegex(lines[2], "^The .{40}$")

    def gan(self, ranks, batch_size, *arguments):
        path = os.path.join(self.folder, "gan.json")
        lines = self.ranks(ranks, "gan", "--steps", 4, "--batch-size", batch_size, "--json", path, *arguments)
        with open(path, encoding="utf-8") as file:
            return lines, json.load(file)

    @unittest.skipUnless(os.path.isdir(support.DATA), "no dataset-fashion-mnist")
    def test_gan(self):
        """No gradient is reduced in vain, and any number of ranks trains what one process with the whole batch does."""
        one = {}
        for options in ((), ("--double",)):
            one[options] = self.gan(1, 12, *options)[1]
            for ranks in (2, 3):
                lines, figures = self.gan(ranks, 12 // ranks, *options)
                self.assertEqual(lines[-1], "8 steps; reductions of the discriminator's gradients 8, of the generator's 8")
                self.assertRegex(lines[0], r"^epoch 1/2  discriminator loss \d\.\d{4}  generator loss \d\.\d{4}$")
                for key in ("losses", "generator", "discriminator"):
                    near, expected = (list(self.numbers(values[key])) for values in (figures, one[options]))
                    self.assertEqual(len(near), len(expected))
                    for a, b in zip(near, expected):
                        self.assertAlmostEqual(a, b, delta=abs(b) * (1e-10 if options else 1e-3), msg=f"{key} {ranks} {options}")

    def ppo(self, ranks, *arguments):
        path = os.path.join(self.folder, "ppo.json")
        lines = self.ranks(ranks, "ppo", "--json", path, *arguments)
        with open(path, encoding="utf-8") as file:
            return lines, json.load(file)

    def test_ppo(self):
        """Ranks with a part of the environments each learn what one process with all of them does, until rounding makes one of them act otherwise."""
        _, one = self.ppo(1, "--double", "--iterations", 6, "--lr", 0.003)
        self.assertLess(min(one["epochs"]), 10, "none was stopped early")
        self.assertEqual(one["observations"], 6 * 128 * 12)
        for ranks in (2, 3):
            _, figures = self.ppo(ranks, "--double", "--iterations", 6, "--lr", 0.003)
            self.assertEqual((figures["epochs"], figures["observations"]), (one["epochs"], one["observations"]))
            for key in ("weights", "steps_per_episode"):
                for a, b in zip(figures[key], one[key]):
                    self.assertAlmostEqual(a, b, delta=abs(b) * 1e-10, msg=f"{key} {ranks}")
        lines, figures = self.ppo(2)
        self.assertRegex(lines[-1], r"^iteration 30/30  steps per episode \d+\.\d  KL 0\.\d{4}  epochs \d+$")
        self.assertGreater(figures["steps_per_episode"][-1], 3 * figures["steps_per_episode"][0])

    def numbers(self, value):
        return (number for part in value for number in self.numbers(part)) if isinstance(value, list) else iter([value])

    # ---- CIFAR-10 ----

    def write_cifar(self, train=40, test=50):
        """Images in the real format whose class is visible: brighter bands at different heights."""
        chance = random.Random(1)
        folder = os.path.join(self.folder, "cifar-10-batches-bin")
        os.mkdir(folder)
        for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
            with open(os.path.join(folder, name), "wb") as file:
                for i in range(test if name.startswith("test") else train):
                    label = i % 10
                    rows = [200 if 3 * label < row < 3 * label + 4 else 50 for row in range(32) for _ in range(32)]
                    file.write(bytes([label]) + bytes(value + chance.randrange(40) for _ in range(3) for value in rows))
        with tarfile.open(os.path.join(self.folder, "cifar-10-binary.tar.gz"), "w:gz") as archive:
            archive.add(folder, arcname="cifar-10-batches-bin")

    @support.thorough
    def test_cifar10_resnet18(self):
        self.write_cifar()
        small = ["--folder", "run", "--width", 4, "--batch-size", 8]
        arguments = ["--data", "cifar-10-binary.tar.gz", *small, "--epochs", 4]
        lines = self.ranks(2, "cifar10_resnet18", *arguments)
        self.assertEqual(len(lines), 5)
        for number, line in enumerate(lines[:4]):
            self.assertRegex(line, rf"^epoch {number + 1}/4  loss \d\.\d{{4}}  accuracy [01]\.\d{{4}}(  best so far)?$")
        self.assertRegex(lines[0], "best so far$")
        best = re.fullmatch(r"best accuracy (\d\.\d{4}) in epoch \d; checkpoints in run", lines[4])
        self.assertGreater(float(best[1]), 0.3)  # by chance 0.1
        self.assertEqual(self.ranks(2, "cifar10_resnet18", *arguments), lines[4:])  # nothing is left to do
        more = self.ranks(1, "cifar10_resnet18", "--data", "cifar-10-batches-bin", *small, "--epochs", 5)
        self.assertRegex(more[0], "^epoch 5/5 ")
        self.refused("cifar10_resnet18", ["nowhere"], "--data", "nowhere", "--folder", "other")
        with open(os.path.join(self.folder, "cifar-10-binary.tar.gz"), "rb+") as file:
            file.truncate(5000)
        self.refused("cifar10_resnet18", ["cifar-10-binary.tar.gz"], "--data", "cifar-10-binary.tar.gz", "--folder", "other")

    # ---- how they are called ----

    def test_each_explains_itself(self):
        for example in EXAMPLES:
            if example == "edit_live_model":  # has no options
                continue
            said = support.run(program(example), "--help").stdout
            self.assertIn("Usage:", said, example)
            self.assertIn("--ranks N|auto", said, example)
            self.refused(example, ["Run with --help for more information"], "--sideways")

    @support.thorough
    def test_each_starts_its_own_ranks(self):
        for example in EXAMPLES:
            result = support.run(program(example), "--ranks", 0, check=False, cwd=self.folder)
            self.assertEqual(result.returncode, 2, example + result.stderr)
            self.assertIn("--ranks takes the number of ranks", result.stderr, example)
        for example, arguments in (("hello_ranks", []), ("collectives", []), ("accumulate_and_clip", ["--steps", 1]),
                                   ("ema_checkpoint_resume", ["--folder", "own", "--epochs", 1])):
            for ranks in (2, 3):
                own = support.run(program(example), *arguments, f"--ranks={ranks}", cwd=self.folder).stdout.splitlines()
                shutil.rmtree(os.path.join(self.folder, "own"), ignore_errors=True)
                self.assertEqual(own, self.ranks(ranks, example, *arguments))
                shutil.rmtree(os.path.join(self.folder, "own"), ignore_errors=True)

    def test_some_want_two_ranks(self):
        for example in ("edit_live_model", "collectives"):
            self.refused(example, ["lockstep run -n 2"])

    def test_wrong_options(self):
        for example, arguments, parts in (("accumulate_and_clip", ["--accumulate", 0], ["--accumulate: Value 0 not in range 1"]),
                                          ("accumulate_and_clip", ["--max-norm", -1], ["--max-norm"]),
                                          ("ema_checkpoint_resume", [], ["--folder is required"]),
                                          ("train_torchscript", ["nowhere.pt", "out.pt"], ["File does not exist: nowhere.pt"]),
                                          ("cifar10_resnet18", ["--folder", "run"], ["--data is required"]),
                                          ("gan", ["--data", "nowhere"], ["nowhere"]),
                                          ("ppo", ["--environments", 0], ["--environments: Value 0 not in range 1"]),
                                          ("gpt_text", ["--text", "nowhere.txt"], ["nowhere.txt"]),
                                          ("gpt_text", ["--text", "/"], ["/"]),
                                          ("gpt_text", ["--heads", 3], ["--heads must divide --width"]),
                                          ("gpt_text", ["--sync-every", 0], ["--sync-every: Value 0 not in range 1"]),
                                          ("gpt_text", ["--sync-every", 10, "--wire", "int3"], ["--wire"]),
                                          ("gpt_text", ["--wire", "int8"], ["--wire requires --sync-every"]),
                                          ("gpt_text", ["--sync-every", 10, "--overlap", 10], ["overlap_steps is 10"]),
                                          ("gpt_text", ["--prompt", ""], ["--prompt must not be empty"]),
                                          ("train_fashion_mnist", ["--sync-every", 0], ["--sync-every: Value 0 not in range 1"]),
                                          ("train_fashion_mnist", ["--sync-every", 10, "--wire", "int3"], ["--wire"]),
                                          ("train_fashion_mnist", ["--overlap", 2], ["--overlap requires --sync-every"]),
                                          ("train_fashion_mnist", ["--sync-every", 10, "--resume", "run"], ["--sync-every", "excludes", "--resume"]),
                                          ("train_fashion_mnist", ["--sync-every", 10, "--virtual-ranks", 2], ["--sync-every", "excludes", "--virtual-ranks"])):
            self.refused(example, parts, *arguments)
        short = os.path.join(self.folder, "short.txt")
        with open(short, "w", encoding="utf-8") as file:
            file.write("too short")
        self.refused("gpt_text", ["short.txt"], "--text", short)


if __name__ == "__main__":
    support.main()
