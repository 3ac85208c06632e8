"""docs/errors.md explains every message that the tests of wrong programs expect, every exit code and every status."""

import os
import re
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import SOURCE, main  # noqa: E402

sys.path.insert(0, os.path.join(SOURCE, "docs", "site"))
import messages  # noqa: E402
import pages  # noqa: E402


def read(name):
    with open(os.path.join(SOURCE, name), encoding="utf-8") as file:
        return file.read()


def patterns(document):
    """The messages that a page quotes, as regular expressions; `...` stands for anything."""
    quoted = re.findall(r"(?m)^> (.+)$", document)
    return {line: re.compile(".*".join(re.escape(part.strip()) for part in line.split("...")), re.DOTALL) for line in quoted}


class Errors(unittest.TestCase):
    def test_every_expected_message_is_explained_and_nothing_else(self):
        known, used = patterns(read("docs/errors.md")), set()
        goldens = [line.partition(": ")[2] for name in ("tests/data_parallel/wrong_programs.txt", "tests/data_parallel/wrong_settings.txt", "tests/optim/wrong_optimizers.txt",
                    "tests/fully_sharded/wrong_programs.txt")
                   for line in read(name).splitlines() if line]
        self.assertGreater(len(goldens), 80)
        thrown = [text for area in messages.all_messages(SOURCE).values() for text in area]
        # What a rank finds in a scaler's use, or a machine in what others sent, travels before it is thrown; and a warning.
        for name in ("src/train/grad_scaler.cpp", "src/train/running_statistics.cpp", "src/train/scaler_troubles.h", "src/train/scaler_troubles.cpp", "src/train/used_gradients.cpp", "src/reducer/pass_record.h", "src/reducer/backward_tracker.cpp", "src/diloco/statements.cpp", "src/diloco/rounds.cpp", "src/diloco/finite.cpp"):
            thrown.append("".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', read(name))))
        for golden in goldens:
            fitting = {line for line, pattern in known.items() if pattern.match(golden.strip())}
            self.assertTrue(fitting, f"docs/errors.md does not explain: {golden}")
            used |= fitting
        for line in set(known) - used:
            words = [part.strip() for part in line.split("...") if len(part.strip()) > 3]
            self.assertTrue(any(all(word in text for word in words) for text in thrown), f"nothing throws what docs/errors.md explains: {line}")

    def test_every_exit_code_and_status_is_there(self):
        page = read("docs/errors.md")
        codes = set(re.findall(r"kExit\w+ = (\d+)", read("src/launch/launch_error.h")))
        self.assertGreater(len(codes), 12)
        self.assertEqual(codes - {"0"}, set(re.findall(r"(?m)^\| (\d+) \|", page)))
        statuses = set(re.findall(r"(LOCKSTEP_[A-Z_]+) = \d,?\s", re.search(r"lockstep_status;\nenum \{.*?\};", read("include/lockstep/c.h"), re.DOTALL).group(0)))
        self.assertEqual(statuses - {"LOCKSTEP_OK"}, set(re.findall(r"(?m)^\| (LOCKSTEP_\w+) \|", page)))

    def test_what_programs_tell_users_to_ask_for_is_there(self):
        rows = re.findall(r'(?m)^\| <a id="exit-code-(\d+)"></a>(\d+) \|', pages.with_anchors(read("docs/errors.md")))
        self.assertEqual(rows, [(code, code) for code, _ in rows])
        asked = {}
        for name in ("src/launch/error_page.cpp", "python/lockstep/__main__.py", "tools/resize_command.cpp"):
            asked[name] = re.findall(r"lockstep explain (\d*)", read(name))
            self.assertTrue(asked[name], name)
        self.assertLessEqual({code for each in asked.values() for code in each if code}, {code for code, _ in rows})

    def test_messages_name_no_document_because_none_is_installed(self):
        # Nor do --help and the manual: what they name is there after an installation, `lockstep explain`.
        for top in ("src", "tools"):
            for root, _, names in os.walk(os.path.join(SOURCE, top)):
                for name in names:
                    path = os.path.relpath(os.path.join(root, name), SOURCE)
                    if not name.endswith((".cpp", ".h")):
                        continue
                    code = re.sub(r"(?m)^\s*//.*$|\s//.*$", "", read(path))
                    self.assertEqual(re.findall(r'"[^"\n]*docs/[^"\n]*"', code), [], path)

    def test_messages_are_found_in_the_sources(self):
        texts = {text for area in messages.all_messages(SOURCE).values() for text in area}
        self.assertGreater(len(texts), 300)
        for expected in ("the module has no parameter that requires grad, so there is nothing to reduce; use it without DistributedDataParallel",
                         "this rank has left the group; make a new one",
                         "...: expected a file, found a link, a folder or a device"):
            self.assertIn(expected, texts)
        self.assertEqual(messages.message(' "a " + std::to_string(n) + " of " + (x ? "one" : "two") + "\\n"'), "a ... of ...one/two")


if __name__ == "__main__":
    main()
