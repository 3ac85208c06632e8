"""liblockstep_c as programs in C see it: what the ranks of tests/c/*.c check, under every launcher that is here."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BIN, LOCKSTEP, environment, main, run  # noqa: E402

C_RANK = os.path.join(BIN, "c_rank")
FORMULAS = ("sgd", "momentum", "nesterov", "adam", "adamw")


def launched(ranks, test, **options):
    with tempfile.TemporaryDirectory(prefix="lockstep_test_") as folder:
        return run(LOCKSTEP, "run", "-n", ranks, "--tee", "all", "--", C_RANK, test, cwd=folder, **options)


class Launched(unittest.TestCase):
    def check(self, test, sizes=(2, 3)):
        for ranks in sizes:
            with self.subTest(ranks=ranks):
                self.assertEqual(launched(ranks, test, timeout=60).stdout.count(f"{test}: ok"), ranks)

    def test_every_collective(self):
        self.check("every_collective", (1, 2, 3))

    def test_requests_in_flight(self):
        self.check("in_flight", (1, 2, 3))

    def test_messages(self):
        self.check("messages")

    def test_handles_that_are_used_again(self):
        self.check("handles")

    def test_memory_that_overlaps(self):
        self.check("overlaps")

    def test_parts_of_a_group(self):
        self.check("parts", (1, 2, 3))

    def test_threads_with_groups_of_their_own(self):
        self.check("threads")

    def test_resident_memory(self):
        self.check("memory", (1, 2, 3))

    def test_memory_that_requests_use(self):
        self.check("busy_memory")

    def test_sharded_step(self):
        """The weights are those of the C++ library's ZeroRedundancyOptimizer, to the last bit."""
        self.check_steps("steps", "sharded_step", set(FORMULAS))

    def test_sharded_step_of_every_dtype(self):
        """With masters and without: the weights are those of the C++ library's `master_weights`, too."""
        types = ("float32", "float64", "float16", "bfloat16", "float16-master", "bfloat16-master")
        self.check_steps("typed", "typed_step", {f"{formula}-{name}" for formula in FORMULAS for name in types})

    def check_steps(self, by_cpp, by_c, names):
        for ranks in (1, 2, 3):
            wanted = {line for line in run(LOCKSTEP, "run", "-n", ranks, "--", os.path.join(BIN, "c_reference"), by_cpp).stdout.splitlines()
                      if line.endswith(f" over {ranks} ranks")}
            self.assertEqual({line.split()[0] for line in wanted}, names)
            self.assertEqual(len({line.split()[1] for line in wanted}), len(names))
            found = launched(ranks, by_c, timeout=60).stdout
            self.assertEqual(found.count(f"{by_c}: ok"), ranks)
            self.assertEqual({line[line.index("]") + 1:].strip() if line.startswith("[") else line for line in found.splitlines()
                              if line.endswith(f" over {ranks} ranks")}, wanted)

    def test_misuse_of_the_typed_step(self):
        self.check("typed_misuse", (1, 2, 3))

    def test_misuse_of_the_sharded_step(self):
        self.check("sharded_misuse", (1, 2, 3))

    def test_a_rank_that_goes_wrong_during_a_sharded_step(self):
        self.check("sharded_faults")

    def test_misuse_is_refused(self):
        self.check("misuse", (1, 2, 3))

    def test_nothing_stays_behind_after_leaving(self):
        self.check("join_again", (1, 2, 3))

    def test_calls_that_do_not_match(self):
        self.check("mismatch")

    def test_groups_in_different_orders(self):
        # The ranks waited for their whole time limit.
        self.check("group_order")

    def test_ranks_that_are_late_in_one_of_several_groups(self):
        self.check("group_lateness")

    def test_a_rank_that_leaves(self):
        self.check("leaves")

    def test_a_rank_that_does_not_come(self):
        self.check("times_out")

    def test_a_request_that_is_only_polled(self):
        self.check("polled")

    def test_a_rank_that_aborts(self):
        self.check("aborts")

    def test_time_limits_that_differ_by_rank(self):
        for ranks in (2, 3):
            result = launched(ranks, "differ", check=False, timeout=60)
            text = "LOCKSTEP_JOIN_FAILED: lockstep_join: timeout_s is 7.5 s on rank 1 and 20 s on rank 0; set it alike on all ranks"
            # The launcher prints a line once that several ranks print together.
            said = [said for line in result.stdout.splitlines() if text in line for said in re.match(r"\[([\d, -]+)\]", line)[1].split(", ")]
            count = sum(int(part.rpartition("-")[2]) - int(part.partition("-")[0]) + 1 for part in said)
            self.assertEqual(count, ranks, result.stdout + result.stderr)

    def test_a_request_to_stop(self):
        for ranks in (1, 2, 3):
            result = launched(ranks, "stops_by_itself", check=False)
            self.assertEqual((result.stdout.count("stops_by_itself: ok"), result.returncode), (ranks, 61), result.stderr)

    def test_the_launcher_names_a_killed_rank(self):
        for ranks in (2, 3):
            result = launched(ranks, "killed", check=False)
            self.assertEqual(result.returncode, 41, result.stderr)
            self.assertRegex(result.stderr, rf"rank {ranks - 1} .*SIGKILL")

    def test_the_launcher_asks_all_to_stop(self):
        folder = tempfile.TemporaryDirectory(prefix="lockstep_test_")
        self.addCleanup(folder.cleanup)
        process = subprocess.Popen([LOCKSTEP, "run", "-n", "2", "--tee", "all", "--", C_RANK, "trains_until_stopped"],
                                   env=environment(), cwd=folder.name, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.assertIn("step", process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        self.assertEqual(out.count("trains_until_stopped: ok"), 2, err)


class WithoutLauncher(unittest.TestCase):
    """Ranks that find each other by the variables of their launcher."""

    def ranks(self, number, test, variables, expect=0, also=None):
        """Starts the ranks by hand; returns what they wrote. `also`: called while they run."""
        started = [subprocess.Popen([C_RANK, test], env=environment(**{k: str(v) for k, v in variables(rank).items()}),
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(number)]
        texts = [process.communicate(timeout=60) for process in started]
        for process, text in zip(started, texts):
            self.assertIn(process.returncode, (expect, -signal.SIGKILL), text)
        return [out + err for out, err in texts]

    def torchrun(self, number, local=None, **more):
        def variables(rank):
            found = {"RANK": rank, "WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29512, **more}
            return {**found, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local} if local else found
        return variables

    def test_torchrun_s_variables(self):
        for number in (2, 3):
            run_id = f"{os.getpid()}"
            texts = self.ranks(number, "every_collective", self.torchrun(number, number, TORCHELASTIC_RUN_ID=run_id))
            self.assertEqual("".join(texts).count("every_collective: ok"), number)
            self.ranks(number, "join_again", self.torchrun(number, TORCHELASTIC_RUN_ID=run_id))

    def test_a_request_to_stop(self):
        texts = self.ranks(2, "stops_by_itself", self.torchrun(2, 2, TORCHELASTIC_RUN_ID=f"s{os.getpid()}"))
        self.assertEqual("".join(texts).count("stops_by_itself: ok"), 2)

    def test_survivors_of_a_killed_rank(self):
        for number in (2, 3):
            texts = self.ranks(number, "killed", self.torchrun(number, number, TORCHELASTIC_RUN_ID=f"k{os.getpid()}"))
            self.assertEqual("".join(texts).count("killed: ok"), number - 1, texts)

    def test_slurm(self):
        def variables(rank):
            return {"SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": 2, "SLURM_LOCALID": rank,
                    "SLURM_STEP_NUM_NODES": 1}
        self.assertEqual("".join(self.ranks(2, "parts", variables)).count("parts: ok"), 2)

    def test_mpi_s_launchers(self):
        for name, options in (("mpirun.openmpi", ["--allow-run-as-root", "--oversubscribe"]),
                              ("mpirun.mpich", [])):
            with self.subTest(name):
                if shutil.which(name) is None:
                    self.skipTest(f"{name} is not installed")
                for number in (2, 3):
                    for test in ("every_collective", "join_again"):
                        result = run(name, *options, "-n", number, C_RANK, test, timeout=60)
                        self.assertEqual(result.stdout.count(f"{test}: ok"), number, result.stderr)

    def test_a_program_without_a_launcher_is_a_world_of_one(self):
        start = time.monotonic()
        self.assertEqual(run(C_RANK, "every_collective").stdout, "every_collective: ok on rank 0\n")
        self.assertLess(time.monotonic() - start, 20)

    def test_ranks_on_several_machines_are_refused(self):
        variables = self.torchrun(4, 2)
        text, = self.ranks(1, "join", variables, expect=9)
        self.assertRegex(text, r"^LOCKSTEP_SEVERAL_MACHINES: .*4 ranks, and only 2 of them on the machine of rank 0; .*one machine")
        text, = self.ranks(1, "join", lambda rank: {"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 4,
                                                     "OMPI_COMM_WORLD_LOCAL_RANK": 0, "OMPI_COMM_WORLD_LOCAL_SIZE": 1}, expect=9)
        self.assertRegex(text, "^LOCKSTEP_SEVERAL_MACHINES: Open MPI")
        text, = self.ranks(1, "join", lambda rank: {"SLURM_STEP_ID": 0, "SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 2,
                                                     "SLURM_STEP_NUM_NODES": 2}, expect=9)
        self.assertRegex(text, "^LOCKSTEP_SEVERAL_MACHINES: Slurm")

    def test_missing_ranks_are_named(self):
        for first, missing in ((0, "rank 1 has not joined"), (1, "no rank 0 on this machine")):
            variables = self.torchrun(2, 2, TORCHELASTIC_RUN_ID=f"m{os.getpid()}", LOCKSTEP_JOIN_TIMEOUT_S=0.3)
            text, = self.ranks(1, "join", lambda rank: variables(first), expect=9)
            self.assertRegex(text, f"^LOCKSTEP_JOIN_FAILED: .*{missing}")

    def test_wrong_variables_are_named(self):
        text, = self.ranks(1, "join", lambda rank: {"RANK": 5, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}, expect=9)
        self.assertRegex(text, "^LOCKSTEP_JOIN_FAILED: RANK=5 contradicts WORLD_SIZE=2")
        text, = self.ranks(1, "join", lambda rank: {"LOCKSTEP_JOIN_TIMEOUT_S": "soon"}, expect=9)
        self.assertRegex(text, "LOCKSTEP_JOIN_TIMEOUT_S=soon is not a number")

    def test_a_rank_that_cannot_open_what_it_needs_tells_the_others(self):
        variables = self.torchrun(2, 2, TORCHELASTIC_RUN_ID=f"d{os.getpid()}")
        poor = subprocess.Popen(["sh", "-c", f"ulimit -n 8; exec {C_RANK} join"], env=environment(**{k: str(v) for k, v in variables(1).items()}),
                                stdout=subprocess.PIPE, text=True)
        text, = self.ranks(1, "join", variables, expect=9)
        self.assertRegex(poor.communicate(timeout=60)[0], "^LOCKSTEP_[A-Z_]+: .*descriptor")
        self.assertRegex(text, "rank 1.*descriptor")


if __name__ == "__main__":
    main()
