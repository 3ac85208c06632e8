"""The C++ library and the launcher on aarch64: linked against LibTorch's wheel and Debian's libraries for it; a training of a few steps under qemu says what
it says here, under this machine's launcher and under that one, which tells failures as this one does."""

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
LAUNCHER = (*QEMU, os.path.join(CROSS_BUILD, "bin", "lockstep"))


class Aarch64Torch(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        run("cmake", "--preset", "aarch64-torch", "-S", SOURCE, "-B", CROSS_BUILD, cwd=SOURCE)
        run("cmake", "--build", CROSS_BUILD, "--target", "lockstep", "lockstep_cli", "accumulate_and_clip", timeout=3000)

    def test_it_is_aarch64(self):
        for program in (TRAINING, os.path.join("bin", "lockstep")):
            with open(os.path.join(CROSS_BUILD, program), "rb") as file:
                header = file.read(20)
            self.assertEqual(int.from_bytes(header[18:20], "little"), 183, program)  # EM_AARCH64

    def test_training_says_what_it_says_on_this_machine(self):
        for ranks in (1, 2, 3):
            with self.subTest(ranks=ranks), tempfile.TemporaryDirectory(prefix="lockstep_test_") as folder:
                emulated = (*QEMU, os.path.join(CROSS_BUILD, TRAINING))
                here, *there = (run(*launcher, "run", "-n", ranks, "--", *program, cwd=folder, timeout=300).stdout
                                for launcher, program in (((LOCKSTEP,), (os.path.join(BUILD, TRAINING),)), ((LOCKSTEP,), emulated), (LAUNCHER, emulated)))
                self.assertIn("the same weights", here)
                self.assertEqual(there, [here, here])

    def test_the_launcher_says_what_it_is_and_who_failed(self):
        self.assertIn("aarch64", run(*LAUNCHER, "--version").stdout)
        for script, code, said in (("exit $((3 * RANK))", 40, "rank 1 of 2 failed first: exit code 3"),
                                   ("[ $RANK = 0 ] || kill -9 $$; sleep 60", 41, "rank 1 of 2 failed first: killed by SIGKILL")):
            with self.subTest(code=code), tempfile.TemporaryDirectory(prefix="lockstep_test_") as folder:
                done = run(*LAUNCHER, "run", "-n", 2, "--", "sh", "-c", script, cwd=folder, check=False)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(said, done.stderr)
        self.assertRegex(run(*LAUNCHER, "doctor", check=False).stdout, "processor +ARM, implementer 0x41.*, NEON")


if __name__ == "__main__":
    missing = [name for name in ("aarch64-linux-gnu-g++", QEMU[0]) if shutil.which(name) is None]
    if not os.path.exists(os.path.join(ROOT, "installed")):
        missing.append("LibTorch for aarch64 in .setup/aarch64")
    if missing:
        print(f"SKIPPED BECAUSE this machine has no {' and no '.join(missing)}; scripts/setup --aarch64 gets them (0.5 GB)")
        sys.exit(77)
    main()
