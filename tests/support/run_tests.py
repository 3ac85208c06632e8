"""Runs the entries of ctest that are wanted, and counts the tests in them. Called by scripts/test.

    run_tests.py                 all but the long ones
    run_tests.py --thorough      the long ones: label `thorough`
    run_tests.py --nightly       everything, with the longest counts

    --once-more        an entry that failed runs once more, alone. If it passes then, it counts as passed, but it is listed
                       with its first failure, and more than two such entries fail the run (count_tests.py).
    --half COMMIT      only half of the entries: of two that take about as long, one, drawn by the commit's hash. Whoever
                       names the commit gets the same half; over a few commits every entry has had its turn.
    --until T          of the drawn entries those that can be run until then, in seconds since 1970, in an order drawn in the
                       same way; a few in any case. What there was no time for is named.
    --repeat N         N times over, to find what fails now and then; the last lines count for each entry that failed how often
    --busy K           beside K processes that compute all the time
    --only PATTERN     the entries whose names fit
    --build FOLDER     the build; by default `build`

Results are in BUILD/test.xml, or test-thorough.xml or test-nightly.xml; with --until in *-part-N.xml beside it, and those of
second runs in *-again-N.xml.
"""

import argparse
import glob
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import count_tests  # noqa: E402

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NOISE = re.compile(r"^ *Start +\d+:|^ *\d+/\d+ Test .* Passed|^Test project|^Internal ctest")
MOST_REPEATED = 6  # if more entries fail, something is broken: they are not run again
BATCH = 6  # entries that are started together with --until
GUESS_S = 60  # of an entry for which nobody has written down what it costs


class Runner:
    def __init__(self, build, name):
        self.build, self.result = build, os.path.join(build, f"{name}.xml")
        self.log = os.path.join(build, f"{name}.log")
        for path in [self.result, *self.beside("part"), *self.beside("again")]:
            if os.path.exists(path):
                os.remove(path)

    def beside(self, kind):
        return sorted(glob.glob(self.result.removesuffix(".xml") + f"-{kind}-*.xml"))

    def results(self):
        """Of the first runs."""
        return self.beside("part") or [self.result]

    def ctest(self, choice, result, jobs):
        """Prints what is more than a passed entry; all of it goes to the log."""
        # Outputs are kept whole: GoogleTests are counted in them, and they say why a test was skipped.
        command = ["ctest", "--test-dir", self.build, "--output-on-failure", "--no-tests=error", "-j", str(jobs), *choice, "--output-junit", result,
                   "--test-output-size-passed", "10000000", "--test-output-size-failed", "10000000"]
        with open(self.log, "a", encoding="utf-8") as log, \
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
            for line in process.stdout:
                log.write(line)
                if not NOISE.search(line):
                    print(line, end="", flush=True)
        return process.returncode

    def run(self, choice, result=None):
        if result is None:
            open(self.log, "w").close()
        # One more at a time than there are cores, since many tests wait.
        return self.ctest(choice, result or self.result, len(os.sched_getaffinity(0)) + 1)

    def run_until(self, choice, chosen, costs, until):
        """Runs the chosen entries in their order, a batch at a time, until then."""
        open(self.log, "w").close()
        status, number, late = 0, 0, []
        while chosen:
            batch, chosen = chosen[:BATCH], chosen[BATCH:]
            fits = [name for name in batch if number == 0 or time.time() + (costs[name] or GUESS_S) < until]
            late += [name for name in batch if name not in fits]
            if fits:
                status |= self.run([*choice, "-R", only(fits)], self.result.removesuffix(".xml") + f"-part-{number:02}.xml")
                number += 1
        if late:
            print(f"NO TIME FOR {len(late)} of these: {' '.join(late)}", flush=True)
        return status

    def run_failed_once_more(self):
        failed = [name for path in self.results() for name in failed_entries(path)]
        if len(failed) > MOST_REPEATED:
            print(f"{len(failed)} entries failed; so many are not run once more")
            return
        for number, entry in enumerate(failed):
            print(f"{entry} failed; once more, alone:", flush=True)
            self.ctest(["-R", f"^{re.escape(entry)}$"], self.result.removesuffix(".xml") + f"-again-{number}.xml", 1)


