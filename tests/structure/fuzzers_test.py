"""The fuzzers link what the sources they are made of use. Only the long tests build them, so that a file missing in their lists would be noticed late."""

import glob
import os
import re
import unittest

from structure_test import SOURCE, read

LISTS = "tests/fuzz/CMakeLists.txt"
INCLUDE = re.compile(r'^#include "([^"]+)\.h"', re.MULTILINE)
# Included for a type or a constant; nothing of the .cpp is called.
TYPES_ONLY = set()


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


def used_by(path):
    """The .cpp files that stand beside the headers which a source includes."""
    for name in INCLUDE.findall(read(path)):
        for folder in ("src", "tools", os.path.dirname(path)):
            if os.path.exists(os.path.join(SOURCE, folder, name + ".cpp")):
                yield os.path.join(folder, name + ".cpp")
                break


class Fuzzers(unittest.TestCase):
    def test_link_what_their_sources_use(self):
        missing = []
        for name, sources in linked().items():
            self.assertGreater(len(sources), 30, name)
            for path in sorted(sources):
                self.assertTrue(os.path.exists(os.path.join(SOURCE, path)), path)
                missing += [f"{name} lacks {used}, which {path} uses" for used in used_by(path) if used not in sources | TYPES_ONLY]
        self.assertEqual(missing, [], f"add it to {LISTS}, or to TYPES_ONLY here if only its types are used")

    def test_a_missing_one_would_be_found(self):
        self.assertIn("src/base/printable.cpp", set(used_by("src/observe/progress_text.cpp")))


if __name__ == "__main__":
    unittest.main(verbosity=2)
