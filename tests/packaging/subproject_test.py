"""Lockstep's sources within another project, by add_subdirectory and by FetchContent, and as a shared library."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BUILD, SOURCE, environment, main, run  # noqa: E402

BY_SUBDIRECTORY = "add_subdirectory({source} lockstep)"
BESIDE_ITS_OWN_TORCH = "find_package(Torch REQUIRED)\nadd_subdirectory({source} lockstep)\nfind_package(Torch REQUIRED)"
with open(os.path.join(SOURCE, "docs", "packages.md")) as document:
    BY_FETCH_CONTENT, = re.findall(r"^```cmake\n(.*?)^```", document.read(), re.MULTILINE | re.DOTALL)
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(train LANGUAGES CXX)
{lockstep}
add_executable(train train.cpp)
target_link_libraries(train PRIVATE Lockstep::lockstep)
"""
NIGHTLY = os.environ.get("LOCKSTEP_NIGHTLY") == "1"


def torch_folder():
    with open(os.path.join(BUILD, "CMakeCache.txt")) as file:
        return re.findall(r"(?m)^Torch_DIR:\w+=(.*)$", file.read())[0]


def targets(folder):
    return set(re.findall(r"(?m)^([\w./-]+):", run("ninja", "-C", folder, "-t", "targets", "all").stdout))


class Subproject(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    @staticmethod
    def project(how):
        if how == BY_FETCH_CONTENT:
            return how.replace("/path/to/lockstep", SOURCE)
        return PROJECT.format(lockstep=how.format(source=SOURCE))

    def configure(self, how, *options):
        with open(os.path.join(SOURCE, "README.md")) as file:
            program, = re.findall(r"^```cpp\n(.*?)^```", file.read(), re.MULTILINE | re.DOTALL)
        for name, content in (("train.cpp", program), ("CMakeLists.txt", self.project(how))):
            with open(os.path.join(self.folder, name), "w") as file:
                file.write(content)
        return run("cmake", "-G", "Ninja", "-B", "build", f"-DTorch_DIR={torch_folder()}", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
                   *options, cwd=self.folder, timeout=200)

    def test_only_what_is_needed_is_built(self):
        for how in (BY_SUBDIRECTORY, BESIDE_ITS_OWN_TORCH, BY_FETCH_CONTENT):
            with self.subTest(how=how):
                shutil.rmtree(os.path.join(self.folder, "build"), ignore_errors=True)
                self.configure(how)
                names = targets(os.path.join(self.folder, "build"))
                self.assertIn("train", names)
                self.assertTrue(any(name.endswith("bin/lockstep") for name in names), names)
                self.assertEqual([name for name in names if name.endswith(("_test", "hello_ranks", "bench_step"))], [])
                # The project's warnings are about its own files.
                with open(os.path.join(self.folder, "build/compile_commands.json")) as file:
                    command, = (entry["command"] for entry in json.load(file) if entry["file"] == os.path.join(self.folder, "train.cpp"))
                self.assertIn(f"-isystem {SOURCE}/include ", command)
                # The project's own binaries and installation stay its own.
                installs = run("cmake", "--install", "build", "--prefix", "prefix", cwd=self.folder).stdout
                self.assertNotIn("lockstep", installs)

    def test_a_shared_library_exports_only_what_is_lockstep_s(self):
        """Of the objects that are there; the long test builds all of it anew, as BUILD_SHARED_LIBS does."""
        objects = run("ar", "t", os.path.join(BUILD, "src", "liblockstep.a")).stdout.split()
        self.assertGreater(len(objects), 5)
        library, torch = os.path.join(self.folder, "liblockstep.so"), os.path.join(torch_folder(), "../../../lib")
        run("c++", "-shared", "-o", library, "-Wl,--whole-archive", os.path.join(BUILD, "src", "liblockstep.a"), "-Wl,--no-whole-archive",
            f"-Wl,--version-script={os.path.join(SOURCE, 'src', 'lockstep.map')}", f"-L{torch}", "-ltorch", "-ltorch_cpu", "-lc10",
            "-lz", "-larchive", "-ljpeg", "-lpng", timeout=200)
        self.check_exports(library)

    def check_exports(self, library):
        names = [line.split(" ", 2)[2] for line in run("nm", "-D", "-C", "--defined-only", library).stdout.splitlines()]
        others = [name for name in names
                  if not re.match(r"((typeinfo( name)?|vtable|VTT|guard variable) for |(non-)?virtual thunk to |TLS \w+ function for )?lockstep::", name)]
        self.assertEqual(others, [])
        for name in ("lockstep::Context::Context(", "lockstep::save(", "typeinfo for lockstep::Error"):
            self.assertTrue(any(one.startswith(name) for one in names), name)

    @unittest.skipUnless(NIGHTLY, "it compiles the whole library: LOCKSTEP_NIGHTLY=1")
    def test_it_builds_and_trains_within_another_project(self):
        self.configure(BY_FETCH_CONTENT)
        self.build_and_train(os.path.join(self.folder, "build"))

    @unittest.skipUnless(NIGHTLY, "it compiles the whole library: LOCKSTEP_NIGHTLY=1")
    def test_a_shared_library_is_installed_and_found(self):
        build, prefix = os.path.join(self.folder, "shared"), os.path.join(self.folder, "prefix")
        run("cmake", "-G", "Ninja", "-S", SOURCE, "-B", build, f"-DTorch_DIR={torch_folder()}", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON",
            "-DLOCKSTEP_BUILD_TESTS=OFF", "-DLOCKSTEP_BUILD_BENCH=OFF", "-DLOCKSTEP_BUILD_EXAMPLES=OFF", "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=12")
        run("cmake", "--build", build, timeout=1500)
        run("cmake", "--install", build, "--prefix", prefix)
        self.check_exports(os.path.join(prefix, "lib", "liblockstep.so"))
        self.configure("find_package(Lockstep REQUIRED)", f"-DCMAKE_PREFIX_PATH={prefix}")
        self.build_and_train(os.path.join(self.folder, "build"))

    def build_and_train(self, build):
        run("cmake", "--build", build, timeout=1500)
        data = "/usr/share/datasets/fashion-mnist"
        if not os.path.isdir(data):
            self.skipTest("no Fashion-MNIST: apt-get install dataset-fashion-mnist")
        launcher = os.path.join(BUILD, "bin", "lockstep")
        said = run(launcher, "run", "-n", 2, "--", os.path.join(build, "train"), data, cwd=self.folder, timeout=300)
        self.assertIn("epoch 2 done", said.stdout)


if __name__ == "__main__":
    main()
