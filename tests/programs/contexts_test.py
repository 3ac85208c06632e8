"""Several Contexts in one process, one after the other, and several starts with one store that outlives them."""

import os
import shutil
import sys
import tempfile
import unittest

from support import BIN, LOCKSTEP, environment, main, python_with_torch, run

PROGRAM = os.path.join(BIN, "meets_again")
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Without Slurm: processes of one parent get the variables that srun would set, the second time with
# those of its pmi2 plug-in.
SLURM = ('for r in $(seq 0 $((%d - 1))); do SLURM_PROCID=$r SLURM_LOCALID=$r SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=%d '
         'SLURM_STEP_NUM_NODES=1 %s "$@" & pids="$pids $!"; done; for p in $pids; do wait $p || exit 1; done')
BY_HAND = ('port=$(%s -c "import socket; s = socket.socket(); s.bind((\'127.0.0.1\', 0)); print(s.getsockname()[1])"); '
           'for r in $(seq 0 $((%d - 1))); do RANK=$r WORLD_SIZE=%d MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$@" & '
           'pids="$pids $!"; done; for p in $pids; do wait $p || exit 1; done')


def torchrun(ranks, restarts=0):
    return [python_with_torch(), "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", ranks, "--standalone",
            "--max-restarts", restarts]


def launchers(ranks):
    """name -> the words in front of the program."""
    found = {
        "lockstep run": [LOCKSTEP, "run", "-n", ranks, "--tee", "all", "--"],
        "slurm": ["sh", "-c", SLURM % (ranks, ranks, ""), "sh"],
        "slurm with pmi2": ["sh", "-c", SLURM % (ranks, ranks, f"PMI_RANK=$r PMI_SIZE={ranks}"), "sh"],
        "by hand": ["sh", "-c", BY_HAND % (sys.executable, ranks, ranks), "sh"],
    }
    if python_with_torch():
        found["torchrun"] = torchrun(ranks)
    for name in ("openmpi", "mpich"):
        if shutil.which(f"mpirun.{name}"):
            found[name] = [f"mpirun.{name}", "-n", ranks] + (["--oversubscribe"] if name == "openmpi" else [])
    return found


def lines(ranks, number):
    total = ranks * (ranks + 1) // 2
    return {f"{rank}:{number}:{total}:{3 if rank in (0, ranks - 1) else 0}" for rank in range(ranks)}


class Contexts(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def expect_lines(self, output, expected):
        # Each launcher marks the lines of a rank in its own way.
        for line in expected:
            self.assertRegex(output, rf"(?m)(^|\W){line}$")

    def test_one_after_the_other_under_every_launcher(self):
        # The second used to find the launcher's socket closed, the first one's keys, or a server that was about to end.
        for ranks in (2, 3):
            for name, words in launchers(ranks).items():
                with self.subTest(launcher=name, ranks=ranks):
                    done = run(*words, PROGRAM, "shm", env=environment(**MPI), cwd=self.folder, timeout=60)
                    for number in range(3):
                        self.expect_lines(done.stdout, lines(ranks, number))

    def test_one_after_the_other_over_gloo_and_alone(self):
        for words in ([LOCKSTEP, "run", "-n", 3, "--tee", "all", "--"], launchers(3)["by hand"]):
            done = run(*words, PROGRAM, "gloo", cwd=self.folder, timeout=60)
            for number in range(3):
                self.expect_lines(done.stdout, lines(3, number))
        self.expect_lines(run(PROGRAM, "shm", cwd=self.folder).stdout, {f"0:{number}:1:1" for number in range(3)})
        self.expect_lines(run(PROGRAM, "shm", "--ranks", 2, cwd=self.folder).stdout, {"0:2:3:3"})

    def test_two_at_once_are_an_error_that_says_what_to_do(self):
        for ranks in (1, 2, 3):
            done = run(LOCKSTEP, "run", "-n", ranks, "--tee", "all", "--", PROGRAM, "both", cwd=self.folder, timeout=60)
            self.assertIn("this process already has a Context, and may have only one at a time; use that one", done.stdout)
            self.expect_lines(done.stdout, lines(ranks, 0) if ranks > 1 else {"0:0:1:1"})

    def test_programs_one_after_the_other_in_a_rank(self):
        # Rank 1 may begin the second while rank 0 still leaves the first, and serves that one's store.
        for ranks in (2, 3):
            words = launchers(ranks)["slurm"]
            done = run(*words, "sh", "-c", f"{PROGRAM} shm && {PROGRAM} shm", cwd=self.folder, timeout=60)
            for line in lines(ranks, 2):
                self.assertEqual(done.stdout.count(line), 2, done.stdout)

    def test_torchrun_starts_again(self):
        # The agent keeps the store, with everything that the ranks of earlier starts left there.
        if python_with_torch() is None:
            self.skipTest("no Python with torch, so no torchrun")
        for ranks in (2, 3):
            done = run(*torchrun(ranks, restarts=3), PROGRAM, "faults", cwd=self.folder, timeout=100)
            self.expect_lines(done.stdout, lines(ranks, 3))


if __name__ == "__main__":
    main()
