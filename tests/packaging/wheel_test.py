"""The wheel that scripts/wheel makes: what is in it, and that it trains from Python and from C++ in an environment that has nothing but torch."""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BUILD, SOURCE, ProgramTest, main, python_with_torch, run, thorough  # noqa: E402

CMAKE = "lockstep/lib/cmake/Lockstep/"
# Of the component `wheel`, besides headers.
CPP = {"lockstep/bin/lockstep", "lockstep/lib/liblockstep.so", "lockstep/libexec/lockstep/lockstep-tour", "lockstep/libexec/lockstep/lockstep-doctor-probe",
       "lockstep/share/doc/lockstep/copyright", *(CMAKE + name for name in ("LockstepConfig.cmake", "LockstepConfigVersion.cmake", "LockstepWheelTargets.cmake",
                                                                            "LockstepWheelTargets-release.cmake", "LockstepTorchHere.cmake"))}
HEADERS = {"lockstep/include/lockstep/" + os.path.basename(path) for path in glob.glob(os.path.join(SOURCE, "include/lockstep/*.h"))
           if os.path.basename(path) not in ("c.h", "mpi.h")}  # of libraries that are not in it
PYTHON = {"lockstep/" + os.path.basename(path) for path in glob.glob(os.path.join(SOURCE, "python/lockstep/*")) if os.path.isfile(path)}
# What each Linux of that glibc has, and torch.
MAY_NEED = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|z|torch|torch_cpu|torch_python|c10)|ld-linux-x86-64)\.so(\.\d+)?$")
# What the blocks of python/README.md leave to the reader.
PRELUDE = """\
from collections.abc import Iterable
import torch

class Net(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)

loader: Iterable[tuple[torch.Tensor, torch.Tensor]] = [(torch.ones(2, 4), torch.tensor([0, 1])) for _ in range(3)]
"""


def blocks(document, language):
    with open(os.path.join(SOURCE, document), encoding="utf-8") as file:
        return re.findall(rf"^```{language}\n(.*?)^```", file.read(), re.MULTILINE | re.DOTALL)


def files_under(folder):
    return {os.path.relpath(os.path.join(root, name), folder) for root, _, names in os.walk(folder) for name in names}


def needed(path):
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", path).stdout)


def binaries(site):
    return [os.path.join(site, name) for name in sorted(files_under(site)) if ".so" in os.path.basename(name) or name.startswith(("lockstep/bin/", "lockstep/libexec/"))]


class Folder(ProgramTest):
    def write(self, name, text):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def write_cpp_project(self, folder):
        self.write(f"{folder}/train.cpp", blocks("README.md", "cpp")[0])
        self.write(f"{folder}/CMakeLists.txt", blocks("README.md", "cmake")[0])
        return os.path.join(self.folder, folder)


