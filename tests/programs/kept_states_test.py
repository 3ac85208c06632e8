"""A run on two machines that gives up, or whose coordinator's machine is lost, leaves the state that only memory held on disk; the next start goes on from it with the
right bits. The machines are this one, by LOCKSTEP_MACHINE."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
import zlib

from support import BIN, LOCKSTEP, dies_with_us, environment, main, marked_processes, run

PROGRAM = os.path.join(BIN, "dies_and_goes_on")
MACHINES = ("--hosts", "a:1,b:1", "--launch-command", "env LOCKSTEP_MACHINE={host}")


class KeptStates(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.mark = f"LOCKSTEP_TEST_MARK={self.folder}"
        self.environment = environment(LOCKSTEP_TEST_MARK=self.folder)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def begin(self, *command, **more):
        process = subprocess.Popen(dies_with_us(*command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**self.environment, **more}, cwd=self.folder)
        self.addCleanup(lambda: (process.poll() is None and process.kill(), process.wait(), process.stdout.close(), process.stderr.close()))
        return process

    def text_of(self, path):
        try:
            with open(path) as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def end_of(self, checkpoints, steps, where=("-n", 2)):
        """Of a start that goes on to so many steps: from where, and the hash of what it has then."""
        done = run(LOCKSTEP, "run", *where, "--run-dir", self.path("again_" + os.path.basename(checkpoints)), "--", PROGRAM, checkpoints, steps, env=self.environment)
        return int(re.search(r"begins at (\d+)", done.stdout)[1]), done.stdout.split("ends with ")[1].split()[0]

    def goes_on_with_the_right_bits(self, checkpoints, step, steps=9, where=("-n", 2)):
        begins, end = self.end_of(checkpoints, steps, where)
        self.assertEqual(begins, step)
        shutil.rmtree(self.path("straight"), ignore_errors=True)
        self.assertEqual(end, self.end_of(self.path("straight"), steps, where)[1])

    def test_the_block_names_machine_and_path(self):
        checkpoints = self.path("checkpoints")
        died = run(LOCKSTEP, "run", *MACHINES, "--run-dir", self.path("run"), "--", PROGRAM, checkpoints, 9, 6, 1, "forward", check=False, env=self.environment)
        self.assertEqual(died.returncode, 41, died.stderr)
        self.assertRegex(died.stderr, rf"kept      step 5 in {checkpoints}/\S+, written from the launcher's memory now")
        self.assertRegex(died.stderr, r"rank 1 of 2 failed first: killed by SIGKILL")
        self.assertRegex(died.stderr, r" on b, ")
        with open(self.path("run", "report.json")) as file:
            kept = json.load(file)["state_kept"]
        self.assertEqual((kept["step"], kept["written_from_memory"]), (5, True))
        self.goes_on_with_the_right_bits(checkpoints, 5, where=MACHINES)

    def begin_nodes(self, name, checkpoints, place, *options):
        """A launcher on each of two machines; rank 1 does something in step 6."""
        key = self.path("key_" + name)
        with open(os.open(key, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(os.urandom(32).hex() + "\n")
        port = 20000 + zlib.crc32(f"{os.getpid()} {name}".encode()) % 20000
        return [self.begin(LOCKSTEP, "run", "--nnodes", 2, "--node-rank", node, "--rendezvous", f"127.0.0.1:{port}", "--key-file", key, "-n", 1,
                           "--run-dir", self.path(f"run_{name}"), *options, "--", PROGRAM, checkpoints, 9, 6, 1, place, LOCKSTEP_MACHINE="ab"[node]) for node in (0, 1)]

    def test_the_coordinator_s_machine_is_lost_after_a_divergence(self):
        """What the start that diverged has saved is not put where resume() would go on from it unseen."""
        checkpoints = self.path("diverged")
        nodes = self.begin_nodes("diverged", checkpoints, "diverge", "--max-restarts", 1)
        log = self.path("run_diverged", "rank_0.log")
        deadline = time.monotonic() + 120
        while self.text_of(log).count("begins at ") < 2:
            self.assertLess(time.monotonic(), deadline, self.text_of(log))
            self.assertIsNone(nodes[0].poll(), self.text_of(log))
            time.sleep(0.05)
        time.sleep(0.3)
        nodes[0].kill()
        output = nodes[1].communicate(timeout=120)[1]
        self.assertEqual(nodes[1].returncode, 52, output)
        self.assertRegex(output, rf" kept: step 5 in {self.path('run_diverged')}\S*/kept_state/step-\S+")
        self.assertEqual([file for file in os.listdir(checkpoints) if file.endswith(".json")], [])

    def test_the_coordinator_s_machine_is_lost(self):
        """Both agents keep what they have; they share a file system, so one writes and the other finds it."""
        for name, victims in (("launcher", 1), ("machine", 2)):
            with self.subTest(name):
                checkpoints = self.path(name)
                nodes = self.begin_nodes(name, checkpoints, "hold")
                log = self.path(f"run_{name}", "rank_0.log")
                deadline = time.monotonic() + 120
                while "step 5 " not in self.text_of(log):
                    self.assertLess(time.monotonic(), deadline)
                    self.assertIsNone(nodes[0].poll())
                    time.sleep(0.05)
                time.sleep(0.3)
                if victims == 2:  # its agent goes with it
                    for pid in marked_processes(self.mark):
                        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it may end with those before
                            with open(f"/proc/{pid}/environ", "rb") as file:
                                if b"LOCKSTEP_MACHINE=a\0" in file.read() and pid != nodes[0].pid:
                                    os.kill(pid, signal.SIGKILL)
                nodes[0].kill()
                output = nodes[1].communicate(timeout=120)[1]
                self.assertEqual(nodes[1].returncode, 52, output)
                self.assertRegex(output, rf" kept: step 5 in {checkpoints}/step-\S+")
                # A launcher that was killed leaves its machine's agent to write the same.
                deadline = time.monotonic() + 60
                while marked_processes(self.mark):
                    self.assertLess(time.monotonic(), deadline)
                    time.sleep(0.05)
                self.assertEqual([file for file in sorted(os.listdir(checkpoints)) if file.endswith(".json")], ["step-000000000005.0.json"])
                self.goes_on_with_the_right_bits(checkpoints, 5, where=MACHINES)

    def test_restarts_that_are_used_up_by_kills(self):
        for ranks in (2, 3):
            checkpoints = self.path(f"killed{ranks}")
            process = self.begin(LOCKSTEP, "run", "-n", ranks, "--max-restarts", 2, "--run-dir", self.path(f"run{ranks}"), "--", PROGRAM, checkpoints, 1000000)
            for _ in range(3):
                for line in process.stdout:
                    if line.startswith("step "):
                        break
                victims = [pid for pid, rank in marked_processes(self.mark).items() if rank == str(ranks - 1)]
                os.kill(victims[0], signal.SIGKILL)
                for line in process.stdout:
                    if line.startswith("begins at "):
                        break
            output = process.communicate(timeout=120)[1]
            self.assertEqual(process.returncode, 41, output)
            self.assertIn("no restart: all 2 restarts that --max-restarts allows were made", output)
            # Without a comma if the program itself had saved that step to disk, as it does every ten.
            kept = re.search(r"kept      step (\d+) in ([^\s,]+)", output[output.index("no restart: all 2"):])
            self.assertTrue(kept and kept[2].startswith(checkpoints), output)
            step = int(kept[1])
            self.goes_on_with_the_right_bits(checkpoints, step, step + 3, ("-n", ranks))


if __name__ == "__main__":
    main()
