"""`lockstep stacks` lets ranks go soon, whatever happens to it, to the program that reads the stacks, and to the ranks."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from support import BIN, LOCKSTEP, environment, main, marked_processes

# In gdb's place: attaches, and keeps the process.
KEEPS = """#!/bin/sh
[ "$1" = --version ] && exit 0
for word in "$@"; do case "$word" in "attach "*) attach=$word;; esac; done
exec {gdb} -nx -batch -ex "$attach" -ex "echo attached\\n" -ex "python import time; time.sleep(100)"
"""


def status(pid, name):
    try:
        with open(f"/proc/{pid}/status") as file:
            return re.search(rf"(?m)^{name}:\s+(\S+)", file.read())[1]
    except (OSError, TypeError):
        return ""


def eventually(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Stacks(unittest.TestCase):
    def setUp(self):
        self.gdb = shutil.which("gdb")
        if self.gdb is None:
            self.skipTest("no gdb: apt-get install gdb")
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.tools = os.path.join(self.folder, "tools")
        os.mkdir(self.tools)
        with open(os.path.join(self.tools, "gdb"), "w") as file:
            file.write(KEEPS.format(gdb=self.gdb))
        os.chmod(os.path.join(self.tools, "gdb"), 0o755)

    def begin(self, *command, **variables):
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder,
                                   env=environment(**variables))
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def run_of(self, *program):
        mark = f"LOCKSTEP_TEST_MARK={self.folder}"
        run = self.begin(LOCKSTEP, "run", "-n", 2, "--run-dir", "run", "--", *program, LOCKSTEP_TEST_MARK=self.folder)
        self.assertTrue(eventually(lambda: len(ranks := marked_processes(mark)) >= 3 and {"0", "1"} <= set(ranks.values()), 60))
        ranks = marked_processes(mark)
        return run, {rank: pid for pid, rank in ranks.items() if rank is not None}

    def stacks_that_keep(self, pid):
        """`lockstep stacks`, once it holds this process."""
        stacks = self.begin(LOCKSTEP, "stacks", "run", PATH=self.tools + ":/usr/bin:/bin")
        if not eventually(lambda: status(pid, "TracerPid") not in ("", "0") or stacks.poll() is not None, 60) or stacks.poll() is not None:
            said = stacks.communicate(timeout=60)[0]
            if "does not permit" in said:
                self.skipTest("ptrace is not permitted here")
            self.fail(said)
        return stacks

    def log_of_rank_1(self):
        try:
            with open(os.path.join(self.folder, "run", "rank_1.log")) as file:
                return file.read()
        except OSError:
            return ""  # it has not printed anything

    def goes_on(self, pid, seconds):
        return eventually(lambda: status(pid, "TracerPid") == "0" and status(pid, "State") in ("S", "R"), seconds)

    def test_a_rank_is_let_go_after_five_seconds(self):
        _, ranks = self.run_of("sleep", 1000)
        stacks = self.stacks_that_keep(ranks["0"])
        began = time.monotonic()
        self.assertEqual(stacks.stdout.readline(), "Each rank is stopped while its stacks are read, one after the other, for 5 s at most.\n")
        self.assertTrue(eventually(lambda: status(ranks["1"], "TracerPid") != "0", 30))
        self.assertLess(time.monotonic() - began, 10)
        self.assertTrue(self.goes_on(ranks["0"], 5))
        said = stacks.communicate(timeout=60)[0]
        self.assertEqual(said.count("was stopped for 5 s, so it was released before all stacks were read"), 2, said)
        self.assertTrue(self.goes_on(ranks["1"], 5))

    def test_whoever_ends_the_command_lets_the_rank_go(self):
        _, ranks = self.run_of("sleep", 1000)
        for how in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with self.subTest(how=how):
                stacks = self.stacks_that_keep(ranks["0"])
                time.sleep(0.5)  # it has seen its end of the attach
                stacks.send_signal(how)
                self.assertEqual(stacks.wait(timeout=30), -how)
                self.assertTrue(self.goes_on(ranks["0"], 3), status(ranks["0"], "State"))

    def test_gdb_is_preferred_and_eu_stack_does_where_it_is_alone(self):
        self.run_of("sleep", 1000)
        alone = os.path.join(self.folder, "alone")
        os.mkdir(alone)
        for folder, name in ((self.tools, "gdb"), (self.tools, "eu-stack"), (alone, "eu-stack")):
            with open(os.path.join(folder, name), "w") as file:
                file.write(f'#!/bin/sh\n[ "$1" = --version ] || echo "stacks by {name}"\n')
            os.chmod(os.path.join(folder, name), 0o755)
        for path, name in ((self.tools + ":/usr/bin:/bin", "gdb"), (alone, "eu-stack")):
            said = self.begin(LOCKSTEP, "stacks", "run", PATH=path).communicate(timeout=60)[0]
            self.assertEqual(said.count("stacks by " + name), 2, said)
        missing = self.begin(LOCKSTEP, "stacks", "run", PATH=os.path.join(self.folder, "nothing"))
        self.assertIn("neither gdb nor eu-stack is in PATH; install one", missing.communicate(timeout=60)[0])

    def test_a_death_is_seen_at_once(self):
        run, ranks = self.run_of("sleep", 1000)
        stacks = self.stacks_that_keep(ranks["0"])
        os.kill(ranks["0"], signal.SIGKILL)
        killed = time.monotonic()
        output = run.communicate(timeout=60)[0]
        self.assertLess(time.monotonic() - killed, 3, "the launcher did not hear of it")
        self.assertEqual(run.returncode, 41, output)
        self.assertIn("rank 0 of 2 failed first: killed by SIGKILL", output)
        self.assertIn("the process has ended in the meantime", stacks.communicate(timeout=60)[0])

    def test_the_symbols_are_read_before(self):
        """Of a program with LibTorch; the functions of its own and of libraries are named."""
        _, ranks = self.run_of(os.path.join(BIN, "dies_and_goes_on"), "checkpoints", 9, 3, 1, "hold")
        self.assertTrue(eventually(lambda: "dies" in self.log_of_rank_1(), 60))
        stacks = self.begin(LOCKSTEP, "stacks", "run")
        held = dict.fromkeys(ranks.values(), 0.0)
        last = time.monotonic()
        while stacks.poll() is None:
            now = time.monotonic()
            for pid in held:
                held[pid] += now - last if status(pid, "TracerPid") not in ("", "0") else 0
            last = now
            time.sleep(0.005)
        said = stacks.communicate()[0]
        if "does not permit" in said:
            self.skipTest("ptrace is not permitted here")
        self.assertEqual(stacks.returncode, 0, said)
        rank = said[said.index("=== rank 1"):]
        self.assertIn(" main (", rank)
        self.assertRegex(rank, r"pause \(|libc_pause")
        self.assertRegex(said, r"libtorch_cpu|at::|c10::|torch::")
        self.assertLess(max(held.values()), 5, said)
        self.assertTrue(all(self.goes_on(pid, 3) for pid in held))


if __name__ == "__main__":
    main()
