"""Long work of one rank is not a hang, and the message of a rank that throws or that the others gave up on arrives, with each of our launchers."""

import contextlib
import os
import re
import signal
import subprocess
import time

from support import BIN, LOCKSTEP, ProgramTest, main, run

PROGRAM = os.path.join(BIN, "long_work")


class LongWork(ProgramTest):
    def launched(self, ranks, *words, options=()):
        return run(LOCKSTEP, "run", "-n", ranks, "--run-dir", "run", *options, "--", PROGRAM, *words, check=False, cwd=self.folder)

    def test_a_rank_that_computes_or_beats_is_no_hang(self):
        # This used to be ended with 43 as soon as --hang-timeout was over.
        for ranks in (2, 3):
            for how in ("computes", "beats"):
                result = self.launched(ranks, how, options=("--hang-timeout", 1))
                self.assertEqual(result.returncode, 0, f"{how}\n{result.stderr}")

    def test_a_rank_that_only_sleeps_is_one_and_all_times_are_named(self):
        result = self.launched(2, "sleeps", options=("--hang-timeout", 1))
        self.assertEqual(result.returncode, 43, result.stderr)
        for word in ("--hang-timeout (1.00 s)", "lockstep::heartbeat()", "ContextOptions::collective_timeout (1800.0 s)"):
            self.assertIn(word, result.stderr)

    def test_over_gloo_too(self):
        self.assertEqual(self.launched(2, "computes", "gloo", options=("--hang-timeout", 1)).returncode, 0)
        self.assertEqual(self.launched(2, "sleeps", "gloo", options=("--hang-timeout", 1)).returncode, 43)

    def test_one_collective_that_moves_for_long_is_none(self):
        # Ranks that have a processor for 2 ms of each 100: the pages used to stand still within a collective.
        for ranks, words in ((2, ()), (3, ()), (2, ("gloo",))):
            with subprocess.Popen([LOCKSTEP, "run", "-n", str(ranks), "--run-dir", "run", "--hang-timeout", "2", "--", PROGRAM, "moves", *words],
                                  cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
                line = launcher.stdout.readline()
                while line and "moving" not in line:
                    line = launcher.stdout.readline()
                processes = [int(pid) for pid in line.split()[line.split().index("moving:") + 1:]]
                self.assertEqual(len(processes), ranks, line)
                while launcher.poll() is None:
                    for number, pause in ((signal.SIGSTOP, 0.098), (signal.SIGCONT, 0.002)):
                        for pid in processes:
                            with contextlib.suppress(ProcessLookupError):
                                os.kill(pid, number)
                        time.sleep(pause)
                said = launcher.stdout.read()
            self.assertEqual(launcher.returncode, 0, said)
            seconds, = re.findall(r"moved for (\S+) s", said)
            self.assertGreater(float(seconds), 2, "too short to tell")

    def test_own_launchers_take_the_option(self):
        # --ranks used to have no such option, and every run ended after 300 s.
        for options, code in ((("--hang-timeout", 1), 43), (("--hang-timeout=30",), 0)):
            result = run(PROGRAM, "sleeps", "--ranks", 2, *options, check=False, cwd=self.folder)
            self.assertEqual(result.returncode, code, result.stderr)

    def test_a_rank_that_is_given_up_is_43_caught_or_not(self):
        # This was 40 if the program catches the error.
        for ranks in (2, 3):
            for words in (("late",), ("late_and_catches",)):
                result = self.launched(ranks, *words)
                self.assertEqual(result.returncode, 43, f"{words}\n{result.stderr}")
                self.assertIn(f"rank 0 of {ranks} hangs", result.stderr)
                self.assertIn("ContextOptions::collective_timeout (1.00 s)", result.stderr)
        result = self.launched(2, "late_and_catches", "gloo")
        self.assertEqual(result.returncode, 43, result.stderr)
        self.assertIn("raise ContextOptions::collective_timeout", result.stderr)

    def test_the_words_of_an_exception_arrive_though_a_context_has_seen_it_pass(self):
        # They used to be lost: "exit code 1", or "killed by SIGABRT".
        for ranks in (2, 3):
            result = self.launched(ranks, "throws")
            self.assertEqual(result.returncode, 40, result.stderr)
            self.assertIn(f"rank 1 of {ranks} threw: no space for the moon\n", result.stderr)
            result = run(PROGRAM, "spawns", ranks, cwd=self.folder)
            self.assertIn(f"rank 1 of {ranks} failed: no space for the moon (40)\n", result.stdout)


if __name__ == "__main__":
    main()
