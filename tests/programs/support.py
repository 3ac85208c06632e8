"""What tests of whole programs share. They run the binaries of the build as a user would."""

import gzip
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(SOURCE, "scripts"))
from python_with_torch import python_with_torch  # noqa: E402, F401
BUILD = os.path.abspath(os.environ.get("LOCKSTEP_BUILD_DIR", os.path.join(SOURCE, "build")))
BIN = os.path.join(BUILD, "bin")
LOCKSTEP = os.path.join(BIN, "lockstep")
TRAIN = os.path.join(BIN, "train_fashion_mnist")
DATA = "/usr/share/datasets/fashion-mnist"

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def environment(**more):
    """This process's environment without variables that an outer launcher may have set."""
    clean = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES and not k.startswith(("OMPI_", "PMI", "SLURM_"))}
    clean.update(more)
    return clean


def dies_with_us(*command):
    """The command, killed when the thread that starts it ends: a test that is killed cleans nothing up. What the command starts is its own affair."""
    return ["setpriv", "--pdeathsig", "KILL", "--", *map(str, command)]


def run(*command, timeout=120, env=None, cwd=None, check=True):
    """Runs a command; after `timeout` seconds (of a quiet machine: other hosts, with other tests beside, get three times as many) it is killed, with
    everything it started. Returns the finished process."""
    timeout *= 3
    process = subprocess.Popen(dies_with_us(*command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=env or environment(), cwd=cwd, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{command} is not done after {timeout} s\n{out}\n{err}")
    result = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check and result.returncode != 0:
        raise AssertionError(f"{command} ended with {result.returncode}\n{out}\n{err}")
    return result


def write_small_data(folder, train=512, test=99):
    """The first images of Fashion-MNIST as raw IDX files, for runs of a second."""
    for name, count in (("train", train), ("t10k", test)):
        for kind, header, item in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            with gzip.open(os.path.join(DATA, f"{name}-{kind}-ubyte.gz")) as file:
                content = file.read(header + count * item)
            with open(os.path.join(folder, f"{name}-{kind}-ubyte"), "wb") as file:
                file.write(content[:4] + struct.pack(">I", count) + content[8:])


def read_safetensors(path):
    """The header of a .safetensors file, without its metadata, the metadata, and the bytes of the tensors."""
    with open(path, "rb") as file:
        length, = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        return header, header.pop("__metadata__", {}), file.read()


def write_safetensors(path, tensors, metadata=None):
    """`tensors`: name -> (dtype, shape, bytes)."""
    header, data = {"__metadata__": metadata} if metadata else {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def is_in_exec(pid, seen):
    """Whether a process shows `seen` bytes of its environment, none or a part, because an exec is about to put another in place or just has."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    is_ending_or_of_the_kernel = 0x4 | 0x200000
    return fields[0] not in (b"Z", b"X") and not int(fields[6]) & is_ending_or_of_the_kernel and (
        int(fields[48]) == 0 or int(fields[48]) - int(fields[47]) > seen)


def marked_processes(mark):
    """Living processes that were started with `mark`, a NAME=value, in their environment; rank by pid. As src/base/process_search.h has it."""
    found = {}
    asked = list(filter(str.isdigit, os.listdir("/proc")))
    deadline = time.monotonic() + 0.5
    while asked:
        later = []
        for pid in asked:
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    block = file.read()
            except OSError:
                continue
            variables = block.decode(errors="replace").split("\0")
            if mark in variables:
                found[int(pid)] = next((v[len("RANK="):] for v in variables if v.startswith("RANK=")), None)
            elif is_in_exec(pid, len(block)):
                later.append(pid)
        if time.monotonic() > deadline:
            break
        asked = later
        time.sleep(0.001 if later else 0)
    return found


class ProgramTest(unittest.TestCase):
    """A test with an empty folder of its own and the small data set."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        if not os.path.isdir(DATA):
            self.skipTest("no Fashion-MNIST: apt-get install dataset-fashion-mnist")
        self.data = os.path.join(self.folder, "data")
        os.mkdir(self.data)
        write_small_data(self.data)

    def figures(self, *launcher, arguments=(), env=None, name="out", timeout=120):
        """The JSON of a small training started by `launcher`."""
        path = os.path.join(self.folder, name + ".json")
        run(*launcher, TRAIN, "--data", self.data, "--epochs", 2, "--batch-size", 16, "--json", path,
            "--run-dir", os.path.join(self.folder, "run_" + name), *arguments, env=env, cwd=self.folder, timeout=timeout)
        with open(path) as file:
            return json.load(file)


def write_text(path, size):
    """A text of so many bytes: the beginning of a licence."""
    with open("/usr/share/common-licenses/GPL-3", "rb") as whole, open(path, "wb") as part:
        part.write(whole.read(size))


class TextTraining:
    """For a TestCase: a folder of its own with a small text, on which programs are trained, whose processes are marked."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.mark = f"LOCKSTEP_TEST_MARK={self.folder}"
        write_text(self.path("text"), 6000)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def train(self, launcher, program, *arguments):
        """Starts `program` under `launcher` on the text, for four epochs."""
        command = [*launcher, os.path.join(BIN, program), "--text", self.path("text"), "--epochs", "4", "--width", "32", "--heads", "2", "--layers", "3",
                   "--block-length", "32", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                   env=environment(OMP_NUM_THREADS="1", LOCKSTEP_TEST_MARK=self.folder))
        self.addCleanup(lambda: process.poll() is None and process.kill())
        return process


def thorough(test):
    """Marks a test, or a class of tests, that is left to make test-thorough."""
    test.thorough = True
    return test


class Loader(unittest.TestLoader):
    def __init__(self, marked):
        super().__init__()
        self.marked = marked

    def getTestCaseNames(self, case):
        return [name for name in super().getTestCaseNames(case)
                if self.marked == any(getattr(of, "thorough", False) for of in (case, getattr(case, name)))]


def main():
    """Runs a file's tests but the marked ones, or those alone: --thorough. A test that is named runs in any case."""
    marked = "--thorough" in sys.argv
    names = [argument for argument in sys.argv[1:] if argument != "--thorough"]
    unittest.main(argv=[sys.argv[0], "-v", *names], testLoader=Loader(marked))
