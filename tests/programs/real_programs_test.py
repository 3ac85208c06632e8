"""Examples that are whole programs of their kind: any number of ranks trains what one process does, to the bit with virtual ranks."""

import json
import math
import os
import re
import shutil
import tempfile
import unittest

import support

# Program -> arguments of a short run, and what is equal whatever the number of ranks besides losses and weights.
PROGRAMS = {
    "distillation": ((), "told"),
    "fine_tune": (("--checkpoint", "body.safetensors", "--first-steps", 20), "right"),
    "gradient_penalty": ((), None),
    "grow_and_prune": (("--every", 5), "counts"),
    "point_cloud": ((), "told"),
    "sequence_to_sequence": ((), "sorted"),
    "solver_with_network": (("--time-steps", 4), None),
}
VIRTUAL_RANKS = 6


def numbers(value):
    return [number for part in value for number in numbers(part)] if isinstance(value, list) else [value]


class RealPrograms(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def train(self, ranks, program, *arguments, launcher=()):
        """What the program prints, line by line, and its figures."""
        for name in ("body.safetensors", "figures.json"):
            if os.path.exists(os.path.join(self.folder, name)):
                os.remove(os.path.join(self.folder, name))
        said = support.run(support.LOCKSTEP, "run", "-n", ranks, *launcher, "--run-dir", os.path.join(self.folder, "launched"), "--",
                           os.path.join(support.BIN, program), "--json", "figures.json", *arguments,
                           cwd=self.folder, timeout=240).stdout.splitlines()
        with open(os.path.join(self.folder, "figures.json"), encoding="utf-8") as file:
            return said, json.load(file)

    def assert_near(self, found, expected, relative, what):
        self.assertEqual(len(numbers(found)), len(numbers(expected)), what)
        for a, b in zip(numbers(found), numbers(expected)):
            self.assertTrue(math.isfinite(b), what)
            self.assertAlmostEqual(a, b, delta=abs(b) * relative + 1e-300, msg=what)

    def test_any_number_of_ranks_trains_what_one_process_does(self):
        for program, (arguments, same) in PROGRAMS.items():
            _, one = self.train(1, program, "--steps", 16, "--double", *arguments)
            for ranks in (2, 3):
                _, figures = self.train(ranks, program, "--steps", 16, "--double", *arguments)
                for key in ("losses", "weights"):
                    self.assert_near(figures[key], one[key], 1e-10, f"{program} {ranks} {key}")
                if same:
                    self.assertEqual(figures[same], one[same], program)

    def test_a_solver_whose_time_steps_are_checkpoints(self):
        small = ("--steps", 8, "--time-steps", 4, "--double")
        _, one = self.train(1, "solver_with_network", *small)
        _, figures = self.train(2, "solver_with_network", *small, "--checkpoint-time-steps")
        self.assert_near(figures["weights"], one["weights"], 1e-10, "weights")

    def test_virtual_ranks_give_the_same_bits(self):
        for program, (arguments, _) in PROGRAMS.items():
            one = None
            for ranks in (1, 2, 3):
                _, figures = self.train(ranks, program, "--steps", 8, *arguments, launcher=("--virtual-ranks", VIRTUAL_RANKS))
                one = one or figures
                for key in ("losses", "weights", "hash"):
                    self.assertEqual(figures[key], one[key], f"{program} {ranks} {key}")

    def test_they_learn(self):
        """What the head of each file promises, on two ranks."""
        lines, figures = self.train(2, "distillation")
        teacher, alone, taught = figures["told"]
        self.assertGreater(teacher, 0.95)
        self.assertGreater(taught, alone + 0.1)
        self.assertRegex(lines[2], r"^student, taught +\d+ numbers  loss \d\.\d{4}  unseen points told 0\.\d\d$")

        lines, figures = self.train(2, "fine_tune", "--checkpoint", "body.safetensors")
        self.assertEqual(lines[1], "the body, from body.safetensors: 8 of 10 tensors")
        self.assertRegex(lines[2], r"^four new shapes, step 60/120  .*  trains 260 of \d+ numbers$")
        self.assertRegex(lines[3], r"^four new shapes, step 120/120  .*  trains (\d+) of \1 numbers$")
        self.assertGreater(figures["right"][1], figures["right"][0])

        lines, figures = self.train(2, "gradient_penalty", "--steps", 400)
        self.assertEqual(lines[-1], "300 steps of the critic, 100 of the generator; reductions 300 and 100")
        self.assertLess(figures["losses"][-1][0], figures["losses"][0][0])

        lines, figures = self.train(2, "grow_and_prune")
        self.assertRegex(lines[0], r"^step 100/600  error 0\.\d{4}  spots 64 \+ \d+ - \d+$")
        self.assertLess(figures["losses"][-1], figures["losses"][0] / 3)
        self.assertTrue(any(int(re.search(r"- (\d+)$", line)[1]) for line in lines), "none was pruned")

        _, figures = self.train(2, "point_cloud")
        self.assertGreater(figures["told"][-1], 0.85)
        _, figures = self.train(2, "sequence_to_sequence")
        self.assertGreater(figures["sorted"][-1], 0.8)
        lines, figures = self.train(2, "solver_with_network", "--steps", 100)
        alone = float(re.search(r"of the solver alone (\S+)$", lines[-1])[1])
        self.assertLess(figures["errors"][-1], alone / 2)


if __name__ == "__main__":
    support.main()
