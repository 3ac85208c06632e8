"""Programs that need no launcher (--ranks), and other programs under ours: Python, a debugger on a terminal."""

import os
import pty
import select
import shutil
import signal
import subprocess
import time

from support import BIN, LOCKSTEP, TRAIN, ProgramTest, environment, main, marked_processes, python_with_torch, run, thorough


class OwnLauncher(ProgramTest):
    @thorough
    def test_ranks_is_the_same_training_as_the_launcher_s(self):
        for ranks, arguments in ((1, ("--ranks=1",)), (2, ("--ranks", 2)), (3, ("--ranks=3",))):
            reference = self.figures(LOCKSTEP, "run", "-n", ranks, "--", name=f"reference{ranks}")
            figures = self.figures(arguments=arguments, name=f"own{ranks}")
            for key in ("world_size", "test_accuracy", "parameters_hash"):
                self.assertEqual(figures[key], reference[key], key)

    def test_failures_end_as_the_launcher_s(self):
        missing = os.path.join(self.folder, "missing")
        result = run(TRAIN, "--ranks", 2, "--data", missing, check=False, cwd=self.folder)
        self.assertEqual(result.returncode, 49)
        self.assertRegex(result.stderr, r"lockstep: rank [01] of 2 ")
        self.assertIn(missing, result.stderr)
        for bad in ("0", "many"):
            result = run(os.path.join(BIN, "one_all_reduce"), "--ranks", bad, check=False, cwd=self.folder)
            self.assertEqual((result.returncode, f"it got '{bad}'" in result.stderr), (2, True), result.stderr)

    def test_a_rank_refuses_it(self):
        result = run(LOCKSTEP, "run", "-n", 2, "--", os.path.join(BIN, "one_all_reduce"), "--ranks", 2, check=False, cwd=self.folder)
        self.assertEqual(result.returncode, 40)
        self.assertIn("lockstep run has started this one as a rank; leave --ranks out", result.stderr)

    def test_nothing_is_left_when_it_is_killed(self):
        mark = f"LOCKSTEP_TEST_MARK={self.folder}"
        program = subprocess.Popen([TRAIN, "--ranks", "2", "--data", self.data, "--epochs", "10000"], cwd=self.folder,
                                   env=environment(LOCKSTEP_TEST_MARK=self.folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while len([rank for rank in marked_processes(mark).values() if rank is not None]) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        program.send_signal(signal.SIGKILL)
        program.wait(10)
        deadline = time.monotonic() + 1
        while marked_processes(mark) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertEqual(marked_processes(mark), {})

    @thorough
    def test_a_python_program_meets_by_torchrun_s_variables(self):
        python = python_with_torch()
        if python is None:
            self.skipTest("no Python with torch")
        program = ("import torch, torch.distributed as dist\n"
                   "dist.init_process_group('gloo')\n"
                   "t = torch.ones(3) * (dist.get_rank() + 1)\n"
                   "dist.all_reduce(t)\n"
                   "print('sum', int(t[0]))\n"
                   "dist.destroy_process_group()\n")
        for ranks in (2, 3):
            result = run(LOCKSTEP, "run", "-n", ranks, "--tee", "all", "--", python, "-c", program, cwd=self.folder)
            self.assertIn(f"sum {ranks * (ranks + 1) // 2}", result.stdout)


class Debugger(ProgramTest):
    def talk(self, command, exchanges, timeout=60):
        """Runs `command` on a terminal of its own; for each (text, answer) waits for the text and types the answer."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.folder)
            os.execve(command[0], command, environment(TERM="dumb"))
        seen, deadline, exchanges = "", time.monotonic() + timeout, list(exchanges)
        start = 0
        try:
            while time.monotonic() < deadline:
                if exchanges and exchanges[0][0] in seen[start:]:
                    start = seen.index(exchanges[0][0], start) + len(exchanges[0][0])
                    os.write(terminal, exchanges.pop(0)[1].encode())
                if not select.select([terminal], [], [], 0.1)[0]:
                    continue
                try:
                    piece = os.read(terminal, 4096)
                except OSError:
                    break
                if not piece:
                    break
                seen += piece.decode(errors="replace")
            deadline = max(deadline, time.monotonic() + 5)
            while time.monotonic() < deadline:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    return os.waitstatus_to_exitcode(status), seen
                time.sleep(0.02)
            self.fail("not done in time:\n" + seen)
        finally:
            os.close(terminal)
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass

    def test_a_rank_under_gdb_on_the_terminal(self):
        if shutil.which("gdb") is None:
            self.skipTest("no gdb: apt-get install gdb")
        # Not a program with LibTorch: gdb reads its symbols for half a minute.
        code, seen = self.talk([LOCKSTEP, "run", "-n", "2", "--debugger", "1", "--", "/bin/sleep", "0.1"],
                               [("(gdb)", "print 6 * 7\n"), ("= 42", "run\n"), ("exited normally", "quit\n")])
        self.assertEqual(code, 0, seen)
        self.assertIn("(gdb)", seen)

    def test_the_terminal_is_a_must(self):
        result = run(LOCKSTEP, "run", "--debugger", "0", "--", "true", check=False, cwd=self.folder)
        self.assertEqual(result.returncode, 2)
        self.assertIn("--debugger needs the terminal, but stdin is not one", result.stderr)

    def test_a_missing_debugger_is_said(self):
        code, seen = self.talk([LOCKSTEP, "run", "--debugger", "0", "--env", "PATH=/nowhere", "--", "/bin/true"], [])
        self.assertEqual(code, 46)
        self.assertIn("neither gdb nor lldb is in PATH (/nowhere)", seen)


if __name__ == "__main__":
    main()
