"""Lockstep::mpi over two machines, which are network namespaces: two ranks of mpirun on each, and no memory between them."""

import os
import re
import select
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from hosts_test import ADDRESSES, Hosts, HostsTest  # noqa: E402
from support import BIN, environment, main  # noqa: E402

PACKAGES = {"openmpi": "openmpi-bin libopenmpi-dev", "mpich": "mpich libmpich-dev"}

# What depends on where ranks are, and each operation once over both engines; sizes and single machines are mpi_test's.
TESTS = ":".join(("MpiContext.*", "Engines/*.EveryOperation*/4_*", "Engines/*.SeveralGroups*/4_*", "Engines/*.RanksHold*/4_*",
                  "Places/*.TheProgramGoesOn*/4_*", "Places/*.TrainingHasTheBits*/4_*", "Places/*.ADifference*/3_mpi",
                  "Places/*.ARankThatLeaves*/4_*"))

# mpirun's ssh: `AGENT [OPTION...] HOST COMMAND...`. The machine has a name of its own, by which an MPI tells machines apart.
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$host" unshare -u sh -c "hostname $host; $*"
"""


class OverTwoMachines(HostsTest):
    def mpirun(self, hosts, kind, *rest):
        """mpirun on the first machine, which knows the names of both and asks no name server."""
        agent = os.path.join(self.folder, "agent")
        with open(os.open(agent, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o700), "w", encoding="utf-8") as file:
            file.write(AGENT)
        names = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, hosts.names))
        mounts = ""
        for name, text in {"hosts": names, "nsswitch.conf": "hosts: files\n"}.items():
            with open(os.path.join(self.folder, name), "w", encoding="utf-8") as file:
                file.write(text)
            mounts += f"mount --bind {self.folder}/{name} /etc/{name} && "
        slots = ",".join(name + ":2" for name in hosts.names)
        if kind == "openmpi":
            command = ["mpirun.openmpi", "--host", slots, "--bind-to", "none", "--mca", "plm_rsh_agent", agent, "--mca", "btl", "self,vader,tcp"]
        else:
            command = ["mpirun.mpich", "-hosts", slots, "-launcher", "ssh", "-launcher-exec", agent]
        return hosts.on(0, "unshare", "-m", "-u", "sh", "-c", f'{mounts}hostname {hosts.names[0]} && exec "$@"', "sh", *command, "-n", 4, *rest)

    def attempt(self, kind, silence):
        """Where the tests stood still for as many seconds, with the ranks' stacks, or None if they ended. What was done must be right in any case."""
        program = os.path.join(BIN, "mpi_test_" + kind)
        if not os.path.exists(program):
            self.skipTest(f"no {program}: apt-get install {PACKAGES[kind]}")
        with Hosts() as hosts:
            process = self.start(*self.mpirun(hosts, kind, program, "--gtest_color=no", "--gtest_filter=" + TESTS),
                                 env=environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMP_NUM_THREADS="1"))
            output, piece, stacks = b"", None, ""
            while piece != b"" and select.select([process.stdout], [], [], silence)[0]:
                piece = os.read(process.stdout.fileno(), 1 << 16)
                output += piece
            if piece != b"":
                stacks = stacks_of(program)
                hosts.kill_all()
            process.stdout.close()
            process.wait(timeout=20)
        output = output.decode(errors="replace")
        self.assertNotRegex(output, r"\[  FAILED  \]|rank \d: .*:\d+\n")
        if piece == b"":
            self.assertEqual(process.returncode, 0, output)
            self.assertRegex(output, r"\[  PASSED  \] [1-9]\d+ tests?\.")
            return None
        stood = (re.findall(r"\[ RUN      \] (\S+)", output) or ["before the first test"])[-1]
        print(f"{kind} stood still for {silence} s in {stood}:\n{stacks}", flush=True)
        return stood

    def test_openmpi(self):
        self.assertIsNone(self.attempt("openmpi", 100))

    def test_mpich(self):
        # MPICH's own progress over TCP stands still now and then, anywhere. A deadlock of ours has its place: standing still
        # twice in one test, or three times at all, is a failure. 25 s are less than the time limit of any operation here.
        stood = []
        while place := self.attempt("mpich", 25):
            self.assertNotIn(place, stood, "it stood still there before")
            stood.append(place)
            self.assertLess(len(stood), 3, f"it stood still in {stood}")


def stacks_of(program):
    """What the ranks are in, by gdb where it is there."""
    if not shutil.which("gdb"):
        return "no gdb here"
    told = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/exe") == os.path.realpath(program):
                told.append(subprocess.run(["gdb", "-p", pid, "-batch", "-nx", "-ex", "set debuginfod enabled off", "-ex", "thread apply all bt 12"],
                                           capture_output=True, text=True, timeout=60, check=False).stdout)
        except (OSError, subprocess.TimeoutExpired) as error:
            told.append(str(error))
    return "\n".join(told)


if __name__ == "__main__":
    main()
