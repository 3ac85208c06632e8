"""Machines that join a run of --islands which has not started them (`lockstep join`): new ones, those whose agent has died, and those that may not."""

import os
import re
import subprocess
import time
import unittest

from hosts_test import ADDRESSES, Hosts
from islands_test import STATE, IslandsTest
from support import LOCKSTEP, environment, main, run, thorough

PORT = 29431
WHERE = f"{ADDRESSES[0]}:{PORT}"


class JoinTest(IslandsTest):
    def setUp(self):
        super().setUp()
        self.key = self.key_in("run.key")

    def key_in(self, name):
        path = os.path.join(self.folder, name)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            file.write(os.urandom(32).hex() + "\n")
        return path

    def begin_open(self, hosts, machines, most, *options, least=2, **more):
        return self.begin_islands(hosts, "--elastic", f"{least}:{most}", "--rendezvous", WHERE, "--key-file", self.key, *options, machines=machines, **more)

    def join(self, hosts, host, name, key=None, where=WHERE, patience="10"):
        command = hosts.on(host, LOCKSTEP, "join", "--coordinator", where, "--key-file", key or self.key, "--name", name)
        return self.start(*command, env=environment(LOCKSTEP_TEST_MARK=self.folder, OMP_NUM_THREADS="1", LOCKSTEP_JOIN_TIMEOUT_S=patience))

    def await_machine(self, process, number, after=0, at_most=30):
        """Until the machine has taken part in a round."""
        until = time.monotonic() + at_most
        while not [one for one in self.rounds()[after:] if number in one["took_part"]]:
            if time.monotonic() > until or process.poll() is not None:
                self.fail(f"machine {number} does not take part: {self.stopped(process)}")
            time.sleep(0.01)

    def check_joined(self, rounds, machine):
        """Takes part at the latest in the second round after one in which it asked for the outer state."""
        asked = [one["round"] for one in rounds if one["left_out"].get(str(machine)) == STATE]
        self.assertTrue(asked, rounds)
        self.assertTrue([one for one in rounds if machine in one["took_part"] and asked[0] < one["round"] <= asked[0] + 2], rounds)


class Join(JoinTest):
    def test_a_new_machine_takes_part_and_those_that_may_not_are_told(self):
        with Hosts(3) as hosts:
            process = self.begin_open(hosts, 2, 3, pause=20)
            self.await_round(process, 2)
            joined = len(self.rounds())
            third = self.join(hosts, 2, "third")
            self.await_machine(process, 2)
            again = self.ended(self.join(hosts, 1, "third"), 46)
            full = self.ended(self.join(hosts, 1, "fourth"), 46)
            stranger = self.ended(self.join(hosts, 1, "fifth", key=self.key_in("other.key")), 47)
            output = self.ended(process, 0, seconds=90)
            self.ended(third, 0)
            ended = self.ended(self.join(hosts, 2, "third", patience="1"), 46)
        rounds = self.rounds()
        self.assertIn(f"other machines join by: lockstep join --coordinator {WHERE} --key-file {self.key}", output)
        self.assertIn("machine 2 (third) joins the run", output)
        self.assertIn("machine 2, of the same name, takes part already; give another one with --name", again)
        self.assertIn("all 3 places of the run are taken; --elastic MIN:MAX sets how many there are", full)
        self.assertIn("does not have this machine's key", stranger)
        self.assertIn("could not be reached within 1 s", ended)
        self.assertIn("the run may have ended", ended)
        self.assertNotIn("2", rounds[0]["left_out"], "a place that nobody has had is not left out")
        self.check_joined(rounds[joined:], 2)
        self.check_wait(rounds[:-1])
        self.check_samples([0, 1, 2])
        self.nothing_left()

    def test_what_is_wrong_is_refused(self):
        islands = ("run", "--hosts", "a:1,b:1", "--islands")
        for words, code, text in (
            ((*islands, "--elastic", "1:4", "true"), 2, "machines that join need the run's key"),
            ((*islands, "--rendezvous", "127.0.0.1:4000", "true"), 2, "machines that join need the run's key"),
            ((*islands, "--elastic", "1:1", "--key-file", self.key, "true"), 2, "--elastic takes a whole number from 2"),
            ((*islands, "--key-file", "no.key", "true"), 47, "no.key"),
            (("join", "--key-file", self.key), 2, "--coordinator is required"),
            (("join", "--coordinator", "x", "--key-file", self.key), 2, "--coordinator"),
            (("join", "--coordinator", "127.0.0.1:1"), 47, "there is no key"),
        ):
            ran = subprocess.run([LOCKSTEP, *words], capture_output=True, text=True, timeout=20)
            self.assertEqual(ran.returncode, code, (words, ran.stderr))
            self.assertIn(text, ran.stderr)


