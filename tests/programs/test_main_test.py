"""The tests' own main() and the count of their results: each test is a process, a crash or a hang is a failure."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from xml.sax.saxutils import escape

from support import BIN, SOURCE, main, run

SAMPLE = os.path.join(BIN, "sample_tests")


class TestMain(unittest.TestCase):
    def test_each_test_is_a_process_of_its_own(self):
        done = run(SAMPLE, "--deadline=2", check=False, timeout=60)
        self.assertEqual(done.returncode, 1)
        for name, mark in (("Passes", "[       OK ]"), ("PassesAlone", "[       OK ]"), ("IsSkipped", "[  SKIPPED ]"), ("Fails", "[  FAILED  ]"),
                           ("Crashes", "[  FAILED  ]"), ("Leaves", "[  FAILED  ]"), ("Hangs", "[  FAILED  ]")):
            self.assertIn(f"{mark} Sample.{name} (", done.stdout)
        for part in ("said by the one that fails", "SKIPPED BECAUSE it is a sample", "Sample.Crashes ended by signal 11",
                     "Sample.Hangs was not done after 2 s", "7 tests: 2 passed, 4 failed, 1 skipped"):
            self.assertIn(part, done.stdout)
        self.assertNotIn("IsNotRun", done.stdout)

    def test_filters_and_shards(self):
        self.assertIn(" 2 tests: 2 passed", run(SAMPLE, "--gtest_filter=*Passes*").stdout)
        self.assertIn(" 1 tests: 1 passed", run(SAMPLE, "--gtest_filter=*Passes*:*Skip*-*Alone:*Skip*").stdout)
        shards = [run("env", "GTEST_TOTAL_SHARDS=2", f"GTEST_SHARD_INDEX={shard}", SAMPLE, "--gtest_filter=*Passes*").stdout for shard in (0, 1)]
        self.assertTrue("Sample.Passes (" in shards[0] and "Sample.PassesAlone (" in shards[1], shards)
        self.assertEqual(run(SAMPLE, "--gtest_filter=Nothing.*", check=False).returncode, 1)

    def test_a_killed_tests_programs_die_with_it(self):
        test = f"import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r}); import subprocess, support\n" \
               "child = subprocess.Popen(support.dies_with_us('sleep', 300), start_new_session=True)\n" \
               "print(child.pid, flush=True); child.wait()"
        with subprocess.Popen([sys.executable, "-c", test], stdout=subprocess.PIPE, text=True) as killed:
            child = int(killed.stdout.readline())
            self.addCleanup(lambda: self.runs(child) and os.kill(child, signal.SIGKILL))
            deadline = time.monotonic() + 20
            while self.runs(child) != "sleep":  # before, it has not said yet with whom it dies
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)
            killed.kill()
        while self.runs(child):
            self.assertLess(time.monotonic(), deadline, "it lives on")
            time.sleep(0.01)

    @staticmethod
    def runs(pid):
        """The name of what a process runs; none once it has ended, reaped or not."""
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                name, state = file.read().split("(", 1)[1].rsplit(") ", 1)
            return None if state[0] in "ZX" else name
        except FileNotFoundError:
            return None

    def count(self, *entries):
        """The count for ctest entries (name, status, output)."""
        with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
            skip = '<skipped message="SKIP_RETURN_CODE=77"/>'
            file.write("<testsuite>" + "".join(
                f'<testcase name="{name}" time="1" status="{"notrun" if status == "skip" else status}">{skip if status == "skip" else ""}'
                f"<system-out>{escape(output)}</system-out></testcase>" for name, status, output in entries) + "</testsuite>")
            file.flush()
            return run(sys.executable, os.path.join(SOURCE, "tests/support/count_tests.py"), file.name, check=False)

    def test_counting(self):
        output = run(SAMPLE, "--deadline=1", check=False).stdout
        done = self.count(("sample_test", "fail", output), ("programs.one", "run", ""), ("python.two", "skip", "SKIPPED BECAUSE of two"))
        self.assertEqual(done.stdout.splitlines()[-1], "3 passed, 4 failed, 2 skipped")
        self.assertIn("SKIPPED BECAUSE of two", done.stdout)
        self.assertEqual(done.returncode, 1)
        # A binary that crashed after its tests, and one that ran none.
        passed = "[       OK ] A.b (3 ms)\n"
        self.assertEqual(self.count(("a_test.1_of_2", "fail", passed)).stdout.splitlines()[-1], "1 passed, 1 failed, 0 skipped")
        self.assertEqual(self.count(("a_test", "run", "")).stdout.splitlines()[-1], "0 passed, 1 failed, 0 skipped")
        self.assertEqual(self.count(("a_test_thorough", "run", passed)).returncode, 0)
        missing = run(sys.executable, os.path.join(SOURCE, "tests/support/count_tests.py"), "/nowhere.xml", check=False)
        self.assertEqual(missing.stdout.splitlines()[-1], "0 passed, 1 failed, 0 skipped")


if __name__ == "__main__":
    main()
