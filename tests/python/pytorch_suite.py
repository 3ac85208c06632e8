"""PyTorch's own distributed tests, run over the lockstep backend at world size 3, on one machine or several.

    pytorch_suite.py gloo|mpi [-k NAME]... [--machines aab]     tests that PyTorch lets a backend of that name run

The suite decides by the backend's name which tests apply. So it is imported under a name it knows, and only then told
to start its ranks, by fork, with ours. expected_failures.txt beside this file holds the tests that cannot pass, a
reason each. Ends with an error when another test fails, when one of those passes, or when fewer pass than LEAST says.
"""

import argparse
import os
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
# This many must pass, whatever happens to the rest: a suite that skips everything would hide every failure.
LEAST = {"gloo": 103, "mpi": 12}


def expected_failures(names):
    """test -> reason, of the lines `name test: reason`."""
    failures = {}
    with open(os.path.join(HERE, "expected_failures.txt")) as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                test, reason = line.split(":", 1)
                suite, test = test.split()
                if suite in names:
                    failures[test] = reason.strip()
    return failures


def import_suite(name):
    os.environ.update(BACKEND=name, WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1",
                      INIT_METHOD="file://" + os.path.join(tempfile.mkdtemp(prefix="lockstep_suite_"), "meet"))
    import torch.testing._internal.distributed.distributed_test as suite
    suite.BACKEND = "lockstep"
    # Of this variable's values, the one for which tests of subgroups run with fewer than 8 ranks.
    os.environ["BACKEND"] = "mpi"
    return suite


def make_case(suite, machines):
    class LockstepTest(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._fork_processes()

        def _fork_processes(self):
            import torch

            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank, *arguments, **more):
            if machines:
                os.environ["LOCKSTEP_MACHINE"] = machines[rank]
            super()._run(rank, *arguments, **more)

    return LockstepTest


class Result(unittest.TextTestResult):
    """Also records what passed."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.passed = []

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed.append(test._testMethodName)


def applies(case, name, suite_name):
    """Whether PyTorch's decorators let the test through for this backend."""
    method = getattr(case, name)
    if getattr(method, "__unittest_skip__", False):
        return False
    return suite_name == "gloo" or "all_to_all" in name


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=["gloo", "mpi"])
    parser.add_argument("-k", action="append", default=[], help="only tests whose name contains this")
    parser.add_argument("--machines", default="", help="a letter for each rank, the same for those that share a machine")
    options = parser.parse_args()
    try:
        import expecttest  # noqa: F401 - the suite needs it
        import torch
    except ImportError as error:
        print(f"SKIPPED BECAUSE {error}; scripts/setup --tests installs it")
        return 77
    suite = import_suite(options.name)
    case = make_case(suite, options.machines)
    names = [name for name in unittest.TestLoader().getTestCaseNames(case)
             if applies(case, name, options.name) and (not options.k or any(part in name for part in options.k))]
    runner = unittest.TextTestRunner(verbosity=2, resultclass=Result)
    result = runner.run(unittest.TestSuite(case(name) for name in names))
    failed = {test._testMethodName for test, _ in result.failures + result.errors}
    expected = expected_failures([options.name] + ["machines"] * bool(options.machines))
    surprises = sorted(failed - set(expected))
    passing = sorted(set(result.passed) & set(expected))
    for name in surprises:
        print(f"failed unexpectedly: {name}")
    for name in passing:
        print(f"passed, take it off expected_failures.txt: {name}")
    print(f"torch {torch.__version__}, as {options.name}: {len(result.passed)} passed, {len(failed)} failed "
          f"({len(failed & set(expected))} as expected), {len(result.skipped)} skipped")
    least = LEAST[options.name] - len(expected_failures(["machines"])) * bool(options.machines)
    too_few = not options.k and len(result.passed) < least
    if too_few:
        print(f"at least {least} must pass")
    return 1 if surprises or passing or too_few else 0


if __name__ == "__main__":
    sys.exit(main())
