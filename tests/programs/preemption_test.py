"""A training that is asked to leave, is killed, or hangs under the launcher: which rank is named, what is kept, how it goes on."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from support import BIN, LOCKSTEP, environment, main, marked_processes

PROGRAM = os.path.join(BIN, "train_until_stopped")
FOREVER = 10 ** 9


class Preemption(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.mark = f"LOCKSTEP_TEST_MARK={self.folder}"

    def start(self, ranks, steps, *options):
        process = subprocess.Popen([LOCKSTEP, "run", "-n", str(ranks), "--log-dir", "run", *options, "--", PROGRAM, "checkpoints", str(steps)],
                                   cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=environment(LOCKSTEP_TEST_MARK=self.folder, OMP_NUM_THREADS="1"))
        self.addCleanup(lambda: process.poll() is None and process.kill())
        return process

    def wait_for_step(self, process, step):
        for line in process.stdout:
            found = re.match(r"step (\d+)", line)
            if found and int(found[1]) >= step:
                return
        self.fail("the training ended: " + process.stderr.read())

    def rank(self, number):
        return next(pid for pid, rank in marked_processes(self.mark).items() if rank == str(number))

    def logs(self, ranks):
        texts = []
        for rank in range(ranks):
            with open(os.path.join(self.folder, "run", f"rank_{rank}.log")) as file:
                texts.append(file.read())
        return texts

    def report(self):
        with open(os.path.join(self.folder, "run", "report.json")) as file:
            return json.load(file)

    def ended(self, process, code):
        out, said = process.communicate(timeout=60)
        self.assertEqual(process.returncode, code, said)
        self.assertEqual(marked_processes(self.mark), {})
        return out, said

    def leaves_after_one_step(self, ranks, said):
        """All ranks left after the same step, which is saved and reported."""
        steps = [re.findall(r"leaves after (\d+)", log) for log in self.logs(ranks)]
        self.assertEqual(len(steps[0]), 1, steps)
        self.assertTrue(all(step == steps[0] for step in steps), steps)
        step = int(steps[0][0])
        report = self.report()
        self.assertEqual(report["exit_code"], 60)
        self.assertEqual(report["state_kept"]["step"], step)
        self.assertTrue(os.path.exists(os.path.join(self.folder, report["state_kept"]["checkpoint"])), report)
        self.assertIn(f"step {step} in", said)
        return step

    def test_all_ranks_save_and_leave_after_the_same_step_and_go_on_from_it(self):
        for ranks, number in ((2, signal.SIGTERM), (3, signal.SIGUSR1)):
            with self.subTest(ranks=ranks):
                shutil.rmtree(os.path.join(self.folder, "checkpoints"), ignore_errors=True)
                shutil.rmtree(os.path.join(self.folder, "run"), ignore_errors=True)
                process = self.start(ranks, FOREVER)
                self.wait_for_step(process, 30)
                process.send_signal(number)
                _, said = self.ended(process, 60)
                step = self.leaves_after_one_step(ranks, said)
                out, _ = self.ended(self.start(ranks, step + 20), 0)
                self.assertIn(f"begins at {step}\n", out)
                self.assertIn(f"done at {step + 20}\n", out)

    def test_a_signal_to_one_rank_asks_all(self):
        process = self.start(2, FOREVER)
        self.wait_for_step(process, 30)
        os.kill(self.rank(1), signal.SIGTERM)
        _, said = self.ended(process, 60)
        self.leaves_after_one_step(2, said)

    def test_a_killed_rank_is_named_and_the_run_goes_on_from_the_checkpoint(self):
        process = self.start(2, FOREVER, "--max-restarts", "1")
        self.wait_for_step(process, 60)
        os.kill(self.rank(1), signal.SIGKILL)
        self.wait_for_step(process, 80)  # of the second start
        process.send_signal(signal.SIGTERM)
        out, said = self.ended(process, 60)
        self.assertIn("rank 1 of 2 failed first: killed by SIGKILL", said)
        self.assertRegex(said, r"last did  \w+ #\d+ \(")
        self.assertRegex(said, r"kept      step \d+ in .*checkpoints/")
        self.assertIn("restart 1 of 1\n", said)
        for log in self.logs(2):
            begins = re.findall(r"begins at (\d+)", log)
            self.assertEqual(len(begins), 2, log)
            # The newest that was complete when the rank was killed, which may be some steps behind.
            self.assertGreaterEqual(int(begins[1]), 25)
            self.assertEqual(int(begins[1]) % 25, 0)
            self.assertIn("--- lockstep: restart 1 ---", log)

    def test_a_signal_to_one_rank_of_an_elastic_run_leaves_one_out(self):
        process = self.start(3, 400, "--elastic", "2:3")
        self.wait_for_step(process, 30)
        os.kill(self.rank(2), signal.SIGTERM)
        out, said = self.ended(process, 0)
        self.assertIn("a signal asks a rank to leave: the ranks save and leave, and the run goes on with 2", said)
        logs = self.logs(3)
        left = [int(re.search(r"leaves after (\d+)", log)[1]) for log in logs]
        self.assertEqual(len(set(left)), 1)
        for log in logs[:2]:
            self.assertEqual(re.findall(r"begins at (\d+)", log), ["0", str(left[0])])
            self.assertIn("done at 400", log)
        self.assertNotIn("done at", logs[2])

    def test_a_stopped_rank_is_a_hang_that_is_named(self):
        process = self.start(3, FOREVER, "--hang-timeout", "3")
        self.wait_for_step(process, 30)
        os.kill(self.rank(2), signal.SIGSTOP)
        start = time.monotonic()
        _, said = self.ended(process, 43)
        self.assertLess(time.monotonic() - start, 12)
        self.assertIn("rank 2 of 3 hangs: rank 2 is STOPPED", said)
        self.assertRegex(said, r"rank 0 waits in all_reduce #\d+ \(float32 \[\d+\]\) of .* for rank [12]")
        self.assertEqual(self.report()["culprit"]["rank"], 2)

    def test_a_short_stop_does_no_harm(self):
        process = self.start(2, FOREVER, "--hang-timeout", "5")
        self.wait_for_step(process, 30)
        pid = self.rank(1)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1)
        os.kill(pid, signal.SIGCONT)
        self.wait_for_step(process, 200)
        process.send_signal(signal.SIGTERM)
        self.ended(process, 60)

    def test_a_rank_that_never_joins_is_named(self):
        script = f'if [ $RANK = 1 ]; then exec sleep 60; fi; exec {PROGRAM} checkpoints 10'
        process = subprocess.Popen([LOCKSTEP, "run", "-n", "3", "--log-dir", "run", "--", "sh", "-c", script], cwd=self.folder,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=environment(LOCKSTEP_TEST_MARK=self.folder, LOCKSTEP_JOIN_TIMEOUT_S="3"))
        self.addCleanup(lambda: process.poll() is None and process.kill())
        _, said = self.ended(process, 46)
        self.assertIn("rank 1 of 3 did not join the others", said)
        self.assertIn("missing rank 1", said)

    def test_nothing_is_left_of_a_killed_launcher(self):
        process = self.start(2, FOREVER)
        self.wait_for_step(process, 30)
        process.kill()
        process.communicate(timeout=10)
        deadline = time.monotonic() + 1
        while marked_processes(self.mark) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertEqual(marked_processes(self.mark), {})


if __name__ == "__main__":
    main()
