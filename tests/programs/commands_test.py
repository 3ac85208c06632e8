"""The commands of `lockstep` as people type them: explanations, help, mpirun's spelling, pipes, and what terminals do."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import tempfile
import termios
import unittest

from support import LOCKSTEP, SOURCE, environment, main, run


def read(name):
    with open(os.path.join(SOURCE, name), encoding="utf-8") as file:
        return file.read()


def on_terminal(columns, *words):
    """What the command prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen([LOCKSTEP, *words], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment())
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        text += piece
    os.close(ours)
    process.wait(timeout=60)
    return text.decode().replace("\r\n", "\n")


class Explain(unittest.TestCase):
    def explained(self, *words):
        return run(LOCKSTEP, "explain", *words).stdout

    def test_every_exit_code(self):
        rows = re.findall(r"(?m)^\| (\d+) \| (.+) \| (.+) \|$", read("docs/errors.md"))
        self.assertGreater(len(rows), 12)
        for code, meaning, advice in rows:
            said = self.explained(code)
            self.assertTrue(said.startswith(f"exit code {code}: "), said)
            flat = " ".join(said.split())
            self.assertIn(meaning.split("[")[0].strip(), flat)
            self.assertIn("What to do: " + advice.split("[")[0].strip(), flat)
            self.assertNotRegex(said, r"\]\(|\*\*|\bsee (above|below)\b")
            self.assertEqual(self.explained("exit", "code", code), said)
            self.assertEqual(self.explained(f"Exit code {code}"), said)

    def test_a_code_shows_the_section_that_its_row_names(self):
        said = self.explained("44")
        self.assertIn('see "Ranks disagree on an operation"', said)
        self.assertIn("\nRanks disagree on an operation\n\n  > ", said)
        self.assertIn("The ranks called different collectives", said)
        self.assertIn('of ranks that wait for each other, "Groups used in different orders"', " ".join(said.split()))
        self.assertIn("\nGroups used in different orders\n\n  > ", said)
        self.assertIn("Each of these ranks waits in a group", said)

    def test_a_message_that_is_cut_off_finds_its_section(self):
        whole = "the ranks wait for each other, so none can go on: rank 0 in all_reduce #3 in the group of all ranks"
        for message in (whole, whole.partition(":")[0], whole.partition(", so")[0]):
            self.assertEqual(self.explained(message).splitlines()[0], "Groups used in different orders", message)
        self.assertEqual(self.explained("the ranks of a FullyShardedDataParallel wait for each other, so none can go on").splitlines()[0],
                         "A fully sharded model's ranks wait for each other")

    def test_codes_of_signals(self):
        self.assertIn("128 + 2, ended by SIGINT", self.explained("130"))
        self.assertIn("128 + 15, ended by SIGTERM", self.explained("143"))

    def test_every_section_by_its_title(self):
        titles = re.findall(r"(?m)^## (.+)$", read("docs/errors.md"))
        self.assertGreater(len(titles), 15)
        for title in titles:
            self.assertEqual(self.explained(title).splitlines()[0], title)
            self.assertEqual(self.explained(*title.lower().split()).splitlines()[0], title)

    def test_every_message_that_tests_of_wrong_programs_expect(self):
        for name in ("tests/data_parallel/wrong_programs.txt", "tests/data_parallel/wrong_settings.txt", "tests/optim/wrong_optimizers.txt"):
            for line in filter(None, read(name).splitlines()):
                message = line.partition(": ")[2].strip()
                said = self.explained("rank 1 of 2 threw: " + message)
                quoted = [" ".join(part.split()) for part in re.findall(r"(?ms)^  > (.*?)\n$", said + "\n")]
                pattern = [re.compile(".*".join(re.escape(part.strip()) for part in one.split("...")), re.DOTALL) for one in quoted]
                self.assertTrue(any(one.search(" ".join(message.split())) for one in pattern), f"{message}\n{said}")

    def test_statuses_and_words(self):
        self.assertIn("What to do: see \"Ranks disagree on an operation\"", self.explained("LOCKSTEP_MISMATCH"))
        self.assertTrue(self.explained("shared", "memory").startswith("Shared memory is too small\n"))
        several = self.explained("sharded", "optimizer")
        self.assertIn("The sharded optimizer and its parameters\n", several)
        self.assertIn("The sharded optimizer on different ranks\n", several)

    def test_alone_it_lists_what_there_is(self):
        said = self.explained()
        page = read("docs/errors.md")
        for code, meaning in re.findall(r"(?m)^\| (\d+) \| (.+?) \|", page):
            self.assertRegex(said, rf"(?m)^ +{code}  {re.escape(meaning[:20])}")
        for title in re.findall(r"(?m)^## (.+)$", page):
            self.assertIn(f"\n  {title}\n", said)
        self.assertIn("\n  LOCKSTEP_RANK_GONE\n", said)

    def test_what_nobody_can_explain_is_refused(self):
        for words, reason in ((["0"], "all ranks ended with 0"), (["1"], "never ends with 1"), (["99"], "there is no explanation of '99'"),
                              (["7000"], "there is no explanation of"), ([""], "WHAT is empty; give it a value"), (["!?"], "there is no explanation of"),
                              (["no such words here"], "there is no explanation of"), (["x" * 100_000], "there is no explanation of"),
                              (["a\x1b[31mb"], "there is no explanation of"), (["--tee"], "has no option --tee")):
            with self.subTest(words=words[0][:20]):
                result = run(LOCKSTEP, "explain", *words, check=False)
                self.assertEqual(result.returncode, 2, result.stdout)
                self.assertIn(reason, result.stderr)
                self.assertNotIn("\x1b", result.stderr)
                self.assertLess(len(result.stderr), 1000)

    def test_a_reader_that_leaves_hears_nothing(self):
        for trap in ("", "trap '' PIPE; "):  # as a shell has it, and where a parent ignores the signal
            for words in ("explain", "explain 49", "run --help", "completion bash"):
                result = subprocess.run(["bash", "-c", f"{trap}{LOCKSTEP} {words} | head -1"], capture_output=True, text=True, timeout=60, env=environment())
                self.assertEqual(result.stderr, "", words)
                self.assertEqual(len(result.stdout.splitlines()), 1)

    def test_a_full_disk_is_said(self):
        for words in (["explain", "49"], ["run", "--help"], ["man"]):
            with open("/dev/full", "w") as full:
                result = subprocess.run([LOCKSTEP, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=environment())
            self.assertEqual(result.returncode, 48)
            self.assertIn("could not be written", result.stderr)

    def test_it_fits_the_terminal(self):
        for columns in (60, 80, 200):
            for words in (["explain"], ["explain", "44"], ["explain", "shared memory"]):
                said = on_terminal(columns, *words)
                self.assertIn("\n", said)
                self.assertLessEqual(max(map(len, said.splitlines())), min(columns, 100), said)


class Help(unittest.TestCase):
    def test_no_line_is_longer_than_a_terminal(self):
        general = run(LOCKSTEP, "--help").stdout
        commands = re.findall(r"(?m)^  (\w+) {2,}", general[general.index("Subcommands:"):])
        self.assertLessEqual({"run", "explain", "completion", "man", "status", "doctor", "tour"}, set(commands))
        for words in [["--help"]] + [[command, "--help"] for command in commands]:
            said = run(LOCKSTEP, *words).stdout
            self.assertLessEqual(max(map(len, said.splitlines())), 100, said)
            narrow = on_terminal(80, *words)
            self.assertLessEqual(max(map(len, narrow.splitlines())), 80, narrow)
            self.assertEqual(narrow.split(), said.split())

    def test_the_exit_codes_of_run_are_those_of_the_page(self):
        said = run(LOCKSTEP, "run", "--help").stdout
        for code in re.findall(r"(?m)^\| (\d+) \|", read("docs/errors.md")):
            self.assertRegex(said, rf"(?m)(^|  ) *{code}  \w")


class Mpiruns(unittest.TestCase):
    def test_np_is_n(self):
        with tempfile.TemporaryDirectory() as folder:
            for words in (["-np", "3"], ["-np3"], ["-np=3"], ["--np", "3"], ["--np=3"]):
                result = run(LOCKSTEP, "run", *words, "--", "sh", "-c", "echo $WORLD_SIZE", cwd=folder)
                self.assertEqual(result.stdout.strip(), "3", words)
            cores = str(len(os.sched_getaffinity(0)))
            planned = run(LOCKSTEP, "run", "-np", "auto", "--dry-run", "--", "true", cwd=folder).stdout
            self.assertIn("WORLD_SIZE=" + cores, planned)
            # Not the program's own words.
            self.assertEqual(run(LOCKSTEP, "run", "-np", "1", "echo", "-np", "7", cwd=folder).stdout.strip(), "-np 7")

    def test_what_np_refuses(self):
        for words, reason in ((["-np", "2", "-n", "2", "true"], "-n and --np are the same option"), (["-np", "two", "true"], "it got 'two'"),
                              (["-np", "0", "true"], "it got '0'"), (["-np"], "--np"), (["-npx", "true"], "there is no option -npx; write -np N")):
            result = run(LOCKSTEP, "run", *words, check=False)
            self.assertEqual(result.returncode, 2, words)
            self.assertIn(reason, result.stderr)


if __name__ == "__main__":
    main()
