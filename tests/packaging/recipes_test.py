"""The recipes in packaging/: that they parse, and name options, targets and components that exist, and this version."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import SOURCE, main  # noqa: E402

RECIPES = {name: os.path.join(SOURCE, "packaging", name)
           for name in ("spack/package.py", "conan/conanfile.py", "vcpkg/lockstep/vcpkg.json", "vcpkg/lockstep/portfile.cmake")}


def read(path):
    with open(os.path.join(SOURCE, path), encoding="utf-8") as file:
        return file.read()


def cmake_files():
    for root, folders, names in os.walk(SOURCE):
        folders[:] = [one for one in folders if one not in ("build", "packaging") and not one.startswith(".")]
        for name in names:
            if name == "CMakeLists.txt" or name.endswith(".cmake"):
                yield read(os.path.join(root, name))


class Recipes(unittest.TestCase):
    def test_versions_are_the_project_s(self):
        version, = re.findall(r"project\(Lockstep VERSION (\S+)", read("CMakeLists.txt"))
        self.assertIn(f'version("{version}")', read(RECIPES["spack/package.py"]))
        self.assertIn(f'version = "{version}"', read(RECIPES["conan/conanfile.py"]))
        self.assertEqual(json.loads(read(RECIPES["vcpkg/lockstep/vcpkg.json"]))["version"], version)

    def test_options_targets_and_components_exist(self):
        cmake = "\n".join(cmake_files())
        for name, path in RECIPES.items():
            text = read(path)
            if name.endswith(".py"):
                ast.parse(text)
            for option in re.findall(r"LOCKSTEP_[A-Z_]*[A-Z]\b", text.replace('"LOCKSTEP_BUILD_" + what', "LOCKSTEP_BUILD_TESTS")):
                self.assertRegex(cmake, rf"option\({option}\b", name)
            for target in set(re.findall(r"\blockstep_(?:cli|c|tour)\b", text)):
                self.assertRegex(cmake, rf"add_(?:executable|library)\({target}\b", name)
            for component in set(re.findall(r'"?(launcher|lockstep_c)"?', text)):
                self.assertRegex(cmake, rf"COMPONENT {component}\b", name)

    def test_debian_s_packages_are_all_there(self):
        """What CMake requires, every recipe asks for."""
        wanted = {name.lower() for name in re.findall(r"(?m)^find_package\((\w+) REQUIRED\)", read("CMakeLists.txt"))} - {"threads"}
        self.assertEqual(len(wanted), 6)
        for name in ("spack/package.py", "conan/conanfile.py", "vcpkg/lockstep/vcpkg.json"):
            text = read(RECIPES[name]).lower().replace("-", "_").replace("jpeg_turbo", "jpeg")
            for package in wanted | {"protozero"}:
                self.assertRegex(text, rf'"(lib)?{package.removeprefix("lib")}["/@_]', name)

    def test_conan_reads_its_recipe(self):
        conan = shutil.which("conan")
        if conan is None:
            self.skipTest("conan is not installed (pip install conan==2.34.0)")
        with tempfile.TemporaryDirectory(prefix="lockstep_test_") as home:
            said = subprocess.run([conan, "inspect", RECIPES["conan/conanfile.py"], "--format=json"], capture_output=True, text=True,
                                  timeout=60, env={**os.environ, "CONAN_HOME": home})
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertEqual(json.loads(said.stdout)["name"], "lockstep")


if __name__ == "__main__":
    main()
