"""One kill at the same step under lockstep run and under torchrun, by faultbox in its tiny mode: both launchers must bring the training to its end with the same bits."""

import os
import unittest

from support import BIN, main, python_with_torch, run

FAULTBOX = os.path.join(BIN, "faultbox")


class KillSchedule(unittest.TestCase):
    def test_each_launcher_ends_with_the_bits_of_its_undisturbed_run(self):
        python = python_with_torch()
        if python is None:
            self.skipTest("no Python with torch, so no torchrun")
        output = run(FAULTBOX, "--seed", 3, "--compare", python, "--schedule", "--tiny", "--count", 1, timeout=540).stdout
        rows = {cells[0]: cells for cells in ([cell.strip() for cell in line.strip("| ").split("|")] for line in output.splitlines())}
        for launcher, most_steps in (("lockstep run", 1), ("torchrun", 4)):  # as many as lie between two checkpoints
            _, _, well, steps, next_step, seconds, same = rows[launcher]
            self.assertEqual((well, same), ("1 of 1", "1 of 1"), output)
            self.assertLessEqual(int(steps.split(" / ")[1]), most_steps, output)
            self.assertGreaterEqual(float(seconds.split(" / ")[0]), float(next_step.split(" / ")[0]), output)


if __name__ == "__main__":
    main()
