"""The fuzzers and the Python package, which have lists of sources of their own, link what those sources use. Only the long
tests build either whole, so that a missing file would be noticed late."""

import ast
import glob
import os
import re
import unittest

from structure_test import SOURCE, read

LISTS = "tests/fuzz/CMakeLists.txt"
PACKAGE = "python/setup.py"
PUBLIC_INCLUDE = re.compile(r"^#include <lockstep/([^>]+)\.h>", re.MULTILINE)
# Public headers that a source includes for a type; nothing of their .cpp is called.
TYPES_ONLY = {("src/data_parallel/equipment.cpp", "src/checkpoint/state_dict.cpp"),
              ("src/diloco/diloco.cpp", "src/context/context.cpp"), ("python/bind_diloco.cpp", "src/context/context.cpp")}
INCLUDE = re.compile(r'^#include "([^"]+)\.h"', re.MULTILINE)


def expand(text, variables):
    while (found := re.search(r"\$\{(\w+)\}", text)) and found[1] in variables:
        text = text.replace(found[0], variables[found[1]])
    return text


def linked():
    """Name of a list of sources -> the paths in it, with all of base, which each fuzzer links as an archive."""
    text = re.sub(r"#.*", "", read(LISTS))
    variables = {"PROJECT_SOURCE_DIR": ".", "CMAKE_CURRENT_SOURCE_DIR": "tests/fuzz"}
    lists = {}
    for command, arguments in re.findall(r"\b(set|file|list)\(([^()]*)\)", text):
        words = arguments.split()
        if command == "set" and len(words) == 2:
            variables[words[0]] = expand(words[1], variables)
        elif command == "file" and words[0] == "GLOB":
            for pattern in words[3:]:  # after CONFIGURE_DEPENDS
                paths = glob.glob(os.path.join(SOURCE, expand(pattern, variables)))
                lists.setdefault(words[1], set()).update(os.path.relpath(path, SOURCE) for path in paths)
        elif command == "list" and words[0] == "FILTER":
            lists[words[1]] = {path for path in lists[words[1]] if not re.search(words[-1].strip('"').replace("\\\\", "\\"), path)}
        elif command == "list" and words[0] == "APPEND":
            lists.setdefault(words[1], set()).update(os.path.normpath(expand(word, variables)) for word in words[2:] if word.endswith(".cpp"))
    base = lists["base_sources"]
    return {name: lists[name] | base for name in ("sources", "run_sources")}


def compiled_into_the_package():
    """The paths that python/setup.py compiles where no library is there to link."""
    lists = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(read(PACKAGE)).body
             if isinstance(node, ast.Assign) and node.targets[0].id in ("CORE", "TORCH")}
    names = lists["CORE"] + [name for unit in lists["TORCH"] for name in unit]
    return {os.path.relpath(path, SOURCE) for name in names for folder in [os.path.join(SOURCE, "src", name)]
            for path in (glob.glob(os.path.join(folder, "*.cpp")) if os.path.isdir(folder) else [folder + ".cpp"])}


def used_by(path):
    """The .cpp files that stand beside the headers which a source includes."""
    for name in INCLUDE.findall(read(path)):
        for folder in ("src", "tools", os.path.dirname(path)):
            if os.path.exists(os.path.join(SOURCE, folder, name + ".cpp")):
                yield os.path.join(folder, name + ".cpp")
                break


def public_headers(path, found):
    """Adds the names of the public headers that a file includes, also by way of others."""
    for name in PUBLIC_INCLUDE.findall(read(path)):
        if name not in found:
            found.add(name)
            public_headers(f"include/lockstep/{name}.h", found)
    return found


def used_by_way_of_public_headers(path):
    """The .cpp files that have the name of a public header which a source includes."""
    for name in sorted(public_headers(path, set())):
        for used in glob.glob(os.path.join(SOURCE, "src", "*", name + ".cpp")):
            if (path, os.path.relpath(used, SOURCE)) not in TYPES_ONLY:
                yield os.path.relpath(used, SOURCE)


def missing_in(sources):
    return [f"{used}, which {path} uses" for path in sorted(sources) for used in used_by(path) if used not in sources]


class LinkedSources(unittest.TestCase):
    def test_fuzzers(self):
        for name, sources in linked().items():
            self.assertGreater(len(sources), 30, name)
            self.assertEqual(missing_in(sources), [], f"add it to {name} in {LISTS}")

    def test_the_python_package(self):
        sources = compiled_into_the_package()
        self.assertGreater(len(sources), 150)
        missing = missing_in(sources)
        for path in sources | {os.path.relpath(path, SOURCE) for path in glob.glob(os.path.join(SOURCE, "python", "*.cpp"))}:
            missing += [f"{used}, which {path} uses" for used in used_by_way_of_public_headers(path) if used not in sources]
        self.assertEqual(missing, [], f"add it to {PACKAGE}")

    def test_a_missing_one_would_be_found(self):
        self.assertIn("src/base/text.cpp", set(used_by("src/observe/progress_text.cpp")))
        sources = compiled_into_the_package() - {"src/collectives/operand_checks.cpp"}
        self.assertIn("src/collectives/operand_checks.cpp, which src/collectives/group.cpp uses", missing_in(sources))


if __name__ == "__main__":
    unittest.main(verbosity=2)
