"""Every block of C++ in README and in the documents is compiled, and run by two ranks.

A block is a whole program; or it stands in a context of snippets/contexts.py, which says what comes before and after it; or
it is a fragment of a program that the page links: `<!-- fragment of examples/x.cpp -->` stands before it.
"""

import collections
import glob
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "programs"))
sys.path.insert(0, os.path.join(HERE, "snippets"))
from contexts import BLOCKS, Block  # noqa: E402
from support import BUILD, LOCKSTEP, SOURCE, environment, main, run, thorough  # noqa: E402

BLOCK = re.compile(r"^(?:<!-- fragment of (?P<program>\S+) -->\n\n?)?```cpp\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
DOTS = re.compile(r"(?m)^ *\.\.\.$")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-variable", "-Wno-unused-but-set-variable", "-Wno-unused-function")
Snippet = collections.namedtuple("Snippet", "page name line code block")


def is_a_program(code):
    return "int main(" in code


def snippets_of(page, text, contexts):
    """The blocks of a page that are to run, and what is wrong with the others."""
    found, wrong, given = [], [], list(contexts)
    for number, match in enumerate(BLOCK.finditer(text), 1):
        where = f"{page}:{text.count(chr(10), 0, match.start('code'))}"
        program, code = match["program"], match["code"]
        if program:
            if not os.path.exists(os.path.join(SOURCE, program)):
                wrong.append(f"{where}: a fragment of {program}, which does not exist")
            elif not re.search(rf"\]\((\.\./)?{re.escape(program)}\)", text):
                wrong.append(f"{where}: a fragment of {program}, which the page does not link")
            continue
        if is_a_program(code):
            block = Block(call="return program(argc, argv);")
        elif given:
            block = given.pop(0)
        else:
            wrong.append(f"{where}: neither a program, nor a fragment (<!-- fragment of examples/x.cpp -->), nor in tests/packaging/snippets/contexts.py")
            continue
        if len(DOTS.findall(code)) != len(block.dots):
            wrong.append(f"{where}: its lines of ... are {len(DOTS.findall(code))}, those of its context {len(block.dots)}")
        name = re.sub(r"\W", "_", os.path.basename(page).removesuffix(".md")) + f"_{number}"
        found.append(Snippet(page, name, text.count("\n", 0, match.start("code")) + 1, code, block))
    if given:
        wrong.append(f"{page}: tests/packaging/snippets/contexts.py has {len(given)} more blocks than the page")
    return found, wrong


def all_snippets():
    found, wrong = [], []
    for path in ["README.md", *sorted(os.path.relpath(path, SOURCE) for path in glob.glob(os.path.join(SOURCE, "docs/*.md")))]:
        with open(os.path.join(SOURCE, path), encoding="utf-8") as file:
            more, errors = snippets_of(path, file.read(), BLOCKS.get(os.path.basename(path).removesuffix(".md"), ()))
        found += more
        wrong += errors
    return found, wrong


def function_of(snippet):
    """The block as a namespace with a function `run(argc, argv)`; messages of the compiler name the page and its line."""
    block = snippet.block
    code = re.sub(r"(?m)^#include.*$", "", snippet.code).replace("int main(", "int program(")
    if is_a_program(snippet.code):
        code = code.rstrip().removesuffix("}") + "return 0; }\n"  # which main need not say
    for text in block.dots:
        code = DOTS.sub(lambda _, text=text: text.replace("\n", " "), code, count=1)
    code = f'#line {snippet.line} "{snippet.page}"\n{code}#line 1 "the context of {snippet.name}"\n'
    head = "int run([[maybe_unused]] int argc, [[maybe_unused]] char** argv) {\n"
    body = f"{code}{head}{block.call}\n" if block.call else f"{head}{block.before}{code}{block.after}\n"
    return f'#line 1 "the context of {snippet.name}"\nnamespace {snippet.name} {{\n{body}return 0;\n}}\n}}  // namespace {snippet.name}\n'


def source_of(snippets):
    cases = "\n".join(f'  if (name == "{snippet.name}") return {snippet.name}::run(argc - 1, argv + 1);' for snippet in snippets)
    includes = {line for snippet in snippets for line in re.findall(r"(?m)^#include.*$", snippet.code)}
    return "\n".join([f'#include "{HERE}/snippets/before.h"', *sorted(includes), "#include <csignal>", "#include <iostream>", "using namespace before;",
                      *map(function_of, snippets), "int main(int argc, char** argv) try {", '  const std::string name = argc > 1 ? argv[1] : "";', cases,
                      "  return 2;", "} catch (const std::exception& error) {", "  std::cerr << error.what() << std::endl;", "  return 1;", "}", ""])


def commands_of_the_build(source, program):
    """How the build compiles and links examples/hello_ranks.cpp, for another source."""
    with open(os.path.join(BUILD, "compile_commands.json"), encoding="utf-8") as file:
        entry = next(entry for entry in json.load(file) if "/hello_ranks" in entry["file"])
    compiler = re.sub(r"^.*?(\S*[cg]\+\+\S*) ", r"\1 ", entry["command"])  # without ccache
    compile_it = re.sub(r" -o \S+| -c \S+| -W\S+", "", compiler).split() + [*WARNINGS, "-c", source, "-o", program + ".o"]
    last = run("ninja", "-C", BUILD, "-t", "commands", "bin/hello_ranks").stdout.splitlines()[-1]
    words = last.removeprefix(": && ").removesuffix(" && :").replace('"', "").split()
    link = [program + ".o" if word.endswith(".o") else program if word == "bin/hello_ranks" else word for word in words]
    return compile_it, link


def write_images(folder, name, count):
    """Grey images of 28 x 28 and their labels, as Fashion-MNIST's files."""
    with open(os.path.join(folder, f"{name}-images-idx3-ubyte"), "wb") as file:
        file.write(struct.pack(">IIII", 2051, count, 28, 28) + bytes(i * i % 251 for i in range(count * 784)))
    with open(os.path.join(folder, f"{name}-labels-idx1-ubyte"), "wb") as file:
        file.write(struct.pack(">II", 2049, count) + bytes(i % 10 for i in range(count)))


def write_cifar(folder):
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        with open(os.path.join(folder, name + ".bin"), "wb") as file:
            file.write(b"".join(bytes([label]) + bytes(3072) for label in range(10)))


class Classes(unittest.TestCase):
    def test_every_block_is_in_one(self):
        found, wrong = all_snippets()
        self.assertEqual(wrong, [])
        self.assertGreaterEqual(len(found), 30)
        self.assertEqual(set(BLOCKS) - {os.path.basename(snippet.page).removesuffix(".md") for snippet in found}, set())

    def test_what_is_in_none_is_named(self):
        a = "```cpp\nint a;\n...\n```\n"
        for text, contexts, said in ((a, [], "a.md:1: neither a program"),
                                     (a, [Block()], "a.md:1: its lines of ... are 1, those of its context 0"),
                                     ("```cpp\nint main() {}\n```\n", [Block()], "a.md: tests/packaging/snippets/contexts.py has 1 more blocks"),
                                     ("<!-- fragment of examples/none.cpp -->\n" + a, [], "a.md:2: a fragment of examples/none.cpp, which does not exist"),
                                     ("<!-- fragment of examples/hello_ranks.cpp -->\n\n" + a, [], "a.md:3: a fragment of examples/hello_ranks.cpp, which the page does not")):
            found, wrong = snippets_of("a.md", text, contexts)
            self.assertEqual(len(wrong), 1, wrong)
            self.assertTrue(wrong[0].startswith(said), wrong)
        linked = "<!-- fragment of examples/hello_ranks.cpp -->\n" + a + "[all](../examples/hello_ranks.cpp)"
        self.assertEqual(snippets_of("a.md", linked, []), ([], []))


@thorough
class Programs(unittest.TestCase):
    def test_every_block_runs_on_two_ranks(self):
        folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        snippets, _ = all_snippets()
        source, program = os.path.join(folder, "snippets.cpp"), os.path.join(folder, "snippets")
        with open(source, "w", encoding="utf-8") as file:
            file.write(source_of(snippets))
        for command in commands_of_the_build(source, program):
            run(*command, cwd=BUILD, timeout=400)
        for snippet in snippets:
            with self.subTest(snippet.name):
                self.run_block(snippet, program, os.path.join(folder, "of_" + snippet.name))

    def run_block(self, snippet, program, folder):
        for name in ("data", "cifar"):
            os.makedirs(os.path.join(folder, name))
        write_images(os.path.join(folder, "data"), "train", 512)
        write_images(os.path.join(folder, "data"), "t10k", 64)
        write_cifar(os.path.join(folder, "cifar"))
        done = run(LOCKSTEP, "run", "-n", 2, "--", program, snippet.name, "data", cwd=folder, env=environment(), check=False, timeout=60)
        self.assertEqual(done.returncode, snippet.block.exit_code, f"{snippet.page}:{snippet.line}\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    main()
