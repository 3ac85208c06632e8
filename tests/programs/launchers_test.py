"""The same training under every launcher gives the same bits."""

import os
import shutil

from support import LOCKSTEP, TRAIN, ProgramTest, environment, main, python_with_torch, run, thorough


class Launchers(ProgramTest):
    def expect_same(self, figures, reference):
        for key in ("world_size", "test_samples", "test_accuracy", "train_loss", "parameters_hash"):
            self.assertEqual(figures[key], reference[key], key)

    references = {}  # by number of ranks: the same for all tests, since the data are

    def reference(self, ranks=2):
        if ranks not in self.references:
            self.references[ranks] = self.figures(LOCKSTEP, "run", "-n", ranks, "--", name=f"reference{ranks}")
        return self.references[ranks]

    @thorough
    def test_two_runs_end_with_the_same_bits_and_count_every_sample(self):
        for ranks in (1, 2, 3):
            first = self.reference(ranks)
            self.expect_same(self.figures(LOCKSTEP, "run", "-n", ranks, "--", name=f"again{ranks}"), first)
            self.assertEqual(first["world_size"], ranks)
            self.assertEqual(first["test_samples"], 99)
            self.assertEqual(len(first["train_loss"]), 2)

    def test_alone(self):
        self.expect_same(self.figures(), self.reference(1))

    def test_torchrun(self):
        python = python_with_torch()
        if python is None:
            self.skipTest("no Python with torch, so no torchrun")
        figures = self.figures(python, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", 2, "--standalone")
        self.expect_same(figures, self.reference())

    def test_torchrun_shows_what_ended_a_program_that_catches_its_exceptions(self):
        python = python_with_torch()
        if python is None:
            self.skipTest("no Python with torch, so no torchrun")
        nowhere = os.path.join(self.folder, "nowhere")
        done = run(python, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", 2, "--standalone", TRAIN,
                   "--data", nowhere, cwd=self.folder, check=False)
        self.assertEqual(done.returncode, 1)
        cause = done.stderr[done.stderr.index("Root Cause"):]
        self.assertIn(nowhere, cause)
        self.assertNotIn("<N/A>", cause)

    def test_open_mpi(self):
        mpirun = shutil.which("mpirun.openmpi")
        if mpirun is None:
            self.skipTest("no mpirun.openmpi: apt-get install openmpi-bin")
        allow = environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        self.expect_same(self.figures(mpirun, "-n", 2, "--oversubscribe", env=allow), self.reference())

    def test_open_mpi_through_a_shell(self):
        mpirun = shutil.which("mpirun.openmpi")
        if mpirun is None:
            self.skipTest("no mpirun.openmpi: apt-get install openmpi-bin")
        allow = environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        figures = self.figures(mpirun, "-n", 2, "--oversubscribe", "sh", "-c", '"$@"; exit $?', "sh", env=allow)
        self.expect_same(figures, self.reference())

    def test_mpich(self):
        mpirun = shutil.which("mpirun.mpich")
        if mpirun is None:
            self.skipTest("no mpirun.mpich: apt-get install mpich")
        self.expect_same(self.figures(mpirun, "-n", 2), self.reference())

    def test_slurm_s_variables_on_one_machine(self):
        # Without Slurm: two processes of one parent get the variables that srun would set.
        script = ('for r in 0 1; do SLURM_PROCID=$r SLURM_LOCALID=$r SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 '
                  'SLURM_STEP_NUM_NODES=1 "$@" & pids="$pids $!"; done; for p in $pids; do wait $p || exit 1; done')
        self.expect_same(self.figures("sh", "-c", script, "sh"), self.reference())

    def test_nothing_is_left_in_the_working_folder(self):
        self.figures(LOCKSTEP, "run", "-n", 2, "--", name="reference2")
        left = set(os.listdir(self.folder)) - {"data", "run_reference2", "reference2.json"}
        self.assertEqual(left, {"runs"} & left)


if __name__ == "__main__":
    main()
