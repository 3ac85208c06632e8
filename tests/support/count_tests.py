"""Counts what ctest ran: each GoogleTest counts, not the binary that holds it; any other entry of ctest is one test.

    count_tests.py RESULT.xml...      files of ctest --output-junit; one that is missing counts as a failure

Says what was skipped and why, what failed and what took longest, and ends with `N passed, N failed, N skipped`.
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


class Count:
    def __init__(self):
        self.counts = collections.Counter(passed=0, failed=0, skipped=0)
        self.failed, self.reasons, self.times = [], collections.Counter(), []

    def add(self, name, outcome, seconds):
        self.counts[outcome] += 1
        self.times.append((seconds, name))
        if outcome == "failed":
            self.failed.append(name)

    def add_entry(self, entry):
        name, status = entry.get("name"), entry.get("status")
        output = entry.findtext("system-out") or ""
        if status == "disabled":
            return
        self.reasons.update(line[line.index("SKIPPED BECAUSE"):] for line in output.splitlines() if "SKIPPED BECAUSE" in line)
        skip = entry.find("skipped")  # also of what could not be started
        meant = skip is not None and skip.get("message", "").startswith("SKIP_RETURN_CODE")
        outcome = "passed" if status == "run" else "skipped" if meant else "failed"
        is_binary = BINARY.match(name) is not None
        tests = RESULT.findall(output) if is_binary else []
        for mark, test, ms in tests:
            self.add(test, WORDS[mark.strip()], int(ms) / 1000)
        told = any(WORDS[mark.strip()] == "failed" for mark, _, _ in tests)
        # A binary that itself crashed, ran out of time or ran nothing has failed, whatever it had said before.
        if not tests or (outcome == "failed" and not told):
            self.add(name, "failed" if is_binary and not tests else outcome, float(entry.get("time") or 0))

    def add_file(self, path):
        if not os.path.exists(path):
            self.add(f"{path} (was not written: see above)", "failed", 0)
            return
        for entry in ElementTree.parse(path).getroot().iter("testcase"):
            self.add_entry(entry)

    def tell(self):
        for reason, times in sorted(self.reasons.items()):
            print(f"{times:5} x {reason}")
        print("longest: " + ", ".join(f"{name} {seconds:.1f} s" for seconds, name in sorted(self.times, reverse=True)[:SLOW]))
        for name in self.failed:
            print(f"failed: {name}")
        print(", ".join(f"{self.counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")), flush=True)
        return 1 if self.failed or not self.counts["passed"] else 0


def main(paths):
    count = Count()
    for path in paths:
        count.add_file(path)
    return count.tell()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
