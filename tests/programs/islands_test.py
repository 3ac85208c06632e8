"""Machines that train by themselves and meet in rounds (`lockstep run --islands`): one that is killed, or cut off, is left out of the round, one that is started again takes
part, and one that is too slow contributes to the next round. The machines are network namespaces, as in hosts_test.py, which only root can make."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(__file__))
import hosts_test
from support import BIN, main

GPT = os.path.join(str(BIN), "gpt_text")
WAITS_AT_MOST = 1.0  # seconds, for a machine that is gone


class Run:
    """A gpt_text on three machines, with `rounds` of its launcher."""

    def __init__(self, hosts, *options, slots=(1, 1, 1), epochs=40, slow=-1):
        self.folder = tempfile.TemporaryDirectory()
        self.hosts = hosts
        training = f"exec {GPT} --epochs {epochs} --width 32 --layers 1 --batch-size 4 --generate 1 --sync-every 20 --wire int8 --outer-momentum 0.5 --json figures_$LOCKSTEP_ISLAND_N.json"
        script = "LOCKSTEP_ISLAND_N=${LOCKSTEP_ISLAND%%/*}; " + training
        if slow >= 0:  # stops itself for a while, again and again
            script = f"if [ ${{LOCKSTEP_ISLAND%%/*}} = {slow} ]; then (while sleep 0.3; do kill -STOP $$ || exit; sleep 0.3; kill -CONT $$; done) & fi; " + script
        command = hosts.lockstep_run(slots, "--run-dir", "run", *options, "--", "sh", "-c", script)
        self.process = subprocess.Popen(command, cwd=self.folder.name, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def rounds(self):
        path = os.path.join(self.folder.name, "run", "rounds.jsonl")
        if not os.path.exists(path):
            return []
        with open(path) as lines:
            return [json.loads(line) for line in lines.read().split("\n")[:-1]]

    def await_round(self, number, at_most=90):
        until = time.time() + at_most
        while len(self.rounds()) < number:
            if time.time() > until or self.process.poll() is not None:
                raise AssertionError(f"no round {number}: {self.end()}")
            time.sleep(0.02)

    def figures(self, island):
        with open(os.path.join(self.folder.name, f"figures_{island}.json")) as file:
            return json.load(file)

    def end(self, at_most=240):
        try:
            return self.process.communicate(timeout=at_most)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            return "TIMEOUT " + self.process.communicate()[0]

    def kill_machine(self, host):
        """What a machine loses with its power; the launcher is on the first one."""
        for pid in hosts_test.processes_of(self.hosts, host):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


@unittest.skipUnless(os.geteuid() == 0, "SKIPPED BECAUSE network namespaces need root")
class Islands(unittest.TestCase):
    def test_machines_that_meet_have_equal_models(self):
        with hosts_test.Hosts(3) as hosts:
            run = Run(hosts, "--islands", "3", epochs=3, slots=(2, 2, 2))
            text = run.end()
            self.assertEqual(run.process.returncode, 0, text)
            rounds = run.rounds()
            self.assertGreater(len(rounds), 3)
            self.assertTrue(all(one["took_part"] == [0, 1, 2] for one in rounds), rounds)
            self.assertEqual(len({run.figures(island)["parameters_hash"] for island in range(3)}), 1, text)
            self.assertEqual([one["round"] for one in rounds], list(range(1, len(rounds) + 1)))

    def test_a_killed_machine_is_left_out_and_comes_back(self):
        with hosts_test.Hosts(3) as hosts:
            run = Run(hosts, "--islands", "2", "--max-restarts", "3")
            run.await_round(5)
            run.kill_machine(2)
            killed = len(run.rounds())
            text = run.end()
            self.assertEqual(run.process.returncode, 0, text)
            rounds = run.rounds()
            without = [one for one in rounds[killed:] if one["took_part"] == [0, 1]]
            self.assertTrue(without, rounds)
            self.assertLess(max(one["seconds_open"] for one in without), WAITS_AT_MOST)
            back = [one for one in rounds[killed + 2 :] if 2 in one["took_part"] and 0 in one["took_part"]]
            self.assertTrue(back, text)  # with the same outer copy, which the hub has compared
            self.assertNotIn("differs", text)
            self.assertEqual(run.figures(0)["parameters_hash"], run.figures(1)["parameters_hash"])

    def test_a_machine_that_is_cut_off_is_left_out(self):
        with hosts_test.Hosts(3) as hosts:
            run = Run(hosts, "--islands", "2", epochs=12)
            run.await_round(5)
            hosts.cut(0, 2)
            cut = len(run.rounds())
            text = run.end()
            self.assertEqual(run.process.returncode, 0, text)
            without = [one for one in run.rounds()[cut + 1 :] if one["took_part"] == [0, 1]]
            self.assertTrue(without, text)
            self.assertLess(max(one["seconds_open"] for one in run.rounds()[cut:]), WAITS_AT_MOST + 0.5)
            self.assertEqual(run.figures(0)["parameters_hash"], run.figures(1)["parameters_hash"])

    def test_what_is_not_supported_is_refused(self):
        with hosts_test.Hosts(2) as hosts:
            for options, text in (
                (("--islands", "3"), "--islands"),
                (("--islands", "1", "--elastic", "1:2"), "--islands and --elastic cannot be used together"),
                (("--round-deadline", "1"), "--round-deadline belongs to --islands"),
            ):
                ran = subprocess.run(hosts.lockstep_run((1, 1), *options, "true"), capture_output=True, text=True)
                self.assertEqual(ran.returncode, 2, ran.stderr)
                self.assertIn(text, ran.stderr)
            uneven = subprocess.run(hosts.lockstep_run((1, 2), "--islands", "1", "true"), capture_output=True, text=True)
            self.assertIn("as many ranks on each machine", uneven.stderr)

    def test_a_program_without_diloco_is_told(self):
        with hosts_test.Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
            ran = subprocess.run(hosts.lockstep_run((1, 1), "--islands", "2", "true"), capture_output=True, text=True, cwd=folder, timeout=60)
            self.assertEqual(ran.returncode, 2, ran.stderr)
            self.assertIn("took part in no round", ran.stderr)

    def test_several_fragments_are_refused(self):
        with hosts_test.Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
            command = hosts.lockstep_run((1, 1), "--islands", "2", GPT, "--epochs", "1", "--sync-every", "20", "--fragments", "2")
            ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)
            self.assertNotEqual(ran.returncode, 0)
            self.assertIn("fragments is 2, and --islands supports 1 alone", ran.stdout + ran.stderr)


if __name__ == "__main__":
    main()
