"""The core on aarch64: its tests under qemu, and a program in C whose ranks are processes under this machine's launcher."""

import os
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BUILD, LOCKSTEP, SOURCE, main, run  # noqa: E402

CROSS_BUILD = os.path.join(BUILD, "aarch64")
QEMU = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
# By name, with the filter of what is run. Left out is what qemu 7.2 is too slow for: mapping terabytes of addresses, during
# which its memory grows by some 70 MiB a second, and sums of every kind on four and eight ranks, of which the longest takes
# 4 minutes where a test has 100 s.
TESTS = {
    "base_test": "*", "rank_page_test": "*", "shm_reduce_test": "*", "shm_message_test": "*", "shm_failure_test": "*", "shm_layout_test": "*",
    "shared_segment_test": "-*TooLittleMemory*:*WhatFails*",
    "shm_all_reduce_test": "-*EveryTypeAndOperation/3:*EveryTypeAndOperation/4",
    "shm_collectives_test": "-*ReduceAndReduceScatter/4:*EveryReductionOfEveryType/4",
    "memory_slots_test": "*", "step_bits_test": "*"}


class Aarch64(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        run("cmake", "--preset", "aarch64", "-S", SOURCE, "-B", CROSS_BUILD, cwd=SOURCE)
        run("cmake", "--build", CROSS_BUILD, "--target", "lockstep_c", "c_rank", *TESTS, timeout=1800)

    def test_it_is_aarch64(self):
        with open(os.path.join(CROSS_BUILD, "lib", "liblockstep_c.so"), "rb") as file:
            header = file.read(20)
        self.assertEqual(int.from_bytes(header[18:20], "little"), 183)  # EM_AARCH64

    def test_the_core_and_its_kernels(self):
        for test, chosen in TESTS.items():
            with self.subTest(test=test):
                run(*QEMU, os.path.join(CROSS_BUILD, "bin", test), f"--gtest_filter={chosen}", timeout=900)

    def test_neon_is_among_the_kernels(self):
        for test, name in (("shm_reduce_test", "ReduceBits"), ("step_bits_test", "StepBits")):
            done = run(*QEMU, os.path.join(CROSS_BUILD, "bin", test), f"--gtest_filter={name}.AreTheSameOnEveryProcessor")
            self.assertIn("NEON: compared", done.stdout + done.stderr)

    def test_ranks_that_are_processes(self):
        for test in ("every_collective", "in_flight", "messages", "memory"):
            for ranks in (2, 3):
                with self.subTest(test=test, ranks=ranks), tempfile.TemporaryDirectory(prefix="lockstep_test_") as folder:
                    done = run(LOCKSTEP, "run", "-n", ranks, "--tee", "all", "--", *QEMU, os.path.join(CROSS_BUILD, "bin", "c_rank"), test,
                               cwd=folder, timeout=120)
                    self.assertEqual(done.stdout.count(f"{test}: ok"), ranks)


if __name__ == "__main__":
    missing = [name for name in ("aarch64-linux-gnu-g++", QEMU[0]) if shutil.which(name) is None]
    if missing:
        print(f"SKIPPED BECAUSE this machine has no {' and no '.join(missing)}; scripts/setup --thorough installs them")
        sys.exit(77)
    main()
