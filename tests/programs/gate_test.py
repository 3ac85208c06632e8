"""What decides whether a submission passes: entries that fail once, the half that a commit draws, the closing line."""

import os
import re
import shutil
import sys
import tempfile
import time
import unittest

from support import SOURCE, environment, main, run

sys.path.insert(0, os.path.join(SOURCE, "tests/support"))
import run_tests  # noqa: E402

RUN_TESTS = os.path.join(SOURCE, "tests/support/run_tests.py")
# A program of the fake project: fails in its first FAILURES runs, in the words of GoogleTest or of unittest.
PROGRAM = """#!/bin/sh
echo run >> "$1.runs"
[ "$(wc -l < "$1.runs")" -gt "$2" ] && { [ "$3" != gtest ] || echo '[       OK ] Sums.AreRight (3 ms)'; exit 0; }
if [ "$3" = gtest ]; then
  printf 'sums_test.cpp:7: Failure\\nExpected equality of these values:\\n  4\\n  5\\n\\n[  FAILED  ] Sums.AreRight (3 ms)\\n'
else
  printf 'FAIL: test_sums (__main__.Sums)\\nTraceback (most recent call last):\\nAssertionError: 4 != 5\\n\\nRan 1 test\\n'
fi
exit 1
"""


class Gate(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def build(self, *properties, **entries):
        """A project whose entries are (how many runs fail, kind, label); properties are more lines of CMake."""
        program = os.path.join(self.folder, "program.sh")
        with open(program, "w", encoding="utf-8") as file:
            file.write(PROGRAM)
        os.chmod(program, 0o755)
        lines = ["cmake_minimum_required(VERSION 3.25)", "project(fake NONE)", "enable_testing()"]
        for name, (failures, kind, label) in entries.items():
            lines.append(f"add_test(NAME {name} COMMAND {program} {self.folder}/{name} {failures} {kind})")
            lines.append(f"set_tests_properties({name} PROPERTIES LABELS {label})" if label else "")
        with open(os.path.join(self.folder, "CMakeLists.txt"), "w", encoding="utf-8") as file:
            file.write("\n".join([*lines, *properties]) + "\n")
        run("cmake", "-S", self.folder, "-B", os.path.join(self.folder, "build"))

    def run_tests(self, *options):
        done = run(sys.executable, RUN_TESTS, "--build", os.path.join(self.folder, "build"), *options, check=False)
        return done.returncode, done.stdout, done.stdout.splitlines()[-1]

    def times(self, name):
        path = os.path.join(self.folder, f"{name}.runs")
        if not os.path.exists(path):
            return 0
        with open(path, encoding="utf-8") as file:
            return len(file.readlines())

    def test_an_entry_that_fails_once_is_run_once_more_and_listed(self):
        self.build(good=(0, "plain", ""), sums_test=(1, "gtest", ""), shaky=(1, "plain", ""))
        code, said, last = self.run_tests("--once-more")
        self.assertEqual((code, last), (0, "3 passed, 0 failed, 0 skipped"), said)
        self.assertEqual([self.times(name) for name in ("good", "sums_test", "shaky")], [1, 2, 2])
        self.assertIn("failed at first, passed when it ran once more, alone: sums_test; mend it. Its first failure:\n"
                      "    Sums.AreRight failed\n    sums_test.cpp:7: Failure\n    Expected equality of these values:\n      4\n      5\n", said)
        self.assertIn("alone: shaky; mend it. Its first failure:\n    FAIL: test_sums (__main__.Sums)\n"
                      "    Traceback (most recent call last):\n    AssertionError: 4 != 5\n", said)

    def test_without_being_asked_nothing_is_repeated(self):
        self.build(good=(0, "plain", ""), shaky=(1, "plain", ""))
        code, said, last = self.run_tests()
        self.assertEqual((code, last, self.times("shaky")), (1, "1 passed, 1 failed, 0 skipped", 1), said)

    def test_an_entry_that_fails_twice_has_failed(self):
        self.build(good=(0, "plain", ""), sums_test=(2, "gtest", ""))
        code, said, last = self.run_tests("--once-more")
        self.assertEqual((code, last, self.times("sums_test")), (1, "1 passed, 1 failed, 0 skipped", 2), said)
        self.assertIn("failed: Sums.AreRight\n", said)

    def test_three_that_pass_only_then_are_too_many(self):
        self.build(**{f"shaky{i}": (1, "plain", "") for i in range(3)})
        code, said, last = self.run_tests("--once-more")
        self.assertEqual((code, last), (1, "3 passed, 1 failed, 0 skipped"), said)
        self.assertIn("failed: 3 entries passed only when they ran once more, more than 2\n", said)
        for i in range(3):
            self.assertIn(f"alone: shaky{i}; mend it", said)

    def test_what_rests_on_a_failed_fixture_has_not_failed_itself(self):
        self.build("set_tests_properties(ground PROPERTIES FIXTURES_SETUP ground)", "set_tests_properties(a b c PROPERTIES FIXTURES_REQUIRED ground)",
                   ground=(1, "plain", ""), a=(0, "plain", ""), b=(0, "plain", ""), c=(0, "plain", ""))
        code, said, last = self.run_tests("--once-more")
        self.assertEqual((code, last), (0, "4 passed, 0 failed, 0 skipped"), said)
        self.assertEqual(said.count("failed at first, passed when it ran once more, alone: "), 1, said)

    def test_what_fails_now_and_then_is_found_by_repetition(self):
        self.build(good=(0, "plain", ""), shaky=(1, "plain", ""), other=(9, "plain", ""))
        code, said, last = self.run_tests("--repeat", "3", "--busy", "2", "--only", "good|shaky")
        self.assertEqual((code, last), (1, "1 entries failed at least once in 3 runs"), said)
        for line in ("run 1 of 3: 1 failed shaky\n", "run 2 of 3: 0 failed", "run 3 of 3: 0 failed", "\nfailed 1 of 3 times: shaky\n"):
            self.assertIn(line, said)

    def gate(self):
        """Runs .ci/run in a tree where make runs the tests of the fake project."""
        for name in (".ci/run", "tests/support/run_tests.py", "tests/support/count_tests.py"):
            os.makedirs(os.path.dirname(os.path.join(self.folder, name)), exist_ok=True)
            shutil.copy(os.path.join(SOURCE, name), os.path.join(self.folder, name))
        make = os.path.join(self.folder, "bin", "make")
        os.makedirs(os.path.dirname(make))
        with open(make, "w", encoding="utf-8") as file:
            file.write('#!/bin/sh\noptions=${2#TEST_OPTIONS=}\n[ "$1" = test ] || options="--thorough $options"\n'
                       "exec python3 tests/support/run_tests.py $options\n")
        os.chmod(make, 0o755)
        done = run(os.path.join(self.folder, ".ci/run"), check=False, env=environment(PATH=os.path.dirname(make) + ":" + os.environ["PATH"]))
        return done.returncode, done.stdout, done.stdout.splitlines()[-1]

    def test_the_gate_counts_both_runs_together(self):
        self.build(good=(0, "plain", ""), a=(1, "plain", ""), **{name: (1, "plain", "thorough") for name in ("b", "c", "d", "e")})
        code, said, last = self.gate()
        self.assertEqual((code, last), (1, "4 passed, 1 failed, 0 skipped"), said)
        self.assertIn("2 of 4 long entries, drawn by commit none: ", said)
        self.assertIn("failed: 3 entries passed only when they ran once more", said)

    def test_the_gate_passes_with_what_passed_the_second_time(self):
        self.build(good=(0, "plain", ""), a=(1, "plain", ""), **{name: (1, "plain", "thorough") for name in ("b", "c")})
        code, said, last = self.gate()
        self.assertEqual((code, last), (0, "3 passed, 0 failed, 0 skipped"), said)
        self.assertEqual(said[said.index("Both together:"):].count("mend it. Its first failure:"), 2)

    def test_the_gate_fails_with_what_fails_in_either_run(self):
        for label in ("", "thorough"):
            with self.subTest(label=label):
                self.setUp()
                self.build(good=(0, "plain", ""), long=(0, "plain", "thorough"), bad=(9, "plain", label))
                if label:  # the turn of which one it is depends on the commit
                    self.build(good=(0, "plain", ""), bad=(9, "plain", label))
                code, said, last = self.gate()
                self.assertEqual((code, last), (1, f"{1 if label else 2} passed, 1 failed, 0 skipped"), said)

    def test_where_many_fail_none_is_repeated(self):
        self.build(**{f"bad{i}": (9, "plain", "") for i in range(run_tests.MOST_REPEATED + 1)})
        code, said, last = self.run_tests("--once-more")
        self.assertEqual((code, last, self.times("bad0")), (1, f"0 passed, {run_tests.MOST_REPEATED + 1} failed, 0 skipped", 1), said)

    def test_a_commit_draws_half_of_the_long_entries_and_names_them(self):
        self.build(quick=(0, "plain", ""), **{f"long{i}": (0, "plain", "thorough") for i in range(5)})
        code, said, last = self.run_tests("--thorough", "--half", "0123456789abcdef")
        self.assertEqual((code, last), (0, "3 passed, 0 failed, 0 skipped"), said)
        ran = [name for name in (f"long{i}" for i in range(5)) if self.times(name)]
        self.assertIn(f"3 of 5 long entries, drawn by commit 0123456789ab: {' '.join(ran)}\n", said)
        self.assertEqual(self.times("quick"), 0)

    def test_every_entry_has_its_turn(self):
        entries = [(f"entry{i}", 1000.0 if i == 7 else 0.0) for i in range(66)]
        turns = [set(run_tests.drawn(entries, f"commit{i}")) for i in range(40)]
        self.assertTrue(all(len(turn) == 33 for turn in turns))
        for name, _ in entries:
            self.assertTrue(5 < sum(name in turn for turn in turns) < 35, name)
        self.assertEqual(run_tests.drawn(entries, "commit0"), run_tests.drawn(list(reversed(entries)), "commit0"))
        first = {run_tests.drawn(entries, f"commit{i}")[0] for i in range(40)}
        self.assertGreater(len(first), 20)  # where there is time for a few only, they are others each time

    def test_what_there_is_no_time_for_is_named(self):
        self.build("set_tests_properties(huge PROPERTIES COST 5000)",
                   **{name: (0, "plain", "thorough") for name in ["huge", *(f"long{i}" for i in range(30))]})
        for allowed_s, ran in ((1, range(run_tests.BATCH, run_tests.BATCH + 1)), (3000, range(15, 17)), (100000, range(16, 17))):
            with self.subTest(allowed_s=allowed_s):
                code, said, last = self.run_tests("--thorough", "--once-more", "--half", "0123456789abcdef", "--until", str(time.time() + allowed_s))
                self.assertEqual(code, 0, said)
                self.assertIn(int(last.split()[0]), ran, said)
                late = re.findall(r"^NO TIME FOR (\d+) of these: ", said, re.MULTILINE)
                self.assertEqual(int(last.split()[0]) + sum(map(int, late)), 16, said)


if __name__ == "__main__":
    main()
