"""What is made of the launcher's own description: completions for bash, zsh and fish, manual pages, and what --version says."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BIN, LOCKSTEP, main, run  # noqa: E402

COMMANDS = {"run", "inspect", "convert", "doctor", "report", "status", "stacks", "resize", "join", "tour", "explain", "completion", "man"}
# bash splits words at = as well.
BASH = r"""
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_lockstep
printf '%s\n' "${COMPREPLY[@]}"
"""
FISH = r"""
source $argv[1]
complete -C $argv[2]
"""
# A second zsh on a terminal of its own, whose line is completed as if somebody pressed the key. It is ready when it has
# printed the word, not when the terminal has echoed the line that prints it.
ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PROMPT=; fpath=($FOLDER $fpath); autoload -U compinit; compinit -u -D; stty -echo -onlcr; bindkey -e; zstyle ":completion:*" list-colors; LISTMAX=0'
zpty -w shell 'list() { compadd() { if [[ "$@" == *-[OAD]* ]]; then builtin compadd "$@"; return; fi; typeset -a found; builtin compadd -O found "$@"; print -l -- "${(@)found/#/=> }"; builtin compadd "$@"; }; _main_complete; print DONE; exit }; zle -C list list-choices list; bindkey "^T" list'
zpty -w shell 'print READ""Y'
zpty -r shell line '*READY*'
zpty -w -n shell "$LINE"$'\t'
zpty -w -n shell $'\C-t'
while zpty -r shell line; do print -rn -- "$line"; [[ $line == *DONE* ]] && break; done
"""


def option_names(command):
    return set(re.findall(r"(?m)^  (?:-\w,)?(--[\w-]+)", run(LOCKSTEP, command, "--help").stdout))


