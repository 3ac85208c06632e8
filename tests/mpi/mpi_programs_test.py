"""Programs that use MPI, as a user starts them: the example, and what becomes of the others when a rank dies."""

import os
import re
import shutil
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
import support  # noqa: E402

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
PACKAGES = {"openmpi": "openmpi-bin libopenmpi-dev", "mpich": "mpich libmpich-dev"}
EXAMPLE = os.path.join(support.BIN, "mpi_simulation")


def mpirun(kind, ranks, *command, launcher=None, check=True):
    options = ["--oversubscribe", "--bind-to", "none"] if kind == "openmpi" else []
    environment = {name: value for name, value in support.environment().items() if not name.startswith("LOCKSTEP_MACHINE")}
    return support.run(launcher or f"mpirun.{kind}", "-n", ranks, *options, *command, env=environment | AS_ROOT, timeout=120, check=check)


class RanksThatDie(unittest.TestCase):
    def test_mpirun_ends_the_others(self):
        for kind in PACKAGES:
            with self.subTest(kind):
                result, seconds = self.run_with_a_death(kind)
                self.assertNotEqual(result.returncode, 0)
                self.assertLess(seconds, 20)

    def test_others_that_live_get_an_error_in_time(self):
        if not shutil.which("mpiexec.hydra"):
            self.skipTest("no mpiexec.hydra: apt-get install mpich")
        result, _ = self.run_with_a_death("mpich", "-disable-auto-cleanup", launcher="mpiexec.hydra")
        for rank in (0, 2):
            found = re.search(rf"rank {rank} after (\d+\.\d) s: (.*)", result.stderr)
            self.assertIsNotNone(found, result.stderr)
            self.assertLess(float(found[1]), 6)  # of a collective_timeout of 3 s
            self.assertRegex(found[2], rf"barrier.* failed on rank {rank} of 3")
            self.assertRegex(found[2], r"ranks? [0-9, ]*1.* reported nothing: it has ended")

    def run_with_a_death(self, kind, *options, launcher=None):
        program = os.path.join(support.BIN, "mpi_test_" + kind)
        if not os.path.exists(program):
            self.skipTest(f"no {program}: apt-get install {PACKAGES[kind]}")
        start = time.monotonic()
        result = mpirun(kind, 3, *options, program, "--gtest_also_run_disabled_tests", "--gtest_filter=*DISABLED_ARankDies",
                        launcher=launcher, check=False)
        return result, time.monotonic() - start


class Example(unittest.TestCase):
    def setUp(self):
        # The MPI that Lockstep::mpi of this build was compiled against.
        self.kind = os.environ.get("LOCKSTEP_MPI_KIND", "")
        if not self.kind:
            self.skipTest("this build has no Lockstep::mpi: apt-get install " + PACKAGES["openmpi"])

    def test_it_prints_what_its_comment_says(self):
        with open(os.path.join(support.SOURCE, "examples", "mpi_simulation.cpp"), encoding="utf-8") as file:
            comment = file.read().split("\n\n")[0].split("// prints\n")[1]
        promised = [line.removeprefix("//").strip() for line in comment.splitlines()][1:]
        self.assertEqual(mpirun(self.kind, 2, EXAMPLE).stdout.splitlines(), promised)

    def test_other_numbers_of_ranks(self):
        for ranks in (1, 3):
            lines = mpirun(self.kind, ranks, EXAMPLE, "--cells", 120, "--steps", 60).stdout.splitlines()
            self.assertEqual(lines[:2], [f"120 cells on {ranks} ranks, 60 steps of the solver, the net learns from each",
                                         "the heat is 120.0, as at the start"])
            self.assertRegex(lines[2], r"^60 steps by the net instead: off by at most [1-5] % of the hottest cell$")

    def test_wrong_options(self):
        result = support.run(EXAMPLE, "--cells", 3, check=False)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("--cells: Value 3 not in range", result.stderr)


if __name__ == "__main__":
    unittest.main()
