"""The ABI of liblockstep_c: what it exports, and that the header means the same as in lockstep_c.abi, which programs were
compiled against. After a change that is meant (a minor version only adds):

    python3 tests/c/abi_test.py --write
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BUILD, SOURCE, main  # noqa: E402

LIBRARY = os.path.join(BUILD, "lib", "liblockstep_c.so.1")
FOLDER = os.path.join(SOURCE, "tests/c")
DUMP = os.path.join(FOLDER, "lockstep_c.abi")
# Version 1.0's values: programs have them compiled in.
CONSTANTS = {
    "OK": 0, "INVALID_ARGUMENT": 1, "JOIN_FAILED": 2, "SEVERAL_MACHINES": 3, "RANK_GONE": 4, "MISMATCH": 5, "TIMED_OUT": 6,
    "ABORTED": 7, "OUT_OF_RESOURCES": 8, "INTERNAL_ERROR": 9,
    "FLOAT32": 0, "FLOAT64": 1, "FLOAT16": 2, "BFLOAT16": 3, "INT8": 4, "UINT8": 5, "INT16": 6, "INT32": 7, "INT64": 8,
    "SUM": 0, "MEAN": 1, "PRODUCT": 2, "MIN": 3, "MAX": 4, "AND": 5, "OR": 6, "XOR": 7,
}

ADDED = {
    "lockstep_allocate_together": "1.1", "lockstep_sharded_sgd": "1.1", "lockstep_sharded_adam": "1.1",
    "lockstep_sharded_sgd_typed": "1.2", "lockstep_sharded_adam_typed": "1.2",
}


def header():
    with open(os.path.join(SOURCE, "include/lockstep/c.h")) as file:
        return re.sub(r"/\*.*?\*/", "", file.read(), flags=re.DOTALL)


def declared(text):
    """(type, name, parameters) of each function."""
    return re.findall(r"LOCKSTEP_API ([\w\s*]*?)\b(lockstep_\w+)\(([^)]*)\);", text)


def library_of_types(text, folder):
    """A library of empty functions with the header's types: the real one is built without debug information."""
    library = os.path.join(folder, "liblockstep_c.so.1")
    with open(os.path.join(folder, "c.h"), "w") as file:
        file.write(text)
    with open(os.path.join(folder, "types.c"), "w") as file:
        file.write('#include "c.h"\n')
        for kind, name, parameters in declared(text):
            file.write(f"{kind} {name}({parameters}) {{ {'' if kind.strip() == 'void' else 'return 0;'} }}\n")
    subprocess.run(["cc", "-g", "-shared", "-fPIC", "-nostdlib", "-Wl,-soname,liblockstep_c.so.1", "-o", library, "types.c",
                    "-Wl,--version-script=" + os.path.join(SOURCE, "src/c/lockstep_c.map")], cwd=folder, check=True, timeout=60)
    return library


class Abi(unittest.TestCase):
    def test_exports_what_the_header_declares_and_nothing_else(self):
        listing = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True).stdout
        symbols = {line.split()[-1] for line in listing.splitlines()} - {"LOCKSTEP_C_1.0", "LOCKSTEP_C_1.1", "LOCKSTEP_C_1.2"}
        names = {name for _, name, _ in declared(header())}
        self.assertGreater(len(names), 25)
        self.assertEqual(symbols, {f"{name}@@LOCKSTEP_C_{ADDED.get(name, '1.0')}" for name in names})

    def test_soname(self):
        dynamic = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
        self.assertIn("[liblockstep_c.so.1]", dynamic)

    def test_constants_keep_their_values(self):
        found = {name: int(value) for name, value in re.findall(r"\bLOCKSTEP_(\w+) = (\d+)", header())}
        self.assertEqual({name: found.get(name) for name in CONSTANTS}, CONSTANTS)


@unittest.skipIf(shutil.which("abidiff") is None, "abidiff is not installed: apt-get install abigail-tools")
class Types(unittest.TestCase):
    def compare(self, text):
        with tempfile.TemporaryDirectory(prefix="lockstep_test_") as folder:
            return subprocess.run(["abidiff", "--no-show-locs", "--no-architecture", DUMP, library_of_types(text, folder)], capture_output=True,
                                  text=True, timeout=60)

    def test_are_those_of_the_dump(self):
        result = self.compare(header())
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_a_change_would_be_found(self):
        for before, after, found in (
                ("void* output, int64_t count", "void* output, int32_t count", "parameter 4 of type 'typedef int64_t' changed"),
                ("  double timeout_s;", "  float timeout_s;", "timeout_s"),
                ("  size_t size;", "  size_t size; int new_field;", "new_field")):
            text = header()
            self.assertIn(before, text)
            result = self.compare(text.replace(before, after, 1))
            self.assertNotEqual(result.returncode, 0, after)
            self.assertIn(found, result.stdout)


def write():
    with tempfile.TemporaryDirectory(prefix="lockstep_test_") as folder:
        subprocess.run(["abidw", "--no-corpus-path", "--no-comp-dir-path", "--no-show-locs", "--no-architecture", "--out-file", DUMP,
                        library_of_types(header(), folder)], check=True)


if __name__ == "__main__":
    write() if "--write" in sys.argv else main()
