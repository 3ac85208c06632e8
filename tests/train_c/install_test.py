"""Somebody else's project in C that trains: what docs/train_c.md shows, built in an empty folder against an installation, and run."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BUILD, LOCKSTEP, SOURCE, environment, main, python_with_torch, run  # noqa: E402

HEADER = os.path.join(SOURCE, "include/lockstep/train_c.h")


def block(language):
    with open(os.path.join(SOURCE, "docs/train_c.md")) as file:
        found, = re.findall(rf"^```{language}\n(.*?)^```", file.read(), re.MULTILINE | re.DOTALL)
    return found


def exported(library):
    names = run("nm", "-D", "--defined-only", library).stdout
    return set(re.findall(r" T (\w+)", names)), set(re.findall(r" [BDRVWu] (\w+)", names))


class Installed(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.prefix = os.path.join(self.folder, "prefix")
        run("cmake", "--install", BUILD, "--prefix", os.path.join(self.folder, "first"), "--component", "lockstep_train")
        os.rename(os.path.join(self.folder, "first"), self.prefix)  # an installation may be moved
        for name, content in (("surrogate.c", block("c")), ("CMakeLists.txt", block("cmake"))):
            with open(os.path.join(self.folder, name), "w") as file:
                file.write(content)

    def check(self, program):
        python = python_with_torch()
        if not python:
            self.skipTest("no Python here has torch, which writes TorchScript")
        run(python, os.path.join(SOURCE, "tests/train_c/modules.py"), self.folder)
        shutil.copy(os.path.join(self.folder, "float.pt"), os.path.join(self.folder, "net.pt"))
        for ranks in (1, 2):
            said = run(LOCKSTEP, "run", "-n", ranks, "--", program, cwd=self.folder, env=environment(LD_LIBRARY_PATH=self.libraries())).stdout
            loss, = re.findall(rf"^loss (\S+) over {ranks} ranks$", said, re.MULTILINE)
            self.assertLess(float(loss), 0.05)
            self.assertTrue(os.path.exists(os.path.join(self.folder, "trained.pt")))

    def libraries(self):
        return next(root for root, _, names in os.walk(self.prefix) if "liblockstep_train.so.1" in names)

    def test_find_package(self):
        run("cmake", "-B", "build", f"-DCMAKE_PREFIX_PATH={self.prefix}", cwd=self.folder)
        run("cmake", "--build", "build", cwd=self.folder)
        self.check("build/surrogate")

    def test_pkg_config(self):
        if shutil.which("pkg-config") is None:
            self.skipTest("pkg-config is not installed")
        env = {**os.environ, "PKG_CONFIG_PATH": os.path.join(self.libraries(), "pkgconfig")}
        command = "cc -std=c99 -pedantic -Wall -Werror surrogate.c -o surrogate $(pkg-config --cflags --libs lockstep_train) -lm"
        subprocess.run(command, shell=True, cwd=self.folder, env=env, check=True, timeout=60)
        self.check("./surrogate")

    def test_it_exports_the_functions_of_the_header_and_nothing_else(self):
        with open(HEADER) as file:
            declared = set(re.findall(r"(lockstep_train_\w+)\(", re.sub(r"/\*.*?\*/", "", file.read(), flags=re.DOTALL)))
        self.assertGreater(len(declared), 20)
        libraries = [os.path.join(BUILD, "lib", name) for name in ("liblockstep_train.so", "liblockstep_train_mpi.so")]
        for library in filter(os.path.exists, libraries):
            functions, others = exported(library)
            self.assertEqual(functions, declared, library)
            self.assertEqual(others, set(), library)


if __name__ == "__main__":
    main()
