"""Somebody else's program that uses MPI: find_package(Lockstep COMPONENTS mpi) in an installation, built in an empty folder, and run."""

import os
import re
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BUILD, environment, main, run  # noqa: E402

PROGRAM = r"""#include <lockstep/mpi.h>
#include <torch/torch.h>
#include <cstdio>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  {
    lockstep::Context context = lockstep::mpi_context(MPI_COMM_WORLD);
    at::Tensor sum = at::full({3}, context.rank() + 1, at::kDouble);
    context.group().all_reduce(sum);
    std::printf("rank %d of %d: %g\n", context.rank(), context.world_size(), sum[2].item<double>());
  }
  MPI_Finalize();
}
"""
PROJECT = """cmake_minimum_required(VERSION 3.20)
project(simulation CXX)
find_package(Lockstep REQUIRED COMPONENTS mpi)
add_executable(simulation simulation.cpp)
target_link_libraries(simulation PRIVATE Lockstep::mpi)
"""


def cached(name):
    with open(os.path.join(BUILD, "CMakeCache.txt"), encoding="utf-8") as file:
        found = re.search(rf"(?m)^{name}:\w+=(.*)$", file.read())
    return found[1] if found else ""


class MpiComponent(unittest.TestCase):
    def setUp(self):
        compiler = cached("MPI_CXX_COMPILER")
        if cached("LOCKSTEP_MPI") == "OFF" or not compiler or compiler.endswith("NOTFOUND"):
            self.skipTest("this build has no Lockstep::mpi: apt-get install openmpi-bin libopenmpi-dev")
        self.mpirun = os.path.join(os.path.dirname(compiler), os.path.basename(compiler).replace("mpicxx", "mpirun").replace("mpic++", "mpirun"))
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.prefix, self.project = os.path.join(self.folder, "prefix"), os.path.join(self.folder, "project")
        run("cmake", "--install", BUILD, "--prefix", self.prefix)
        os.mkdir(self.project)
        for name, content in (("simulation.cpp", PROGRAM), ("CMakeLists.txt", PROJECT)):
            with open(os.path.join(self.project, name), "w") as file:
                file.write(content)

    def configure(self, check=True):
        return run("cmake", "-B", "build", f"-DCMAKE_PREFIX_PATH={self.prefix}", cwd=self.project, check=check)

    def test_a_program_builds_and_runs(self):
        self.configure()
        run("cmake", "--build", "build", cwd=self.project, timeout=400)
        said = run(self.mpirun, "-n", 2, *(["--oversubscribe"] if "Open MPI" in run(self.mpirun, "--version").stdout else []), "build/simulation",
                   cwd=self.project, env=environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMP_NUM_THREADS="1"))
        self.assertEqual(sorted(line for line in said.stdout.splitlines() if line.startswith("rank ")), ["rank 0 of 2: 3", "rank 1 of 2: 3"])

    def test_an_installation_without_it_says_so(self):
        for root, _, names in os.walk(self.prefix):
            for name in names:
                if name.startswith("LockstepMpiTargets"):
                    os.remove(os.path.join(root, name))
        said = self.configure(check=False)
        self.assertNotEqual(said.returncode, 0)
        self.assertIn("this Lockstep was built without MPI; build it with -DLOCKSTEP_MPI=ON", " ".join(said.stderr.split()))


if __name__ == "__main__":
    main()
