"""The package as its users get it: a wheel of the sources alone, installed from its file, with its types."""

import ast
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(os.path.dirname(HERE))


def pip(*arguments):
    # In one's own environment a wheel is for the torch that is there; and no index is asked for anything.
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], capture_output=True, text=True, timeout=1500,
                          start_new_session=True,  # without the terminal of whoever runs this: the build writes to that
                          env={key: value for key, value in os.environ.items() if key not in ("LOCKSTEP_LIBRARY", "PYTHONPATH")})
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout + done.stderr


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp()
        tree = os.path.join(cls.folder, "tree")
        for name in ("include", "src"):
            os.makedirs(tree, exist_ok=True)
            os.symlink(os.path.join(SOURCE, name), os.path.join(tree, name))
        shutil.copytree(os.path.join(SOURCE, "python"), os.path.join(tree, "python"),
                        ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
        cls.said = pip("wheel", "-v", "--no-build-isolation", "--no-deps", "--wheel-dir", cls.folder, os.path.join(tree, "python"))
        cls.wheels = glob.glob(os.path.join(cls.folder, "lockstep_ddp-*.whl"))
        cls.site = os.path.join(cls.folder, "site")
        pip("install", "--no-deps", "--no-index", "--target", cls.site, *cls.wheels)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def run_python(self, *arguments):
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=200,
                              env={**os.environ, "PYTHONPATH": self.site})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_it_says_what_it_is(self):
        import torch

        said = self.run_python("-m", "lockstep")
        self.assertEqual(len(self.wheels), 1)
        self.assertRegex(said, r"(?m)^lockstep +0\.1\.0, Python 3\.")
        self.assertIn(f"torch     {torch.__version__}; built with {torch.__version__.split('+')[0]}", said)
        self.assertRegex(said, r"(?m)^engine +shared memory, (AVX-512|AVX2|baseline) kernels; one machine, up to 64 ranks")
        self.assertRegex(said, r"(?m)^machine +\d+ CPUs for this process")

    def test_its_build_says_what_it_does(self):
        import torch

        self.assertRegex(self.said, rf"(?m)^ *lockstep: compiling for torch {re.escape(torch.__version__)}, about \d+ minutes on 2 cores\. Part 1 of 2: \d\d files")
        self.assertRegex(self.said, r"(?m)^ *lockstep: part 2 of 2: \d files that include torch$")

    def test_pip_requires_that_release_of_torch(self):
        import torch

        release = ".".join(torch.__version__.split(".")[:2])
        with open(glob.glob(os.path.join(self.site, f"lockstep_ddp-0.1.0+torch{release}.dist-info/METADATA"))[0]) as file:
            self.assertIn(f"\nRequires-Dist: torch=={release}.*\n", file.read())

    def build_with(self, torch):
        """What a build says where `import torch` runs this."""
        folder = os.path.join(self.folder, "other")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "torch.py"), "w") as file:
            file.write(torch)
        done = subprocess.run([sys.executable, os.path.join(SOURCE, "python/setup.py"), "--version"], capture_output=True, text=True, timeout=60,
                              cwd=self.folder, env={**os.environ, "PYTHONPATH": folder})
        self.assertNotEqual(done.returncode, 0)
        return done.stderr

    def test_a_build_without_a_torch_that_fits_says_what_to_install(self):
        self.assertRegex(self.build_with("raise ImportError\n"), r"^lockstep is built against the torch that is installed, and this Python has none: pip install \S+, then try again\n$")
        self.assertRegex(self.build_with("__version__ = '2.10.1'\n"),
                         r"^lockstep is built against torch 2\.11 to 2\.\d+, but torch 2\.10\.1 is installed: pip install \S+, then try again\n$")

    def test_it_trains(self):
        out = self.run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                              os.path.join(HERE, "attached.py"), "none")
        self.assertEqual(sorted(line.split(":")[0] for line in out.splitlines() if "loss" in line), ["loss of rank 0", "loss of rank 1"])

    def test_types(self):
        """What the stubs promise is there."""
        package = os.path.join(self.site, "lockstep")
        self.assertTrue(os.path.exists(os.path.join(package, "py.typed")))
        with open(os.path.join(package, "_C.pyi")) as file:
            stub = ast.parse(file.read())
        promised = {node.name: [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
                    for node in stub.body if isinstance(node, ast.ClassDef)}
        self.assertIn("ReductionStats", promised)
        with open(os.path.join(package, "__init__.pyi")) as file:
            names = [alias.asname for node in ast.parse(file.read()).body if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname]
        self.assertIn("attach", names)
        self.run_python("-c", f"import torch, lockstep; from lockstep import _C; [getattr(lockstep, name) for name in {names}]; "
                              f"[getattr(getattr(_C, kind), name) for kind, names in {promised}.items() for name in names]; "
                              "assert sorted(lockstep.__all__) == sorted([*" + repr(names) + ", 'register'])")


if __name__ == "__main__":
    unittest.main(argv=["wheel_test", "-v", *sys.argv[1:]])
