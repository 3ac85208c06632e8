"""Somebody else's project in C: what docs/c.md shows, built in an empty folder against an installation, and run."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BUILD, LOCKSTEP, SOURCE, main, run  # noqa: E402


def block(language, number=0):
    with open(os.path.join(SOURCE, "docs/c.md")) as file:
        return re.findall(rf"^```{language}\n(.*?)^```", file.read(), re.MULTILINE | re.DOTALL)[number]


class Installed(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        first, self.prefix = os.path.join(self.folder, "first"), os.path.join(self.folder, "a prefix")
        run("cmake", "--install", BUILD, "--prefix", first, "--component", "lockstep_c")
        os.rename(first, self.prefix)  # an installation may be moved
        for name, content in (("mean.c", block("c")), ("CMakeLists.txt", block("cmake"))):
            with open(os.path.join(self.folder, name), "w") as file:
                file.write(content)

    def check(self, program):
        env = {**os.environ, "LD_LIBRARY_PATH": self.libraries()}
        for ranks, mean in ((1, "0"), (2, "0.5"), (3, "1")):
            result = run(LOCKSTEP, "run", "-n", ranks, "--", program, cwd=self.folder, env=env)
            self.assertEqual(result.stdout, f"mean over {ranks} ranks: {mean}\n")

    def libraries(self):
        return next(root for root, _, names in os.walk(self.prefix) if "liblockstep_c.so.1" in names)

    def test_its_objects_need_no_library_without_presets(self):
        build = os.path.join(self.folder, "build")
        run("cmake", "-S", SOURCE, "-B", build, "-G", "Ninja", "-DLOCKSTEP_WITHOUT_TORCH=ON")  # as docs/c.md says
        objects = [line for line in run("ninja", "-C", build, "-t", "inputs", "lockstep_c").stdout.splitlines() if line.endswith(".o")]
        self.assertGreater(len(objects), 10)
        self.assertEqual([name for name in objects if "observe" in name], [])  # those would need zlib

    def test_find_package(self):
        run("cmake", "-B", "build", f"-DCMAKE_PREFIX_PATH={self.prefix}", cwd=self.folder)
        run("cmake", "--build", "build", cwd=self.folder)
        self.check("build/mean")

    def test_pkg_config(self):
        if shutil.which("pkg-config") is None:
            self.skipTest("pkg-config is not installed")
        env = {**os.environ, "PKG_CONFIG_PATH": os.path.join(self.libraries(), "pkgconfig")}
        command = "cc -std=c99 -pedantic -Wall -Werror mean.c -o mean $(pkg-config --cflags --libs lockstep_c)"
        prefix = os.path.join(self.folder, "prefix")
        os.rename(self.prefix, prefix)  # the shell splits at the space
        self.prefix, env["PKG_CONFIG_PATH"] = prefix, env["PKG_CONFIG_PATH"].replace("a prefix", "prefix")
        subprocess.run(command, shell=True, cwd=self.folder, env=env, check=True, timeout=60)
        self.check("./mean")

    def test_needs_no_torch(self):
        needed = subprocess.run(["ldd", os.path.join(self.libraries(), "liblockstep_c.so.1")], capture_output=True, text=True).stdout
        self.assertIn("libstdc++", needed)
        self.assertNotRegex(needed, "libtorch|libc10|libz|libjpeg|not found")  # an address may have "c10"

    def test_the_header_is_read_by_c_and_cpp(self):
        include = "-I" + os.path.join(self.prefix, "include")
        for compiler in (["cc", "-x", "c", "-std=c99"], ["cc", "-x", "c", "-std=c17"], ["c++", "-x", "c++", "-std=c++11"]):
            subprocess.run([*compiler, "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", include, "-"],
                           input="#include <lockstep/c.h>\n", text=True, check=True, timeout=60)

    def test_the_sharded_step_of_the_page_compiles(self):
        around = """#include <lockstep/c.h>
            void compute_gradient(const float* weights, float* gradient);
            void train(lockstep_group* world, size_t bytes, int64_t count, int64_t steps);
            void train(lockstep_group* world, size_t bytes, int64_t count, int64_t steps) { %s }"""
        path = os.path.join(self.folder, "step.c")
        with open(path, "w") as file:
            file.write(around % block("c", 1))
        run("cc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I" + os.path.join(self.prefix, "include"), path)


if __name__ == "__main__":
    main()