def failed_entries(path):
    if not os.path.exists(path):
        return []
    return [entry.get("name") for entry in ElementTree.parse(path).getroot().iter("testcase")
            if count_tests.outcome_of(entry) == "failed"]


def entries_of(build, choice):
    """[(name, cost)] of the entries that ctest would run; the cost is a guess, 0 where nobody made one."""
    listing = json.loads(subprocess.run(["ctest", "--test-dir", build, *choice, "--show-only=json-v1"], capture_output=True, text=True, check=True).stdout)
    return [(test["name"], next((float(one["value"]) for one in test.get("properties", []) if one["name"] == "COST"), 0.0)) for test in listing["tests"]]


def only(names):
    return "^(" + "|".join(map(re.escape, names)) + ")$"


def drawn(entries, commit):
    """Of each two entries that cost about as much, one: [names], in an order that is drawn, too."""
    def number(name):
        return hashlib.sha256(f"{commit} {name}".encode()).hexdigest()

    ordered = sorted(entries, key=lambda entry: (-entry[1], entry[0]))
    half = [min((name for name, _ in ordered[i:i + 2]), key=number) for i in range(0, len(ordered), 2)]
    return sorted(half, key=number)


def half_of(entries, commit):
    """The drawn entries, told with those that are not."""
    chosen = drawn(entries, commit)
    left_out = sorted({name for name, _ in entries} - set(chosen))
    print(f"{len(chosen)} of {len(entries)} long entries, drawn by commit {commit[:12]}: {' '.join(sorted(chosen))}")
    print(f"LEFT OUT, the turn of other commits: {' '.join(left_out)}", flush=True)
    return chosen


class Busy:
    """Processes that compute all the time."""

    def __init__(self, count):
        self.processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()


def repeat(runner, choice, times):
    """Runs the entries again and again. Says after each time what failed, and at the end how often each entry did."""
    failures = {}
    for number in range(1, times + 1):
        runner.run(choice)
        failed = failed_entries(runner.result)
        for entry in failed:
            failures[entry] = failures.get(entry, 0) + 1
        print(f"run {number} of {times}: {len(failed)} failed {' '.join(failed)}".rstrip(), flush=True)
    for entry, count in sorted(failures.items(), key=lambda found: -found[1]):
        print(f"failed {count} of {times} times: {entry}")
    print(f"{len(failures)} entries failed at least once in {times} runs")
    return 1 if failures else 0


def main(arguments):
    parser = argparse.ArgumentParser(prog="scripts/test")
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--nightly", action="store_true")
    parser.add_argument("--once-more", action="store_true")
    parser.add_argument("--half", metavar="COMMIT")
    parser.add_argument("--until", type=float, metavar="T")
    parser.add_argument("--repeat", type=int, metavar="N")
    parser.add_argument("--busy", type=int, default=0, metavar="K")
    parser.add_argument("--only", metavar="PATTERN")
    parser.add_argument("--build", default=os.path.join(SOURCE, "build"))
    asked = parser.parse_args(arguments)
    name, choice = "test", ["-LE", "thorough|nightly"]
    if asked.thorough:
        name, choice = "test-thorough", ["-L", "thorough"]
    elif asked.nightly:
        name, choice = "test-nightly", []
        os.environ["LOCKSTEP_NIGHTLY"] = "1"
    runner = Runner(os.path.abspath(asked.build), name)
    if asked.only:
        choice += ["-R", asked.only]
    with Busy(asked.busy):
        return run_and_count(runner, choice, asked)


def run_and_count(runner, choice, asked):
    if asked.repeat:
        return repeat(runner, choice, asked.repeat)
    if asked.half:
        entries = entries_of(runner.build, choice)
        chosen = half_of(entries, asked.half)
        status = runner.run_until(choice, chosen, dict(entries), asked.until or float("inf"))
    else:
        status = runner.run(choice)
    if asked.once_more:
        runner.run_failed_once_more()
        status = 0  # the count knows both runs
    counted = count_tests.main([*runner.results(), *runner.beside("again")])
    return 1 if counted or status else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
