"""What the documents name is there: files and folders of the tree, links, headings, and the layers of the sources."""

import glob
import os
import re
import unittest

from structure_test import MAY_INCLUDE, SOURCE, read, tracked

DOCUMENTS = ["README.md", "CONTRIBUTING.md", "python/README.md"] + sorted(
    os.path.relpath(path, SOURCE) for path in glob.glob(os.path.join(SOURCE, "docs", "*.md")))
PATH = re.compile(r"(?<![\w./~-])(?:src|include|tests|examples|bench|tools|scripts|docs|cmake|python)/[\w./*-]*\w[\w./*-]*")
LINK = re.compile(r"\]\(([^()\s]+)\)")
NAME = re.compile(r"`([\w.]+\.(?:h|cpp|hpp|inc|py))`")
FOREIGN = {"nccl.h", "cusparse.h"}  # files of others that the documents name


def without_programs(text):
    """Without the blocks of shell commands, which tests/programs/documented_commands_test.py runs."""
    return re.sub(r"^```sh\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def named_paths(text):
    return {path.rstrip(".") for path in PATH.findall(without_programs(text))}


def is_there(path):
    """`path` may have wildcards."""
    return bool(glob.glob(os.path.join(SOURCE, path)))


def anchors(text):
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def layers():
    """Folder under src/ -> the length of the longest chain of includes below it."""
    found = {}

    def depth(folder):
        if folder not in found:
            found[folder] = 1 + max((depth(below) for below in MAY_INCLUDE[folder]), default=-1)
        return found[folder]

    return {folder: depth(folder) for folder in MAY_INCLUDE}


class Documents(unittest.TestCase):
    def test_paths_are_there(self):
        missing, seen = [], 0
        for document in DOCUMENTS:
            for path in sorted(named_paths(read(document))):
                seen += 1
                if not is_there(path):
                    missing.append(f"{document}: {path}")
        self.assertEqual(missing, [])
        self.assertGreater(seen, 50)

    def test_files_named_without_a_path_are_there(self):
        names = {os.path.basename(path) for path in tracked(".")} | FOREIGN
        missing, seen = [], 0
        for document in DOCUMENTS:
            for name in NAME.findall(read(document)):
                seen += 1
                if name not in names:
                    missing.append(f"{document}: {name}")
        self.assertEqual(missing, [])
        self.assertGreater(seen, 10)

    def test_links_lead_somewhere(self):
        broken, seen = [], 0
        for document in DOCUMENTS:
            for link in LINK.findall(read(document)):
                if "://" in link:
                    continue
                seen += 1
                name, _, anchor = link.partition("#")
                path = os.path.normpath(os.path.join(os.path.dirname(document), name)) if name else document
                if not is_there(path) or (anchor and anchor not in anchors(read(path))):
                    broken.append(f"{document}: {link}")
        self.assertEqual(broken, [])
        self.assertGreater(seen, 30)

    def test_the_table_of_layers_is_that_of_the_includes(self):
        rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", read("docs/architecture.md"), re.MULTILINE)
        self.assertEqual({folder: int(layer) for layer, folder in rows}, layers())

    def test_the_newest_release_of_torch_is_the_same_everywhere(self):
        """Each place checks the release in a language of its own."""
        newest = int(re.search(r"LibTorch 2\.11 to 2\.(\d+)", read("README.md"))[1])
        for path, text in (("cmake/torch.cmake", f"VERSION_GREATER_EQUAL 2.{newest + 1})"), ("python/setup.py", f"< (2, {newest + 1}):"),
                           ("scripts/setup", f"2\\.1[1-{newest - 10}]\\."), ("tools/diagnosis.cpp", f'"2.{newest}."'),
                           ("packaging/spack/package.py", f"py-torch@2.11:2.{newest}")):
            self.assertIn(text, read(path), path)
        for path in ("cmake/torch.cmake", "python/setup.py", "scripts/setup", "tools/diagnosis.cpp", "python/README.md", "src/collectives/torch_releases.h"):
            self.assertEqual(set(re.findall(r"2\.11 to 2\.(\d+)", read(path))), {str(newest)}, path)
        self.assertRegex(read("docs/backends.md"), rf"(?m)^\| 2\.{newest}\.\d+ \|")

    def test_readme_says_what_it_needs_before_the_first_command(self):
        before, _, after = read("README.md").partition("```sh\n")
        for words in ("Linux", "x86-64", "g++ 12", "C++20", "2.11 to 2.15", "wheel", "zip", "`TORCH_DIR`", "CPUs", "GB of disk", "minutes"):
            self.assertIn(words, before)
        self.assertTrue(after.startswith("pip install WHEEL\n"), "the first path needs no build")
        explained, _, _ = before.partition("## Requirements")
        for word in ("rank", "world", "replica", "collective", "virtual rank"):
            self.assertEqual(len(re.findall(rf"\*\*{word}\*\*", re.sub(r"\s+", " ", explained))), 1, word)
        self.assertLessEqual(len(read("README.md").splitlines()), 120)

    def test_readme_installs_beside_the_clone_and_then_the_shell_finds_the_commands(self):
        readme = read("README.md")
        clone, = re.findall(r"`git clone URL (\S+) ", readme)
        block, = re.findall(r"(?m)^```sh\n([^`]*--prefix[^`]*)^```", readme)
        prefix, = re.findall(r'--prefix "\$HOME/(\S+)"', block)
        self.assertNotEqual(prefix, clone, "who clones in the home folder would install into the sources")
        self.assertEqual(re.findall(r'CMAKE_PREFIX_PATH="\$HOME/(\S+)"', block), [prefix])
        before, _, after = block.partition(f'\nexport PATH="$HOME/{prefix}/bin:$PATH"\n')
        self.assertNotRegex(before, r"(?m)^lockstep ")
        self.assertRegex(after, r"(?m)^lockstep run ")

    def test_a_length_of_the_tour_is_told_in_one_way(self):
        told = {}
        for name in ["README.md", "tools/tour_command.cpp", *DOCUMENTS]:
            for passage in re.findall(r"(?:lockstep tour`|\"tour\",).{0,400}", re.sub(r"\s+", " ", read(name))):
                for length in re.findall(r"(?:\w+ )?(?:\w+ of a|two|\d+) (?:minutes?|seconds?)", passage):
                    told.setdefault(length.strip(), []).append(name)
        self.assertEqual(list(told), ["a quarter of a minute"], told)
        self.assertLessEqual({"README.md", "tools/tour_command.cpp", "docs/packages.md"}, set(told["a quarter of a minute"]))

    def test_what_is_missing_would_be_found(self):
        text = "See `src/base/clock.h`, src/nowhere/clock.h. and [a page](docs/none.md#x); not /src/x, http://a.b/src/c.\n```sh\nbench/none\n```\n"
        self.assertEqual(named_paths(text), {"src/base/clock.h", "src/nowhere/clock.h", "docs/none.md"})
        self.assertEqual([is_there(path) for path in ("src/base/clock.h", "src/nowhere/clock.h", "src/base/*.h", "src/base/*.rs")],
                         [True, False, True, False])
        self.assertEqual(anchors("# A page\n\n## Who is `to` blame?\n"), {"a-page", "who-is-to-blame"})


if __name__ == "__main__":
    unittest.main(argv=["documents_test", "-v"])
