"""What a run log and a summary writer write: JSON lines that json reads, event files that the real TensorBoard reads, and traces."""

import json
import os
import shutil
import subprocess
import tempfile
import unittest

from support import BIN, LOCKSTEP, SOURCE, main, python_with_torch, run, thorough

WRITE_RUN = os.path.join(BIN, "write_run")


def python_with_tensorboard():
    python = python_with_torch()
    modules = "import numpy, PIL, safetensors, tensorboard, torch"
    return python if python and subprocess.run([python, "-c", modules], capture_output=True).returncode == 0 else None


class RunLog(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def write_run(self, *arguments, ranks=2):
        run(LOCKSTEP, "run", "-n", ranks, "--", WRITE_RUN, self.path("run"), *arguments, cwd=self.folder)

    def lines(self, rank=0):
        with open(self.path("run", f"metrics_rank{rank}.jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    @thorough
    def test_the_real_tensorboard_reads_it(self):
        python = python_with_tensorboard()
        if not python:
            print("SKIPPED BECAUSE there is no Python with torch and tensorboard: scripts/setup --tests")
            self.skipTest("no Python with torch and tensorboard: scripts/setup --tests")
        self.write_run()
        result = run(python, os.path.join(SOURCE, "tests/run_log/read_events.py"), self.path("run"), self.path("other"))
        self.assertEqual(result.stdout, "the same\n")

    def test_lines_of_every_rank(self):
        self.write_run(ranks=3)
        for rank in range(3):
            lines = self.lines(rank)
            self.assertEqual((lines[0]["type"], lines[0]["rank"], lines[0]["world_size"]), ("run", rank, 3))
            self.assertEqual((lines[-1]["type"], lines[-1]["by"], lines[-1]["step"]), ("end", "return", 40))
            loss = [line for line in lines if line.get("name") == "train/loss"]
            self.assertEqual([line["step"] for line in loss], list(range(1, 41)))
            self.assertEqual([line["epoch"] for line in loss], [0] * 20 + [1] * 20)
            moments = [line["monotonic_s"] for line in lines]
            self.assertEqual(moments, sorted(moments))
            steps = [line for line in lines if line["type"] == "steps"]
            self.assertEqual(sum(line["steps"] for line in steps), 40)
            self.assertEqual(sum(line["samples"] for line in steps), 40 * 16)
            for line in steps:
                self.assertGreaterEqual(line["seconds"], line["communication_s"])
                self.assertGreaterEqual(line["seconds"], line["steps"] * 0.003 * (rank == 2))
                self.assertLessEqual(line["longest_s"], line["seconds"])
            last = [line for line in lines if line["type"] == "reductions"][-1]
            self.assertEqual(max(last["times_last_by_rank"]), last["times_last_by_rank"][2])  # it sleeps in each step; on a loaded machine others come late, too
            self.assertEqual(sum(last["times_last_by_rank"]), last["reductions"])
            self.assertEqual(sum(bucket["bytes"] for bucket in last["buckets"]), last["bytes"])

    def test_one_rank(self):
        self.write_run(ranks=1)
        lines = self.lines()
        self.assertEqual(sum(line["samples"] for line in lines if line["type"] == "steps"), 40 * 16)
        self.assertFalse(os.path.exists(self.path("run", "trace_rank0.json")))

    def test_a_run_that_goes_on_adds_to_its_files(self):
        self.write_run("10")
        self.write_run("10", "20")
        steps = [line["step"] for line in self.lines() if line.get("name") == "train/loss"]
        self.assertEqual(steps, list(range(1, 41)))
        self.assertEqual([line["step"] for line in self.lines() if line["type"] == "run"], [0, 20])

    def test_the_trace_shows_buckets_against_backward(self):
        self.write_run("40")
        for rank in range(2):
            with open(self.path("run", f"trace_rank{rank}.json")) as file:
                spans = [event for event in json.load(file) if event["ph"] == "X"]
            reductions = {}
            for span in spans:
                self.assertEqual(span["pid"], rank)
                reductions.setdefault(int(span["args"]["reduction"]), {})[span["name"]] = (span["ts"], span["ts"] + span["dur"], span["args"])
            self.assertEqual(sorted(reductions), list(range(11, 61)))  # without the first ten
            end = 0
            for spans in reductions.values():
                backward, wait = spans["backward"], spans["wait"]
                buckets = [spans[name] for name in sorted(spans) if name.startswith("bucket ")]
                self.assertEqual(len(buckets), 2)
                self.assertLessEqual(end, backward[0])
                self.assertAlmostEqual(backward[1], wait[0], delta=0.01)  # us: rounded to 1/1000
                for bucket in buckets:
                    self.assertLessEqual(backward[0], bucket[0])
                    self.assertLessEqual(bucket[1], wait[1] + 0.01)
                starts = [bucket[0] for bucket in buckets]
                self.assertEqual(starts, sorted(starts))
                self.assertAlmostEqual(max(bucket[1] for bucket in buckets), wait[1], delta=0.01)
                self.assertAlmostEqual(sum(float(bucket[2]["wait_ms"]) for bucket in buckets), (wait[1] - wait[0]) / 1000, delta=0.001)
                end = wait[1]


if __name__ == "__main__":
    main()
