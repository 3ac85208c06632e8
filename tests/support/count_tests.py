"""Counts what ctest ran: each GoogleTest counts, not the binary that holds it; any other entry of ctest is one test.

    count_tests.py RESULT.xml...      files of ctest --output-junit; one that is missing counts as a failure

An entry that failed in one file and passed in a later one, run once more, counts as passed; it is listed with its first
failure, and more than two such entries are a failure. Says what was skipped and why, what failed and what took longest,
and ends with `N passed, N failed, N skipped`.
"""

import collections
import os
import re
import sys
import xml.etree.ElementTree as ElementTree

RESULT = re.compile(r"^\[( {7}OK| {2}FAILED | {2}SKIPPED) \] (\S+) \((\d+) ms\)$", re.MULTILINE)
BINARY = re.compile(r"\w+_test(_thorough|\.\d+_of_\d+)?$")  # the entries of lockstep_test() in tests/CMakeLists.txt
WORDS = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}
SLOW = 10  # so many are named
MOST_SECOND_CHANCES = 2  # so many entries may fail at first
# What tells why an entry failed: a GoogleTest's failure with what it expected, a Python test's last lines.
FAILURE = re.compile(r"^\S+:\d+: Failure\n(?:.+\n){1,6}|^(?:FAIL|ERROR): .*\n(?:.*\n)*?\w*(?:Error|Exception|Failure)\b.*$", re.MULTILINE)
LAST_LINES = 8


def outcome_of(entry):
    status, skip = entry.get("status"), entry.find("skipped")  # the latter also of what could not be started
    meant = skip is not None and skip.get("message", "").startswith("SKIP_RETURN_CODE")
    return "disabled" if status == "disabled" else "passed" if status == "run" else "skipped" if meant else "failed"


def was_not_started(entry):
    """Because what it rests on, a fixture of ctest, had failed."""
    skip = entry.find("skipped")
    return entry.get("status") == "notrun" and skip is not None and "Fixture" in skip.get("message", "")


def reason_of(entry):
    """Why it failed, in a few lines."""
    output = entry.findtext("system-out") or ""
    found = FAILURE.search(output)
    lines = found.group(0).splitlines() if found else output.strip().splitlines()
    tests = [name for mark, name, _ in RESULT.findall(output) if WORDS[mark.strip()] == "failed"]
    return [f"{name} failed" for name in tests] + (lines[:3] + lines[-LAST_LINES:] if len(lines) > LAST_LINES + 3 else lines)


class Count:
    def __init__(self):
        self.counts = collections.Counter(passed=0, failed=0, skipped=0)
        self.failed, self.reasons, self.times = [], collections.Counter(), []
        self.second_chances = []  # entries that failed, and passed later, by their first failure

    def add(self, name, outcome, seconds):
        self.counts[outcome] += 1
        self.times.append((seconds, name))
        if outcome == "failed":
            self.failed.append(name)

    def add_entry(self, entry):
        name, outcome = entry.get("name"), outcome_of(entry)
        output = entry.findtext("system-out") or ""
        if outcome == "disabled":
            return
        self.reasons.update(line[line.index("SKIPPED BECAUSE"):] for line in output.splitlines() if "SKIPPED BECAUSE" in line)
        is_binary = BINARY.match(name) is not None
        tests = RESULT.findall(output) if is_binary else []
        for mark, test, ms in tests:
            self.add(test, WORDS[mark.strip()], int(ms) / 1000)
        told = any(WORDS[mark.strip()] == "failed" for mark, _, _ in tests)
        # A binary that itself crashed, ran out of time or ran nothing has failed, whatever it had said before.
        if not tests or (outcome == "failed" and not told):
            self.add(name, "failed" if is_binary and not tests else outcome, float(entry.get("time") or 0))

    def add_files(self, paths):
        runs = {}  # name of an entry -> its runs, the first one first
        for path in paths:
            if not os.path.exists(path):
                self.add(f"{path} (was not written: see above)", "failed", 0)
                continue
            for entry in ElementTree.parse(path).getroot().iter("testcase"):
                runs.setdefault(entry.get("name"), []).append(entry)
        for first, *later in runs.values():
            passed = [entry for entry in later if outcome_of(entry) == "passed"]
            if outcome_of(first) == "failed" and passed:
                if not was_not_started(first):  # its fixture is the one that failed
                    self.second_chances.append(first)
                self.add_entry(passed[0])
            else:
                self.add_entry(first)
        if len(self.second_chances) > MOST_SECOND_CHANCES:
            self.add(f"{len(self.second_chances)} entries passed only when they ran once more, more than {MOST_SECOND_CHANCES}", "failed", 0)

    def tell(self):
        for reason, times in sorted(self.reasons.items()):
            print(f"{times:5} x {reason}")
        print("longest: " + ", ".join(f"{name} {seconds:.1f} s" for seconds, name in sorted(self.times, reverse=True)[:SLOW]))
        for entry in self.second_chances:
            print(f"failed at first, passed when it ran once more, alone: {entry.get('name')}; mend it. Its first failure:")
            print("".join(f"    {line}\n" for line in reason_of(entry)), end="")
        for name in self.failed:
            print(f"failed: {name}")
        print(", ".join(f"{self.counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")), flush=True)
        return 1 if self.failed or not self.counts["passed"] else 0


def main(paths):
    count = Count()
    count.add_files(paths)
    return count.tell()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
