"""liblockstep_train from C, Fortran and Java: modules from Python's TorchScript, trained by one process and by two."""

import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BIN, BUILD, LOCKSTEP, SOURCE, environment, main, python_with_torch, run  # noqa: E402

RANK = os.path.join(BIN, "train_c_rank")
EXAMPLES = os.path.join(SOURCE, "examples/train_c")
LIBRARIES = os.path.join(BUILD, "lib")
INCLUDE = "-I" + os.path.join(SOURCE, "include")

MODULES = os.path.join(SOURCE, "tests/train_c/modules.py")


def numbers(what, text):
    return [float(number) for number in re.findall(rf"{what} +([-+.\deE]+)", text)]


def weights_of(text, ranks):
    """The weights that all ranks print. The launcher shows equal lines once, as "[0, 1] weights ..." or "[0-2] ..."."""
    lines = re.findall(r"^(?:\[([\d, -]+)\] )?weights (\S+)", text, re.MULTILINE)
    printed = 0
    for shown, _ in lines:
        for part in shown.split(","):
            first, _, last = part.partition("-")
            printed += int(last or first or 0) - int(first or 0) + 1
    if len({weights for _, weights in lines}) != 1 or printed != ranks:
        raise AssertionError(f"not the same bits on {ranks} ranks: {text}")
    return float(lines[0][1])


class TrainTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lockstep_test_")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.python = python_with_torch()
        if not self.python:
            self.skipTest("no Python here has torch, which writes TorchScript")

    def launch(self, ranks, *command, check=True):
        return run(LOCKSTEP, "run", "-n", ranks, "--tee", "all", "--", *command, cwd=self.folder, check=check,
                   env=environment(LD_LIBRARY_PATH=LIBRARIES), timeout=200)

    def rank(self, ranks, test, *more):
        return self.launch(ranks, RANK, test, self.folder, *more).stdout


class FromC(TrainTest):
    modules = []  # written once, for all tests

    def setUp(self):
        super().setUp()
        if not self.modules:
            self.modules.append(tempfile.TemporaryDirectory(prefix="lockstep_test_"))
            run(self.python, MODULES, self.modules[0].name)
        shutil.copytree(self.modules[0].name, self.folder, dirs_exist_ok=True)

    def same_by_one_and_two(self, test):
        results = []
        for ranks in (1, 2):
            shutil.rmtree(os.path.join(self.folder, "checkpoints"), ignore_errors=True)
            results.append(weights_of(self.rank(ranks, test), ranks))
        self.assertAlmostEqual(results[0], results[1], delta=1e-10)
        self.assertNotEqual(results[0], 0)

    def test_ranks_train_as_one_process(self):
        self.same_by_one_and_two("train")

    def test_batches_of_different_sizes_and_accumulation(self):
        self.same_by_one_and_two("uneven")

    def test_a_resumed_training_goes_on(self):
        self.same_by_one_and_two("resume")
        text = run(self.python, MODULES, os.path.join(self.folder, "trained.pt")).stdout
        self.assertEqual(text.strip(), "50 torch.Size([4, 2])")

    def test_what_is_wrong_is_refused_and_training_goes_on(self):
        for ranks in (1, 2):
            for test in ("refusals", "files", "settings", "handles", "rows", "backward"):
                with self.subTest(test, ranks=ranks):
                    shutil.rmtree(os.path.join(self.folder, "late"), ignore_errors=True)
                    self.rank(ranks, test)

    def test_losses(self):
        for ranks in (1, 2):
            self.rank(ranks, "losses")

    def test_checkpoints_and_a_log_at_intervals(self):
        for ranks in (1, 2):
            shutil.rmtree(os.path.join(self.folder, "intervals"), ignore_errors=True)
            self.rank(ranks, "intervals")
            names = os.listdir(os.path.join(self.folder, "log"))
            self.assertTrue(names and all("tfevents" in name for name in names), names)
            content = b"".join(pathlib.Path(self.folder, "log", name).read_bytes() for name in names)
            for tag in (b"loss", b"lr", b"heat"):
                self.assertIn(tag, content)
            shutil.rmtree(os.path.join(self.folder, "log"))

    def test_several_machines(self):
        command = (LOCKSTEP, "run", "--hosts", "a:1,b:1", "--launch-command", "env LOCKSTEP_MACHINE={host}", "--tee", "all", "--", RANK)
        env = environment(LD_LIBRARY_PATH=LIBRARIES)
        for test in ("train", "differ"):
            text = run(*command, test, self.folder, cwd=self.folder, env=env, timeout=200).stdout
            found = {float(number) for number in re.findall(r"weights (\S+)", text)}
            self.assertEqual(len(found), 1, text)

    def test_machines_that_synchronise_now_and_then(self):
        env = environment(LD_LIBRARY_PATH=LIBRARIES)
        average, differ = "machines_average", "machines_differ"
        for hosts, tests in (("a:2", (average,)), ("a:1,b:1", (average, differ)), ("a:2,b:1", (differ,)), ("a:1,b:1,c:1", (average,))):
            for test in ("machines", *tests):
                with self.subTest(test, hosts=hosts):
                    shutil.rmtree(os.path.join(self.folder, "separate"), ignore_errors=True)
                    text = run(LOCKSTEP, "run", "--hosts", hosts, "--launch-command", "env LOCKSTEP_MACHINE={host}", "--tee", "all", "--", RANK, test,
                               self.folder, cwd=self.folder, env=env, timeout=200).stdout
                    for what in {"machines": ("weights", "later"), differ: ("weights",)}.get(test, ()):
                        self.assertEqual(len(set(numbers(what, text))), 1, text)

    def test_machines_that_come_and_go(self):
        said = run(LOCKSTEP, "run", "--hosts", "a:2,b:2", "--islands", "--launch-command", "env LOCKSTEP_MACHINE={host}", "--tee", "all", "--", RANK, "islands", self.folder,
                   cwd=self.folder, env=environment(LD_LIBRARY_PATH=LIBRARIES), timeout=100)
        text = said.stdout + said.stderr
        self.assertIn("trained", text)
        self.assertNotIn("island_shard", text)
        self.assertNotIn("finish", text)  # no warning that it was left out
        self.assertEqual(sorted(re.findall(r"part (\d) of 4", text)), list("0123"), text)
        self.assertEqual(len(set(numbers("weights", text))), 1, text)

    def test_a_missing_call(self):
        self.rank(2, "missing")

    def test_threads(self):
        self.rank(1, "threads")

    def test_random_calls(self):
        calls = os.environ.get("LOCKSTEP_TEST_CALLS", "2000")
        self.assertIn(calls + " calls: ", self.rank(1, "fuzz", calls))

    def test_ranks_that_differ_are_told_on_all(self):
        for ranks in (2, 3):
            with self.subTest(ranks=ranks):
                weights_of(self.rank(ranks, "differ"), ranks)


