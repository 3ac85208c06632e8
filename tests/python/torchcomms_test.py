"""The engine for torchcomms, in the torchcomms whose sources -DLOCKSTEP_TORCHCOMMS names: every operation against plain arithmetic,
groups of groups, what goes wrong, and DistributedDataParallel.

    torchcomms_test.py [TEST]...     ends with 77, and says why, where that was not given
"""

import glob
import os
import re
import socket
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "programs"))

import support  # noqa: E402

PROGRAMS = os.path.join(HERE, "torchcomms_programs.py")
ENGINE = os.path.join(support.BUILD, "lib/liblockstep_torchcomms.so")
KILLED = -9


def cache():
    with open(os.path.join(support.BUILD, "CMakeCache.txt")) as file:
        return dict(re.findall(r"^(\w+):\w+=(.*)$", file.read(), re.MULTILINE))


def assemble(folder, sources, library):
    """A Python package `torchcomms` out of links to the sources and to what was built of them."""
    package = os.path.join(folder, "torchcomms")
    os.mkdir(package)
    for path in glob.glob(os.path.join(sources, "comms/torchcomms/*")) + glob.glob(os.path.join(os.path.dirname(library), "*.so")):
        if not os.path.exists(os.path.join(package, os.path.basename(path))):
            os.symlink(path, os.path.join(package, os.path.basename(path)))
    facts = os.path.join(folder, "torchcomms-0.dist-info")
    os.mkdir(facts)
    for name, text in (("METADATA", "Name: torchcomms\nVersion: 0\n"), ("entry_points.txt", "[torchcomms.backends]\ngloo = torchcomms._comms_gloo\n")):
        with open(os.path.join(facts, name), "w") as file:
            file.write(text)


def free_port():
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


class TorchComms(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        facts = cache()
        assemble(cls.folder.name, facts["LOCKSTEP_TORCHCOMMS"], facts["LOCKSTEP_TORCHCOMMS_LIBRARY"])

    def common(self, size):
        """The environment of a communicator's ranks."""
        return support.environment(PYTHONPATH=f"{self.folder.name}:{os.environ['PYTHONPATH']}", TORCHCOMMS_BACKEND_LIB_PATH_LOCKSTEP=ENGINE, WORLD_SIZE=str(size),
                                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), OMP_NUM_THREADS="1", GLOG_minloglevel="2")

    def ranks(self, size, *arguments, machines="", timeout=100):
        """(exit code, output) of each rank. `machines`: a letter for each rank, the same for those that share one; all do by default."""
        common = {**self.common(size), "MACHINES": str(len(set(machines)) or 1)}
        processes = [subprocess.Popen(support.dies_with_us(sys.executable, PROGRAMS, *arguments), text=True,
                                      env={**common, "RANK": str(rank), **({"LOCKSTEP_MACHINE": machines[rank]} if machines else {})},
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in range(size)]
        try:
            outputs = [process.communicate(timeout=3 * timeout)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [(process.returncode, output) for process, output in zip(processes, outputs)]

    def all_end(self, size, *arguments, killed=(), **more):
        ended = self.ranks(size, *arguments, **more)
        wrong = [f"rank {rank}: {code}\n{output[-3000:]}" for rank, (code, output) in enumerate(ended) if code != (KILLED if rank in killed else 0)]
        self.assertEqual(wrong, [])

    def test_every_operation_in_each_form(self):
        for size in (1, 2, 3):
            self.all_end(size, "operations")

    def test_several_machines(self):
        for program in ("operations", "split", "train"):
            self.all_end(3, program, machines="aab")
        self.all_end(3, "killed", "waited", machines="aab", killed=[2])

    def test_split(self):
        for size in (2, 3):
            self.all_end(size, "split")

    def test_misuse(self):
        for size in (2, 3):
            self.all_end(size, "misuse")

    def test_a_killed_rank(self):
        for form in ("blocking", "waited", "watched"):
            self.all_end(3, "killed", form, killed=[2])

    def test_limits_and_abort(self):
        self.all_end(2, "late")

    def test_reconfigure(self):
        for size in (2, 3):
            self.all_end(size, "reconfigure", killed=[size - 1])

    def test_distributed_data_parallel(self):
        for size in (2, 3):
            self.all_end(size, "train")


class Often(TorchComms):
    """Two hundred of these."""

    test_several_machines = test_split = test_misuse = test_limits_and_abort = test_reconfigure = test_distributed_data_parallel = None

    def test_every_operation_in_each_form(self):
        for size in (2, 3):
            self.all_end(size, "operations", "200", timeout=600)

    def test_a_killed_rank(self):
        done = support.run(sys.executable, PROGRAMS, "kills", "200", timeout=600, env={**self.common(3), "RANK": "0"})
        self.assertEqual(done.returncode, 0)


if __name__ == "__main__":
    if not cache().get("LOCKSTEP_TORCHCOMMS"):
        print("SKIPPED BECAUSE this build has no engine for torchcomms: configure it with -DLOCKSTEP_TORCHCOMMS=<sources of torchcomms> (docs/backends.md)")
        sys.exit(77)
    unittest.main(verbosity=2)
