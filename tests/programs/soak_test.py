"""`make soak` in its tiny mode: each kind of fault at least once, the bits of undisturbed trainings, and launchers that do not grow."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

from support import SOURCE, environment, main

sys.path.insert(0, os.path.join(SOURCE, "scripts"))
import soak_figures  # noqa: E402


class Tiny(unittest.TestCase):
    def test_each_fault_once(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "figures.json")
            done = subprocess.run([sys.executable, os.path.join(SOURCE, "scripts", "soak"), "--tiny", "--json", path], capture_output=True, text=True,
                                  env=environment(), timeout=1000)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            with open(path) as file:
                figures = json.load(file)
        self.assertGreaterEqual(figures["trainings"], 1)
        self.assertGreater(figures["effective"], 0.5)
        kinds = {"kill", "kill of all", "kill after a resize", "stop", "resize", "preemption", "full disk", "lost machine"}
        self.assertEqual(set(figures["faults"]) | set(figures["left_out"]), kinds)
        for kind, why in figures["left_out"].items():
            print(f"SKIPPED BECAUSE {kind}: {why}")


class Figures(unittest.TestCase):
    def test_a_slope_is_found_beside_steps_of_ranks_and_launchers(self):
        def group(base, slope):
            return [(at, ranks := 1 + at // 50 % 3, base + slope * at + 10 * ranks) for at in range(300)]
        self.assertAlmostEqual(soak_figures.fit([group(100, 0), group(7000, 0)]), 0)
        self.assertAlmostEqual(soak_figures.fit([group(100, 0.5), group(7000, 0.5)]), 0.5)
        self.assertAlmostEqual(soak_figures.fit([[(at, 2, 3 + 2 * at) for at in range(10)]]), 2)
        self.assertEqual(soak_figures.fit([]), 0)

    def test_the_table_takes_the_place_of_the_last_one(self):
        growth = {"memory": {"per_hour": 1.25, "grown": 0.5, "allowed": 1024, "unit": "KiB", "life_s": 600, "samples": 90}}
        figures = {"hours": 2, "seed": 7, "every_s": 60, "machine": "2 cores", "faults": {"kill": 3, "stop": 1}, "trainings": 5, "steps_needed": 990, "steps_made": 1000,
                   "effective": 0.99, "growth": growth, "left_out": {"full disk": "no root"}}
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "page.md")
            with open(path, "w") as file:
                file.write(f"before\n{soak_figures.BEGIN}\nold\n{soak_figures.END}\nafter\n")
            for _ in range(2):
                soak_figures.write_table(path, figures)
            with open(path) as file:
                text = file.read()
        self.assertTrue(text.startswith("before\n") and text.endswith("\nafter\n"))
        self.assertNotIn("old", text)
        self.assertEqual(text.count("| faults | 4, one in 60 s: 3 x kill, 1 x stop |"), 1)
        self.assertIn("| effective steps | 99.0%: 990 needed, 1,000 made |", text)
        self.assertIn("| left out: full disk | no root |", text)


if __name__ == "__main__":
    main()
