"""The C++ library on aarch64: linked against LibTorch's wheel for it; a training of a few steps under qemu says what it says here."""

import os
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BUILD, LOCKSTEP, SOURCE, main, run  # noqa: E402

ROOT = os.path.join(SOURCE, ".setup", "aarch64")
CROSS_BUILD = os.path.join(BUILD, "aarch64-torch")
QEMU = ("qemu-aarch64", "-L", ROOT)
TRAINING = os.path.join("bin", "accumulate_and_clip")


class Aarch64Torch(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        run("cmake", "--preset", "aarch64-torch", "-S", SOURCE, "-B", CROSS_BUILD, cwd=SOURCE)
        run("cmake", "--build", CROSS_BUILD, "--target", "lockstep", "accumulate_and_clip", timeout=3000)

    def test_it_is_aarch64(self):
        with open(os.path.join(CROSS_BUILD, TRAINING), "rb") as file:
            header = file.read(20)
        self.assertEqual(int.from_bytes(header[18:20], "little"), 183)  # EM_AARCH64

    def test_training_says_what_it_says_on_this_machine(self):
        for ranks in (1, 2, 3):
            with self.subTest(ranks=ranks), tempfile.TemporaryDirectory(prefix="lockstep_test_") as folder:
                here, there = (run(LOCKSTEP, "run", "-n", ranks, "--", *program, cwd=folder, timeout=300).stdout
                               for program in ((os.path.join(BUILD, TRAINING),), (*QEMU, os.path.join(CROSS_BUILD, TRAINING))))
                self.assertIn("the same weights", here)
                self.assertEqual(here, there)


if __name__ == "__main__":
    missing = [name for name in ("aarch64-linux-gnu-g++", QEMU[0]) if shutil.which(name) is None]
    if not os.path.exists(os.path.join(ROOT, "installed")):
        missing.append("LibTorch for aarch64 in .setup/aarch64")
    if missing:
        print(f"SKIPPED BECAUSE this machine has no {' and no '.join(missing)}; scripts/setup --aarch64 gets them (0.5 GB)")
        sys.exit(77)
    main()