@thorough
class JoinAgain(JoinTest):
    def test_runs_of_another_kind_are_refused(self):
        with Hosts(2) as hosts:
            one_by_one = ("--nnodes", 2, "--rendezvous", WHERE, "--key-file", self.key, "--", "true")
            process = self.begin(*hosts.on(0, LOCKSTEP, "run", "--node-rank", 0, *one_by_one))
            self.assertIn("`lockstep join` is for runs with --islands", self.ended(self.join(hosts, 1, "second"), 46))
            self.ended(self.begin(*hosts.on(1, LOCKSTEP, "run", "--node-rank", 1, *one_by_one)), 0)
            self.ended(process, 0)
            process = self.begin_open(hosts, 1, 2, least=1)
            self.await_round(process, 2)
            output = self.ended(self.begin(*hosts.on(1, LOCKSTEP, "run", "--node-rank", 1, *one_by_one)), 46)
            self.assertIn("use `lockstep join`", output)
            self.ended(process, 0)

    def test_one_that_joins_before_the_first_round_starts_with_the_others(self):
        with Hosts(3) as hosts:
            process = self.begin_open(hosts, 2, 3, ranks=2)
            third = self.join(hosts, 2, "third")
            self.await_round(process, 3)
            status = run(LOCKSTEP, "status", os.path.join(self.folder, "run")).stdout
            output = self.ended(process, 0)
            said = self.ended(third, 0)
        self.assertRegex(status, r"machine 2  took part in \d+ rounds, last in round \d+\n")
        rounds = self.rounds()
        self.assertTrue(all(one["took_part"] == [0, 1, 2] for one in rounds), output + said)
        self.assertEqual(len(rounds), self.STEPS // self.EVERY)
        self.assertEqual(len({self.figures(machine)["hash"] for machine in range(3)}), 1, output)
        self.check_samples([0, 1, 2])

    def test_a_machine_of_the_run_whose_agent_has_died_gets_its_place_back(self):
        with Hosts(3) as hosts:
            process = self.begin_open(hosts, 3, 3, "--max-restarts", "0", pause=20)
            self.await_round(process, 3)
            self.kill_machine(hosts, 1)
            killed = len(self.rounds())
            self.await_round(process, killed + 1)
            back = self.join(hosts, 1, hosts.names[1])
            self.await_machine(process, 1, after=killed + 1)
            output = self.ended(process, 0, seconds=90)
            self.ended(back, 0)
        self.assertIn(f"machine 1 ({hosts.names[1]}) joins the run", output)
        rounds = self.rounds()[killed:]
        self.check_joined(rounds, 1)
        self.check_wait([one for one in rounds if one["took_part"] == [0, 2]])
        self.check_samples([0, 1, 2])
        self.nothing_left()

    def test_a_machine_that_has_joined_is_lost_and_joins_again(self):
        with Hosts(3) as hosts:
            process = self.begin_open(hosts, 2, 3, steps=300)
            self.await_round(process, 2)
            first = self.join(hosts, 2, "third")
            self.await_machine(process, 2)
            self.kill_machine(hosts, 2)
            first.communicate(timeout=20)
            killed = len(self.rounds())
            self.await_round(process, killed + 1)
            second = self.join(hosts, 2, "third")
            self.await_machine(process, 2, after=killed + 1)
            output = self.ended(process, 0, seconds=90)
            self.ended(second, 0)
        self.assertEqual(len(re.findall(r"machine 2 \(third\) joins the run", output)), 2, output)
        self.check_samples([0, 1, 2])
        self.nothing_left()

    def test_the_end_of_the_run_ends_a_machine_that_has_joined_and_a_signal_lets_it_leave(self):
        with Hosts(3) as hosts:
            process = self.begin_open(hosts, 2, 3, steps=100000)
            self.await_round(process, 2)
            joined = self.join(hosts, 2, "third")
            self.await_machine(process, 2)
            joined.terminate()
            left = joined.communicate(timeout=30)[0]
            self.assertNotEqual(joined.returncode, 0, left)
            self.await_round(process, len(self.rounds()) + 2)
            other = self.join(hosts, 2, "another")
            self.await_machine(process, 2, after=len(self.rounds()))
            output = self.stopped(process)
            other.communicate(timeout=30)
        self.assertRegex(output, r"machine 2 \(third\) ended with \d+; `lockstep join` may take its place")
        self.assertIn("machine 2 (another) joins the run", output)
        self.nothing_left(seconds=10)

    def test_a_machine_with_another_model_is_refused_and_the_others_go_on(self):
        with Hosts(3) as hosts:
            command = f"exec {os.path.join(os.path.dirname(LOCKSTEP), 'island_rounds')} {self.folder} 160 $((20 + ${{LOCKSTEP_ISLAND%%/*}} / 2)) 20"
            words = hosts.lockstep_run((1, 1), "--islands", "--run-dir", "run", "--elastic", "2:3", "--rendezvous", WHERE, "--key-file", self.key, "--", "sh", "-c", command)
            process = self.begin(*words)
            self.await_round(process, 2)
            joined = self.join(hosts, 2, "third")
            refused = joined.communicate(timeout=30)[0]
            self.assertNotEqual(joined.returncode, 0, refused)
            output = self.ended(process, 0, seconds=60)
        self.assertIn("machine 2 is refused: it has another model, other ranks, or other options", output)
        self.assertTrue(all(one["took_part"] == [0, 1] for one in self.rounds()))


if __name__ == "__main__":
    main()
