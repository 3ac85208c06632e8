"""The examples in C, Fortran, Java, Rust and Python compute what the C++ library does, bit by bit."""

import glob
import os
import re
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BIN, BUILD, LOCKSTEP, SOURCE, environment, main, run  # noqa: E402

EXAMPLES = os.path.join(SOURCE, "examples")
LIBRARIES = os.path.join(BUILD, "lib")
LINK = ["-L" + LIBRARIES, "-llockstep_c"]


def needs(program, package):
    return unittest.skipIf(shutil.which(program) is None, f"{program} is not installed: apt-get install {package}")


def java_home():
    """Of a javac that has JNI's header."""
    javac = shutil.which("javac")
    home = os.path.dirname(os.path.dirname(os.path.realpath(javac))) if javac else ""
    return home if os.path.exists(os.path.join(home, "include", "jni.h")) else None


def lines_of(path):
    with open(path) as file:
        return len(file.readlines())


class Examples(unittest.TestCase):
    reference = []  # the C++ program's outputs, for all tests

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lockstep_test_")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def build(self, *command):
        run(*command, cwd=self.folder, timeout=100)

    def outputs(self, *program):
        """Of 1, 2 and 3 ranks."""
        env = environment(LD_LIBRARY_PATH=LIBRARIES)
        return [run(LOCKSTEP, "run", "-n", ranks, "--", *program, cwd=self.folder, env=env).stdout for ranks in (1, 2, 3)]

    def check(self, what, *program):
        if not self.reference:
            self.reference += self.outputs(os.path.join(BIN, "c_reference"))
        wanted = [re.search(rf"^{what} \w{{8}} over {n} ranks$", text, re.MULTILINE)[0]
                  for n, text in zip((1, 2, 3), self.reference)]
        self.assertEqual(len(set(wanted)), 3)
        found = self.outputs(*program)
        for line, text in zip(wanted, found):
            self.assertIn(line.lower(), text.lower().splitlines())
        return found

    def test_c(self):
        self.build("cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-O2", "-I" + os.path.join(SOURCE, "include"),
                   os.path.join(EXAMPLES, "c/two_layers.c"), "-o", "example", *LINK)
        for text in self.check("weights", "./example"):
            first, last = (float(loss) for loss in re.findall(r"loss (\S+)", text))
            self.assertLess(last, first / 10)

    def test_c_with_a_sharded_step(self):
        self.build("cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-O2", "-I" + os.path.join(SOURCE, "include"),
                   os.path.join(EXAMPLES, "c/sharded_adamw.c"), "-o", "example", *LINK)
        for text in self.check("plane", "./example"):
            first, last = (float(loss) for loss in re.findall(r"loss (\S+)", text))
            self.assertLess(last, first / 10)

    @needs("gfortran", "gfortran")
    def test_fortran(self):
        self.build("gfortran", "-Wall", "-O2", os.path.join(EXAMPLES, "fortran/sums.f90"), "-o", "example", *LINK)
        self.check("sums", "./example")

    @needs("rustc", "rustc")
    def test_rust(self):
        self.build("rustc", "-O", "-L", LIBRARIES, os.path.join(EXAMPLES, "rust/sums.rs"), "-o", "example")
        self.check("sums", "./example")

    @unittest.skipIf(java_home() is None, "no javac with jni.h is installed: apt-get install default-jdk-headless")
    def test_java(self):
        include = os.path.join(java_home(), "include")
        self.build("cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-I" + os.path.join(SOURCE, "include"), "-I" + include,
                   "-I" + os.path.join(include, "linux"), os.path.join(EXAMPLES, "java/lockstep_jni.c"), "-o", "liblockstep_jni.so", *LINK)
        self.build(os.path.join(java_home(), "bin/javac"), "-d", ".", os.path.join(EXAMPLES, "java/Sums.java"))
        self.check("sums", os.path.join(java_home(), "bin/java"), "-Djava.library.path=.", "-cp", ".", "Sums")

    def test_python(self):
        for python in ("python3", os.path.join(SOURCE, ".venv/bin/python")):
            if shutil.which(python) and run(python, "-c", "import numpy", check=False).returncode == 0:
                self.check("sums", python, os.path.join(EXAMPLES, "python-ctypes/sums.py"))
                return
        self.skipTest("no Python here has numpy: apt-get install python3-numpy")

    def test_are_short(self):
        files = [path for folder in ("c", "fortran", "rust", "python-ctypes") for path in glob.glob(os.path.join(EXAMPLES, folder, "*"))]
        self.assertEqual(len(files), 5)
        lengths = {os.path.basename(path): lines_of(path) for path in files}
        lengths["java"] = sum(lines_of(path) for path in glob.glob(os.path.join(EXAMPLES, "java", "*")))
        self.assertEqual({name: length for name, length in lengths.items() if length > 80}, {})


if __name__ == "__main__":
    main()