class Files(Folder):
    """Of the component, and of the package's sources: a second, and nothing is compiled."""

    def setUp(self):
        super().setUp()
        self.site = os.path.join(self.folder, "site")
        run("cmake", "--install", BUILD, "--component", "wheel", "--prefix", os.path.join(self.site, "lockstep"))

    def test_the_component_holds_all_of_cpp_and_no_place_of_this_machine(self):
        self.assertEqual(files_under(self.site), CPP | HEADERS)
        for name in CPP | HEADERS:
            if name.startswith((CMAKE, "lockstep/include")):
                with open(os.path.join(self.site, name), encoding="utf-8") as file:
                    self.assertNotRegex(file.read(), f"@CMAKE|{re.escape(SOURCE)}", name)

    def test_the_library_brings_no_library_of_archives(self):
        """libarchive.so needs nine others; they would all lie in the wheel."""
        names = needed(os.path.join(self.site, "lockstep/lib/liblockstep.so"))
        self.assertIn("libtorch_cpu.so", names)
        self.assertEqual([name for name in names if not MAY_NEED.match(name) and not name.startswith(("libjpeg.", "libpng16."))], [])

    def test_cmake_says_in_a_sentence_that_there_is_no_torch(self):
        project = self.write_cpp_project("project")
        said = run("cmake", "-B", "build", f"-DCMAKE_PREFIX_PATH={self.site}/lockstep", cwd=project, check=False)
        self.assertNotEqual(said.returncode, 0)
        self.assertRegex(" ".join(said.stderr.split()), r"this Lockstep needs LibTorch 2\.\d+, and none was found; give the folder with its TorchConfig\.cmake "
                                                        r"as Torch_DIR, or install the wheel \(pip install torch==2\.\d+\.\*\)")

    def python(self, *arguments, torch=None):
        """Runs this Python where the package's sources were built for torch 2.13, and torch is `torch`."""
        shutil.copytree(os.path.join(SOURCE, "python/lockstep"), os.path.join(self.site, "lockstep"), dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        self.write("site/lockstep/_built.py", 'TORCH = "2.13"\n')
        if torch:
            self.write("site/torch/__init__.py", f'__version__ = "{torch}"\n')
            self.write(f"site/torch-{torch}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
        return subprocess.run([sys.executable, "-S", *arguments], capture_output=True, text=True, timeout=60, cwd=self.folder,
                              env={"PATH": os.environ["PATH"], "PYTHONPATH": self.site, "PYTHONDONTWRITEBYTECODE": "1"})

    def test_without_torch_a_sentence_says_what_to_install(self):
        sentence = 'lockstep needs torch 2.13, and this Python has none: pip install "torch==2.13.*"'
        said = self.python("-c", "import lockstep")
        self.assertEqual((said.returncode, said.stderr.splitlines()[-1]), (1, f"ImportError: {sentence}"))
        said = self.python("-m", "lockstep")
        self.assertEqual((said.returncode, said.stderr), (1, ""))
        self.assertIn(f"torch     {sentence}\n", said.stdout)
        said = self.python("-m", "lockstep", "--cmake-prefix")
        self.assertEqual((said.returncode, said.stdout, said.stderr), (0, f"{self.site}/lockstep\n", ""))

    def test_with_another_release_of_torch_a_sentence_says_what_to_install(self):
        sentence = ('this lockstep was built for torch 2.13, but torch 2.12.1 is installed: pip install "torch==2.13.*", or install the lockstep for torch 2.12 '
                    "(its wheel, or pip install ./python in Lockstep's sources)")
        # torch itself, which imports the package, goes on: programs that do not use it are none of its affair.
        for program in ("import lockstep", "import torch, lockstep; lockstep.attach", "import torch; from lockstep import attach"):
            said = self.python("-c", program, torch="2.12.1")
            self.assertEqual((said.returncode, said.stderr.splitlines()[-1]), (1, f"ImportError: {sentence}"), program)
        said = self.python("-c", "import torch, lockstep; print(lockstep.__version__)", torch="2.12.1")
        self.assertEqual((said.returncode, said.stdout), (0, "0.1.0\n"), said.stderr)
        said = self.python("-m", "lockstep", torch="2.12.1")
        self.assertEqual((said.returncode, said.stderr), (1, ""))
        self.assertIn(f"torch     {sentence}\n", said.stdout)
        self.assertEqual(self.python("-m", "lockstep", "--cmake-prefix", torch="2.12.1").stdout, f"{self.site}/lockstep;{self.site}/torch/share/cmake\n")

    def test_what_is_asked_wrongly(self):
        said = self.python("-m", "lockstep", "--cmake_prefix")
        self.assertEqual((said.returncode, said.stdout), (2, ""))
        self.assertIn("--cmake-prefix    prints the CMAKE_PREFIX_PATH", said.stderr)
        os.remove(os.path.join(self.site, CMAKE, "LockstepConfig.cmake"))
        said = self.python("-m", "lockstep", "--cmake-prefix")
        self.assertEqual((said.returncode, said.stdout), (1, ""))
        self.assertEqual(len(said.stderr.splitlines()), 1)
        self.assertIn("built from source, without the C++ library; install Lockstep's wheel", said.stderr)


@thorough
class Wheel(Folder):
    """Built of what the build folder has, and installed into an environment of its own. torch is there, as links to where it is installed."""

    @classmethod
    def setUpClass(cls):
        cls.python = python_with_torch()
        if cls.python is None:
            raise unittest.SkipTest("no Python with torch was found; scripts/setup installs one")
        if not os.path.exists(os.path.join(SOURCE, ".setup/wheel/installed")):
            raise unittest.SkipTest("auditwheel is not there; scripts/setup --wheel installs it")
        cls.home = tempfile.mkdtemp(prefix="lockstep_test_")
        cls.addClassCleanup(shutil.rmtree, cls.home, ignore_errors=True)
        cls.said = run(os.path.join(SOURCE, "scripts/wheel"), "--build", BUILD, "--output", os.path.join(cls.home, "wheels"), timeout=400).stdout
        cls.wheel, = glob.glob(os.path.join(cls.home, "wheels/*.whl"))
        cls.venv = os.path.join(cls.home, "venv")
        run(cls.python, "-m", "venv", cls.venv)
        cls.site, = glob.glob(os.path.join(cls.venv, "lib/python3*/site-packages"))
        torch_site = run(cls.python, "-c", "import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))").stdout.strip()
        for name in os.listdir(torch_site):
            if not os.path.exists(os.path.join(cls.site, name)) and not name.startswith(("lockstep", "__")):
                os.symlink(os.path.join(torch_site, name), os.path.join(cls.site, name))
        before = files_under(cls.site)
        began = time.monotonic()
        run(os.path.join(cls.venv, "bin/pip"), "install", "--disable-pip-version-check", "--no-index", cls.wheel)
        cls.seconds = time.monotonic() - began
        cls.files = files_under(cls.site) - before

    def in_venv(self, *command, check=True, cwd=None, timeout=300):
        bare = {"PATH": f"{self.venv}/bin:/usr/bin:/bin", "HOME": self.home, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        return run(*command, env=bare, cwd=cwd or self.folder, timeout=timeout, check=check)

    def test_what_is_in_it(self):
        self.assertLess(self.seconds, 30, "a second on a quiet machine; other tests may run beside this one")
        tag = "".join(map(str, sys.version_info[:2])) if self.python == sys.executable else r"3\d+"
        self.assertRegex(os.path.basename(self.wheel), rf"^lockstep_ddp-0\.1\.0\+torch2\.\d+-cp{tag}-cp{tag}-manylinux_2_\d+_x86_64\.whl$")
        self.assertRegex(self.said, r"\.whl  [\d.]+ MB, \d+ s\n$")
        names = {re.sub(r"\.cpython-\S+\.so$", ".so", name) for name in self.files if ".dist-info" not in name and "__pycache__" not in name}
        licences = {name for name in names if name.endswith(".copyright")}
        bundled = {name for name in names if name.startswith("lockstep_ddp.libs/")}
        self.assertEqual(names - licences - bundled, PYTHON | CPP | HEADERS | {"lockstep/_C.so", "lockstep/_built.py"})
        self.assertEqual(sorted(re.sub(r".*/(lib\w+?)(16)?-\w+\.so.*", r"\1", name) for name in bundled), ["libcrypto", "libjpeg", "libpng", "libssl"])
        for part in ("libarchive", "libjpeg", "libpng", "libssl", "zlib"):
            self.assertTrue(any(os.path.basename(name).startswith(part) for name in licences), f"no licence of {part} in {licences}")

    def test_it_needs_nothing_but_torch_and_the_cpp_runtime(self):
        own = {os.path.basename(path) for path in glob.glob(os.path.join(self.site, "lockstep_ddp.libs/*"))}
        paths = [path for path in binaries(self.site) if os.path.relpath(path, self.site) in self.files]
        self.assertEqual(len(paths), 9)
        for path in paths:
            self.assertEqual([name for name in needed(path) if not MAY_NEED.match(name) and name not in own], [], path)
            places = re.findall(r"R(?:UN)?PATH.*\[(.*)\]", run("readelf", "-d", path).stdout)
            self.assertEqual([place for line in places for place in line.split(":") if not place.startswith("$ORIGIN")], [], path)

    def test_it_says_what_it_is_and_the_launcher_starts(self):
        said = self.in_venv("python3", "-m", "lockstep").stdout
        self.assertRegex(said, r"(?m)^torch     2\.\S+; built with 2\.")
        self.assertIn("engines: shared memory, Gloo", self.in_venv("lockstep", "--version").stdout)
        self.assertRegex(self.in_venv("lockstep", "doctor").stdout, r"(?m)^ +backends +shm works, gloo works$")

    def test_the_python_lines_of_its_readme_run(self):
        training, group = blocks("python/README.md", "python")
        self.write("train.py", PRELUDE + training + "print('rank', replica.rank, 'of', replica.world_size)\n")
        self.write("group.py", group.replace("dist.all_reduce(torch.ones(4))", "ones = torch.ones(4)\ndist.all_reduce(ones)\nprint(ones.tolist())"))
        said = self.in_venv("lockstep", "run", "-n", 2, "--", "python3", "train.py").stdout
        self.assertEqual(said.splitlines(), ["rank 0 of 2"])
        said = self.in_venv("python3", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "group.py").stdout
        self.assertEqual(said.splitlines(), 2 * ["[2.0, 2.0, 2.0, 2.0]"])

    def test_the_types_of_these_lines(self):
        for i, block in enumerate(blocks("python/README.md", "python")):
            self.write(f"block{i}.py", PRELUDE.replace("import torch\n", "") + block if i else PRELUDE + block)
        self.write("wrong.py", "import torch, lockstep\nreplica = lockstep.attach(torch.nn.Linear(1, 1))\nreplica.stats().backward_ms + 'ms'\nlockstep.attach(4)\n")
        # torch's own backward() has no types.
        mypy = [os.path.join(SOURCE, ".setup/wheel/bin/mypy"), "--python-executable", os.path.join(self.venv, "bin/python3"), "--strict", "--allow-untyped-calls"]
        said = self.in_venv(*mypy, "block0.py", "block1.py", "wrong.py", check=False, timeout=600).stdout
        self.assertEqual(re.findall(r"(?m)^(\S+:\d+): error", said), ["wrong.py:3", "wrong.py:4"], said)

    def test_a_cpp_program_is_built_and_trains(self):
        """The lines of README, in an empty folder, within a minute of a quiet machine."""
        project = self.write_cpp_project("train")
        lines, = [block for block in blocks("README.md", "sh") if "--cmake-prefix" in block]
        lines = "".join(line + "\n" for line in lines.splitlines() if not line.startswith(("pip ", "cd ")))
        self.assertEqual(len(lines.splitlines()), 2)
        began = time.monotonic()
        said = self.in_venv("bash", "-euo", "pipefail", "-c", lines, cwd=project, timeout=400)
        print(f"from the wheel to a trained model: {time.monotonic() - began:.1f} s, {self.seconds:.1f} s for pip before")
        self.assertEqual(said.stdout[-len("epoch 1 done\nepoch 2 done\n"):], "epoch 1 done\nepoch 2 done\n")
        used = run("ldd", os.path.join(project, "build/train")).stdout
        self.assertIn(f"liblockstep.so => {self.site}/lockstep/lib/liblockstep.so", used)


if __name__ == "__main__":
    main()
