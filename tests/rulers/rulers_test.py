"""Strangers' benches over Lockstep: that it answers MPI's calls as the MPI does, and that the drivers measure what they say."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
RULERS = os.path.join(os.path.dirname(os.path.dirname(HERE)), "bench/rulers")
sys.path[:0] = [HERE, RULERS]
import stand_ins  # noqa: E402
from mpis import all_mpis, said  # noqa: E402
from rounds import Rounds  # noqa: E402
del sys.modules["support"]  # the benches'; the tests' has the same name
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "programs"))
from support import BUILD, environment, main, python_with_torch, run  # noqa: E402

MPIS = [mpi for mpi in all_mpis() if mpi.missing() is None]
HAS_C = os.path.exists(os.path.join(BUILD, "lib/liblockstep_c.so"))


@unittest.skipIf(not MPIS, "no MPI is installed: apt-get install mpich libmpich-dev")
@unittest.skipIf(not HAS_C, "liblockstep_c is not built")
class LockstepBelowMpi(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.programs = {}
        for mpi in MPIS:
            library, program = mpi.interposer(), os.path.join(mpi.folder, "every_call")
            mpi.compile(["-x", "c", "-std=c99", "-O1", os.path.join(HERE, "every_call.c"), "-o", program])
            cls.programs[mpi.name] = mpi, program, library

    def test_every_call_gets_what_the_mpi_gives(self):
        for name, (mpi, program, library) in self.programs.items():
            for ranks in (2, 3):
                with self.subTest(mpi=name, ranks=ranks):
                    expected, _ = said(mpi.command(ranks, [program]), 120)
                    text, errors = said(mpi.command(ranks, [program], library), 120)
                    lines = sorted(text.splitlines())
                    self.assertEqual(len(lines), 348 * ranks)
                    self.assertEqual(lines, sorted(expected.splitlines()))
                    # Two in place of each reduction, and what the program's last part leaves to the MPI.
                    self.assertIn("Lockstep below MPI: 424 calls by Lockstep, 29 by the MPI", errors)

    def test_what_lockstep_does_not_know_ends_the_program(self):
        mpi, program, library = self.programs[MPIS[0].name]
        for call, why in (("MPI_Probe", "messages of Lockstep's are not probed"), ("MPI_Iprobe", "messages of Lockstep's are not probed"),
                          ("MPI_Recv", "Lockstep has no MPI_ANY_TAG")):
            with self.assertRaisesRegex(RuntimeError, f"Lockstep below MPI, rank [01]: {call}: {why}"):
                said(mpi.command(2, [program, "refused", call], library), 120)


class Figures(unittest.TestCase):
    def test_a_ratio_is_of_one_round(self):
        rounds = Rounds()
        for ours, theirs in ((1, 3), (10, 20), (100, 100)):
            rounds.add(("sum", 4), "one", ours, theirs)
        rounds.add(("sum", 4), "other", 2, 1)
        row, = rounds.rows()
        self.assertEqual((row["opponents"]["one"], row["least_ratio"]), ({"us": 20, "ratio": 2, "rounds": 3}, 0.5))
        self.assertEqual(row["lockstep_us"], 6)


class Drivers(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(subprocess.run, ["rm", "-rf", self.folder])

    def figures_of(self, driver, *arguments):
        path = os.path.join(self.folder, "figures.json")
        done = run(sys.executable, os.path.join(RULERS, driver), *arguments, "--tiny", "--json", path, timeout=300, check=False)
        self.assertIn(done.returncode, (0, 77), done.stdout + done.stderr)
        with open(path) as file:
            return json.load(file), done.stdout

    def test_a_folder_without_the_sources_is_refused(self):
        for driver, option, what in (("osu.py", "--osu", "the OSU micro-benchmarks' sources, version 7"), ("param.py", "--param", "PARAM's sources")):
            done = run(sys.executable, os.path.join(RULERS, driver), option, self.folder, check=False)
            self.assertEqual(done.returncode, 2)
            self.assertIn(what, done.stderr)

    @unittest.skipIf(not MPIS or not HAS_C, "no MPI is installed, or liblockstep_c is not built")
    def test_osu_on_a_stand_in(self):
        """A result that is wrong, and calls that the MPI answers, are not measured."""
        stand_ins.write_osu(self.folder)
        mpi = MPIS[0]
        env = environment(LOCKSTEP_BUILD_DIR=os.path.join(self.folder, "build"))
        os.makedirs(env["LOCKSTEP_BUILD_DIR"])
        for name in ("lib", "peers"):
            os.symlink(os.path.join(BUILD, name), os.path.join(env["LOCKSTEP_BUILD_DIR"], name))
        path = os.path.join(self.folder, "figures.json")
        run(sys.executable, os.path.join(RULERS, "osu.py"), "--osu", self.folder, "--mpis", mpi.name, "--tiny", "--json", path,
            "--benchmarks", "allreduce", "reduce_scatter", "gather", "bcast", env=env, timeout=300)
        with open(path) as file:
            figures = json.load(file)
        self.assertEqual([(row["case"], row["bytes"], row["lockstep_us"], row["opponents"]) for row in figures["rows"]],
                         [("allreduce", size, taken, {mpi.name: {"us": taken, "ratio": 1, "rounds": 1}}) for size, taken in ((4, 7), (1024, 14.5))])
        self.assertEqual(set(figures["missing"]), {f"{name}, {mpi.name}" for name in ("reduce_scatter", "gather", "bcast")})
        self.assertIn("found a wrong result", figures["missing"][f"reduce_scatter, {mpi.name}"])
        self.assertIn("found a wrong result", figures["missing"][f"bcast, {mpi.name}"])
        self.assertIn("osu_gather does not measure Lockstep: it answered 1 calls, and 1 were left to the MPI", figures["missing"][f"gather, {mpi.name}"])

    @unittest.skipUnless(os.environ.get("OSU_DIR"), "OSU_DIR does not name the sources of the OSU micro-benchmarks")
    @unittest.skipIf(not MPIS or not HAS_C, "no MPI is installed, or liblockstep_c is not built")
    def test_osu(self):
        figures, table = self.figures_of("osu.py", "--osu", os.environ["OSU_DIR"], "--mpis", MPIS[0].name, "--bytes", "4", "4096")
        self.assertEqual(figures["missing"], {})
        self.assertEqual({row["case"] for row in figures["rows"]}, {"allreduce", "reduce", "reduce_scatter", "bcast", "allgather", "alltoall", "gather",
                                                                    "scatter", "barrier", "latency"})
        self.assertRegex(table, r"(?m)^allreduce +4096 ")

    def with_package(self):
        python = python_with_torch()
        if not python or not os.path.isdir(os.path.join(BUILD, "python/site/lockstep")):
            self.skipTest("no Python with torch, or no build/python/site (tests/python/package.py builds it)")

    def test_param_on_a_stand_in(self):
        self.with_package()
        stand_ins.write_param(self.folder)
        figures, _ = self.figures_of("param.py", "--param", self.folder, "--collectives", "all_reduce", "reduce_scatter", "--bytes", "8", "64")
        self.assertEqual(list(figures["missing"]), ["reduce_scatter"])
        self.assertIn("PARAM has no results of reduce_scatter on gloo", figures["missing"]["reduce_scatter"])
        self.assertEqual([(row["case"], row["bytes"], row["least_ratio"]) for row in figures["rows"]],
                         [(f"all_reduce, {mode}", size, 2.5) for mode in ("async", "blocking") for size in (8, 64)])

    @unittest.skipUnless(os.environ.get("PARAM_DIR"), "PARAM_DIR does not name PARAM's sources")
    def test_param(self):
        self.with_package()
        figures, table = self.figures_of("param.py", "--param", os.environ["PARAM_DIR"], "--bytes", "8", "4096")
        self.assertEqual(figures["missing"], {})
        self.assertEqual(len({row["case"] for row in figures["rows"]}), 10)
        self.assertTrue(re.search(r"(?m)^all_to_all, async +4096 ", table), table)


if __name__ == "__main__":
    main()