class FromCpp(TrainTest):
    def test_tensors_of_the_program(self):
        for ranks in (1, 2, 3):
            self.assertIn(f"done on {ranks} ranks", self.launch(ranks, os.path.join(BIN, "train_c_tensors")).stdout)


class Examples(TrainTest):
    def setUp(self):
        super().setUp()
        run(self.python, os.path.join(EXAMPLES, "surrogate.py"), "net.pt", cwd=self.folder)

    def mpirun(self, kind, ranks, *program):
        options = ["--oversubscribe", "--bind-to", "none"] if kind == "openmpi" else []
        env = environment(LD_LIBRARY_PATH=LIBRARIES, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        return run(f"mpirun.{kind}", "-n", ranks, *options, *program, cwd=self.folder, env=env, timeout=200)

    def check(self, *program, mpi=""):
        found = []
        for ranks in (1, 2):
            text = (self.mpirun(mpi, ranks, *program) if mpi else self.launch(ranks, *program)).stdout
            losses = numbers("loss", text)
            self.assertEqual(len(losses), 3, text)
            self.assertLess(losses[-1], losses[0] / 2)
            self.assertIn(f"over {ranks} ranks", text)
            found += numbers("learned", text)
        self.assertEqual(len(found), 2)
        self.assertAlmostEqual(found[0], found[1], delta=1e-10)
        self.assertGreater(abs(found[0]), 1e-3)

    @unittest.skipIf(shutil.which("gfortran") is None, "gfortran is not installed: apt-get install gfortran")
    def test_fortran(self):
        source = [os.path.join(EXAMPLES, name) for name in ("lockstep_train.f90", "surrogate.f90")]
        run("gfortran", "-Wall", "-O1", "-cpp", *source, "-o", "example", "-L" + LIBRARIES, "-llockstep_train",
            cwd=self.folder)
        self.check("./example")
        self.assertTrue(os.path.exists(os.path.join(self.folder, "trained.pt")))

    def test_fortran_on_ranks_of_mpi(self):
        kind = os.environ.get("LOCKSTEP_MPI_KIND", "")
        compiler = shutil.which(f"mpifort.{kind}") if kind else None
        if compiler is None:
            self.skipTest("this build has no liblockstep_train_mpi, or there is no mpifort")
        source = [os.path.join(EXAMPLES, name) for name in ("lockstep_train.f90", "surrogate.f90")]
        run(compiler, "-O1", "-cpp", "-DUSE_MPI", *source, "-o", "example", "-L" + LIBRARIES, "-llockstep_train_mpi",
            cwd=self.folder)
        self.check("./example", mpi=kind)

    def test_a_communicator_of_c(self):
        kind = os.environ.get("LOCKSTEP_MPI_KIND", "")
        compiler = shutil.which(f"mpicc.{kind}") if kind else None
        if compiler is None:
            self.skipTest("this build has no liblockstep_train_mpi, or there is no mpicc")
        run(compiler, "-std=c99", INCLUDE, os.path.join(SOURCE, "tests/train_c/mpi.c"), "-o", "example", "-L" + LIBRARIES, "-llockstep_train_mpi",
            cwd=self.folder)
        self.assertIn("done on 2 ranks", self.mpirun(kind, 2, "./example").stdout)

    def test_java(self):
        javac = shutil.which("javac")
        home = os.path.dirname(os.path.dirname(os.path.realpath(javac))) if javac else ""
        if not os.path.exists(os.path.join(home, "include/jni.h")):
            self.skipTest("no javac with jni.h is installed: apt-get install default-jdk-headless")
        include = os.path.join(home, "include")
        run("cc", "-shared", "-fPIC", "-std=c99", "-Wall", "-Wextra", "-Werror", INCLUDE, "-I" + include, "-I" + os.path.join(include, "linux"),
            os.path.join(EXAMPLES, "surrogate_jni.c"), "-o", "libsurrogate_jni.so", "-L" + LIBRARIES, "-llockstep_train", cwd=self.folder)
        run(javac, "-d", ".", os.path.join(EXAMPLES, "Surrogate.java"), cwd=self.folder)
        self.check(os.path.join(home, "bin/java"), "-Djava.library.path=.", "-cp", ".", "Surrogate")

    def test_are_short(self):
        for name in os.listdir(EXAMPLES):
            with open(os.path.join(EXAMPLES, name)) as file:
                self.assertLessEqual(len(file.readlines()), 90, name)


if __name__ == "__main__":
    main()