class Described(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def write(self, name, *words):
        path = os.path.join(self.folder, name)
        with open(path, "w") as file:
            file.write(run(LOCKSTEP, *words).stdout)
        return path

    def completed(self, *words):
        script = self.write("lockstep.bash", "completion", "bash")
        result = subprocess.run(["bash", "--norc", "-c", BASH, "bash", script, "lockstep", *words], cwd=self.folder,
                                capture_output=True, text=True, timeout=20)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        return set(result.stdout.split())

    def test_bash_completes_commands_options_and_values(self):
        self.assertLessEqual(COMMANDS, self.completed(""))
        self.assertEqual(self.completed("re"), {"report", "resize"})
        self.assertEqual(self.completed("run", "--bi"), {"--bind"})
        self.assertEqual(self.completed("run", "--bind", ""), {"none", "core", "numa"})
        self.assertEqual(self.completed("run", "--bind", "=", "n"), {"none", "numa"})
        self.assertEqual(self.completed("run", "-n", ""), {"auto", "gpu"})
        self.assertEqual(self.completed("run", "--bind", "=", "core", "--dr"), {"--dry-run"})
        self.assertEqual(self.completed("run", "--grace", ""), set())

    def test_bash_completes_folders_and_the_program(self):
        os.mkdir(os.path.join(self.folder, "runs"))
        for name in ("train", "text.pt"):
            open(os.path.join(self.folder, name), "w").close()
        self.assertEqual(self.completed("status", ""), {"runs"})
        self.assertEqual(self.completed("inspect", "te"), {"text.pt"})
        self.assertIn("train", self.completed("run", "-n", "2", "trai"))
        self.assertIn("train", self.completed("run", "--", "trai"))
        self.assertEqual(self.completed("run", "-n", "2", "train", "--bi"), set())  # the program's option, not ours

    def test_every_option_of_every_command_is_completed(self):
        for command in COMMANDS:
            with self.subTest(command=command):
                self.assertLessEqual(option_names(command) or {"none"}, self.completed(command, "--"))

    def test_zsh(self):
        script = self.write("_lockstep", "completion", "zsh")
        if shutil.which("zsh") is None:
            self.skipTest("zsh is not installed")
        run("zsh", "-n", script)
        for line, expected in (("lockstep re", {"report", "resize"}), ("lockstep run --bind ", {"none", "core", "numa"}),
                               ("lockstep run --dr", {"--dry-run"})):
            with self.subTest(line=line):
                result = subprocess.run(["zsh", "-f", "-c", ZSH], capture_output=True, text=True, timeout=30, cwd=self.folder,
                                        env={**os.environ, "FOLDER": self.folder, "LINE": line, "TERM": "dumb"})
                self.assertLessEqual(expected, set(re.findall(r"[\w-]+", result.stdout)), result.stdout + result.stderr)

    def test_fish(self):
        script = self.write("lockstep.fish", "completion", "fish")
        if shutil.which("fish") is None:
            self.skipTest("fish is not installed")
        run("fish", "--no-config", "-n", script)
        os.mkdir(os.path.join(self.folder, "runs"))
        for name in ("train", "text.pt"):
            open(os.path.join(self.folder, name), "w").close()
        os.chmod(os.path.join(self.folder, "train"), 0o755)
        for line, expected in (("lockstep re", {"report", "resize"}), ("lockstep run --bi", {"--bind"}), ("lockstep run --bind ", {"none", "core", "numa"}),
                               ("lockstep run --bind=n", {"--bind=none", "--bind=numa"}), ("lockstep run -n ", {"auto", "gpu"}),
                               ("lockstep run --dr", {"--dry-run"}), ("lockstep run --grace ", set()), ("lockstep status ", {"runs/"}),
                               ("lockstep inspect te", {"text.pt"}), ("lockstep run -n 2 ./trai", {"./train"}), ("lockstep run -- ./trai", {"./train"}),
                               ("lockstep run -n 2 train --bi", set()), ("lockstep run -- train te", {"text.pt"}),
                               ("lockstep completion ", {"bash", "zsh", "fish"}), ("lockstep man stat", {"status"}), ("lockstep --ver", {"--version"})):
            with self.subTest(line=line):
                said = run("fish", "--no-config", "-c", FISH, script, line, cwd=self.folder).stdout
                self.assertEqual({found.partition("\t")[0] for found in said.splitlines()}, expected)
        for command in COMMANDS:
            said = run("fish", "--no-config", "-c", FISH, script, f"lockstep {command} --", cwd=self.folder).stdout
            self.assertLessEqual(option_names(command), {found.partition("\t")[0] for found in said.splitlines()}, command)

    def test_arguments_that_are_words_are_completed(self):
        self.assertEqual(self.completed("completion", ""), {"bash", "zsh", "fish"})
        self.assertEqual(self.completed("man", "sta"), {"status", "stacks"})

    def test_manual_pages(self):
        pages = [self.write("lockstep.1", "man"), self.write("lockstep-run.1", "man", "run")]
        texts = []
        for page in pages:
            with open(page) as file:
                texts.append(file.read().replace("\\-", "-"))
        for command in COMMANDS - {"run"}:
            self.assertIn(f"lockstep {command} [OPTIONS]", texts[0])
        for option in option_names("run"):
            self.assertIn(f"\\fB{option}\\fR", texts[1])
        self.assertIn("43  the ranks made no progress", texts[1])
        tools = [["mandoc", "-Tlint", "-Werror"], ["groff", "-man", "-ww", "-z", "-Kutf8"]]
        tools = [tool for tool in tools if shutil.which(tool[0])]
        for tool in tools:
            said = subprocess.run([*tool, *pages], capture_output=True, text=True, timeout=20)
            self.assertEqual((said.returncode, said.stdout + said.stderr), (0, ""), tool)
        if not tools:
            self.skipTest("neither mandoc nor groff is installed")

    def test_what_cannot_be_described_is_refused(self):
        for words, reason in ((("completion", "bsh"), "did you mean bash?"), (("man", "rum"), "no command 'rum'")):
            said = run(LOCKSTEP, *words, check=False)
            self.assertEqual(said.returncode, 2)
            self.assertIn(reason, said.stderr)

    def test_version_says_how_it_was_built(self):
        lines = run(LOCKSTEP, "--version").stdout.splitlines()
        self.assertRegex(lines[0], r"^lockstep \d+\.\d+\.\d+$")
        said = dict(line.split(": ", 1) for line in lines[1:])
        with open(os.path.join(os.path.dirname(BIN), "CMakeCache.txt")) as file:
            cache = dict(re.findall(r"(?m)^(\w+):\w+=(.*)$", file.read()))
        with open(os.path.join(cache["Torch_DIR"], "TorchConfigVersion.cmake")) as file:
            self.assertIn(f'"{said["LibTorch"]}"', file.read())
        self.assertIn(", " + (cache["CMAKE_BUILD_TYPE"] or "no build type") + ", ", said["built"])
        self.assertIn("shared memory, Gloo", said["engines"])


if __name__ == "__main__":
    main()
