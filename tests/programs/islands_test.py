"""Machines that train by themselves and meet in rounds (`lockstep run --islands`): one that is killed, or cut off, is left out of the round, one that is started again takes
part, and one that is too slow contributes to the next round. The machines are network namespaces, as in hosts_test.py, which only root can make."""

import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import unittest

from hosts_test import ADDRESSES, Hosts, OneCommandTest, kill_if_there, processes_of
from support import BIN, LOCKSTEP, main, marked_processes, run, thorough

STRANGER = """
import os, socket, sys
for i in range(60):
    with socket.create_connection(sys.argv[1:3], 2) as stranger:
        stranger.settimeout(0.05)
        try:
            stranger.sendall(os.urandom(1 + i * 7))
            print(len(stranger.recv(4096)))
        except OSError:
            pass
"""
WAITS_AT_MOST = 1.0  # seconds, for a machine that is gone
STATE = "it gets the outer state"


def name_of(pid):
    with open(f"/proc/{pid}/comm", encoding="utf-8") as file:
        return file.read()


class IslandsTest(OneCommandTest):
    """A training of island_rounds, which counts samples, on machines of a rank each."""

    STEPS, EVERY = 160, 20

    def begin_islands(self, hosts, *options, steps=STEPS, pause=10, ranks=1, machines=None, nan=(), launch="ip netns exec {host}", before=""):
        program = [os.path.join(BIN, "island_rounds"), self.folder, steps, self.EVERY, pause, *nan]
        if isinstance(pause, tuple):  # by machine
            pauses = "set -- " + " ".join(map(str, pause)) + "; shift ${LOCKSTEP_ISLAND%%/*}; "
            program = ["sh", "-c", f"{pauses}exec {BIN}/island_rounds {self.folder} {steps} {self.EVERY} $1"]
        if before:
            program = ["sh", "-c", before + "; exec " + " ".join(map(str, program))]
        command = hosts.lockstep_run([ranks] * (machines or len(hosts.names)), "--islands", "--run-dir", "run", *options, "--", *program)
        return self.begin(*[launch if word == "ip netns exec {host}" else word for word in command])

    def rounds(self):
        path = os.path.join(self.folder, "run", "rounds.jsonl")
        if not os.path.exists(path):
            return []
        with open(path, encoding="utf-8") as lines:
            return [json.loads(line) for line in lines.read().split("\n")[:-1]]

    def await_round(self, process, number, at_most=60):
        until = time.monotonic() + at_most
        while len(self.rounds()) < number:
            if time.monotonic() > until or process.poll() is not None:
                self.fail(f"no round {number}: {self.stopped(process)}")
            time.sleep(0.005)

    def stopped(self, process):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        return process.communicate(timeout=60)[0]

    def kill_machine(self, hosts, host):
        """What a machine loses with its power."""
        for pid in processes_of(hosts, host):
            kill_if_there(pid)

    def programs_of(self, hosts, host):
        return [pid for pid in processes_of(hosts, host) if name_of(pid).startswith("island_rounds")]

    def launcher_of(self, hosts):
        for pid in processes_of(hosts, 0):
            with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
                words = file.read().split("\0")
            if "--islands" in words and words[0] == LOCKSTEP:
                return pid
        return self.fail("no launcher")

    def figures(self, machine):
        with open(os.path.join(self.folder, f"machine_{machine}.json"), encoding="utf-8") as file:
            return json.load(file)

    def check_samples(self, machines, lost=()):
        """Each sample of each machine has counted once, in a round of some machines, on that which has finished last."""
        last = max((self.figures(machine) for machine in machines), key=lambda figures: figures["rounds"])
        for machine, counts in enumerate(last["machines"]):
            rounds = [one["took_part"] for one in self.rounds() if machine in one["took_part"]]
            allowed = {f"{1 / len(took_part):.4f}" for took_part in rounds} | ({"0.0000"} if machine in lost else set())
            self.assertLessEqual(set(counts), allowed, f"samples of machine {machine}")

    def check_wait(self, rounds):
        waits = [one["seconds_waited"] for one in rounds]
        self.assertLess(max(waits), WAITS_AT_MOST, rounds)

    def check_way_back(self, rounds, machine):
        """Takes part at the latest in the second round after the one in which it asked for the outer state."""
        asked = [one["round"] for one in rounds if one["left_out"].get(str(machine)) == STATE]
        back = [one["round"] for one in rounds if machine in one["took_part"] and (not asked or one["round"] > asked[0])]
        self.assertTrue(asked and back, rounds)
        self.assertLessEqual(back[0], asked[0] + 2, rounds)


class Islands(IslandsTest):
    def test_a_killed_machine_is_left_out_and_comes_back(self):
        with Hosts(4) as hosts:
            process = self.begin_islands(hosts, "--elastic", "2", pause=20)
            self.await_round(process, 2)
            time.sleep(0.2)  # in the middle of a round
            self.kill_machine(hosts, 2)
            killed = len(self.rounds())
            output = self.ended(process, 0, seconds=90)
        rounds = self.rounds()
        after = rounds[killed:]
        self.assertEqual(after[0]["took_part"], [0, 1, 3], output)
        self.check_wait(after[:-1])
        self.check_way_back(after, 2)
        self.assertNotIn("differs", output)
        self.check_samples([0, 1, 2, 3])
        self.assertIn("machine 2 is left out", output)
        self.nothing_left()

    def test_a_machine_that_is_killed_before_its_first_round_comes_back(self):
        killed = f"test ${{LOCKSTEP_ISLAND%%/*}} = 1 && mkdir {self.folder}/killed 2>&- && kill -9 $$"
        with Hosts(2) as hosts:
            output = self.ended(self.begin_islands(hosts, "--elastic", "1", steps=300, before=killed), 0)
        self.assertRegex(output, r"machine 1 \(.*\) ended with 41; it is started again in 1 s")
        self.check_samples([0, 1])

    def test_a_round_that_follows_at_once_on_joining(self):
        with Hosts(2) as hosts:
            for _ in range(4):
                self.ended(self.begin_islands(hosts, steps=1, pause=0), 0, seconds=30)
                self.assertEqual([one["took_part"] for one in self.rounds()], [[0, 1]])
                for path in glob.glob(os.path.join(self.folder, "*")):
                    shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)

    def test_a_slower_machine_that_was_late_is_waited_for_again(self):
        with Hosts(2) as hosts:
            process = self.begin_islands(hosts, "--elastic", "1", "--round-deadline", "0.7", steps=500, pause=(5, 15))
            self.await_round(process, 2)
            slow = self.programs_of(hosts, 1)
            for what, seconds in ((signal.SIGSTOP, 1.5), (signal.SIGCONT, 0)):
                for pid in slow:
                    os.kill(pid, what)
                time.sleep(seconds)
            stopped = len(self.rounds())
            output = self.ended(process, 0, seconds=90)
        rounds = self.rounds()
        self.assertTrue([one for one in rounds if one["took_part"] == [0]], output)
        after = [one["took_part"] for one in rounds[stopped + 2 :] if 0 in one["took_part"]]
        self.assertGreater(len(after), 5, rounds)
        self.assertLessEqual(after.count([0]), 2, rounds)
        self.check_samples([0, 1])

    def test_sigterm_ends_a_machine_that_waits_for_another(self):
        with Hosts(2) as hosts:
            process = self.begin_islands(hosts, steps=100000)
            self.await_round(process, 2)
            waits, stopped = self.programs_of(hosts, 0), self.programs_of(hosts, 1)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(1)
            os.kill(self.launcher_of(hosts), signal.SIGTERM)
            until = time.monotonic() + 10
            while time.monotonic() < until and any(os.path.exists(f"/proc/{pid}") for pid in waits):
                time.sleep(0.1)
            self.assertFalse([pid for pid in waits if os.path.exists(f"/proc/{pid}")])
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            output = process.communicate(timeout=40)[0]
        self.assertEqual(process.returncode, 60, output)
        self.nothing_left(seconds=10)

    def test_what_is_not_supported_is_refused(self):
        hosts = ("--hosts", "a:1,b:1")
        for options, text in (
            ((*hosts, "--islands", "--elastic", "3"), "--elastic takes"),
            ((*hosts, "--islands", "--elastic", "1:1"), "--elastic takes"),
            ((*hosts, "--round-deadline", "1"), "--round-deadline belongs to --islands"),
            ((*hosts, "--islands", "--virtual-ranks", "4"), "--islands and --virtual-ranks cannot be used together"),
            ((*hosts, "--islands", "--dry-run"), "--islands and --dry-run cannot be used together"),
            ((*hosts, "--islands", "--encrypt", "--link-port", "4000"), "--islands and --link-port cannot be used together"),
            (("--hosts", "a:1,b:2", "--islands"), "as many ranks on each machine"),
            (("--islands",), "--islands needs --hosts"),
            (("--nnodes", "2", "--node-rank", "0", "--rendezvous", "127.0.0.1:4000", "--key-file", "k", "--islands"), "--islands needs --hosts"),
        ):
            ran = subprocess.run([LOCKSTEP, "run", *options, "true"], capture_output=True, text=True, timeout=20)
            self.assertEqual(ran.returncode, 2, (options, ran.stderr))
            self.assertIn(text, ran.stderr)


class IslandsOfATrainer(IslandsTest):
    """Runs of island_trainer: 240 samples in batches of 8, so each epoch has 10 steps on three machines, and meetings after 4, 8 and 10."""

    def begin_trainer(self, hosts, *options, epochs=4, pause=5, fragments=()):
        program = [os.path.join(BIN, "island_trainer"), self.folder, epochs, 4, pause, *fragments]
        return self.begin(*hosts.lockstep_run([1] * len(hosts.names), "--islands", "--run-dir", "run", *options, "--", *program))

    def epochs(self, machine):
        """The hashes after each epoch."""
        with open(os.path.join(self.folder, f"machine_{machine}.txt"), encoding="utf-8") as file:
            return {int(line.split()[0]): line.split()[1] for line in file}

    def test_machines_have_equal_parameters_and_statistics_after_each_epoch(self):
        with Hosts(3) as hosts:
            output = self.ended(self.begin_trainer(hosts), 0)
        self.assertEqual([one["took_part"] for one in self.rounds()], [[0, 1, 2]] * 12, output)
        self.assertEqual(set(self.epochs(0)), {0, 1, 2, 3})
        for machine in (1, 2):
            self.assertEqual(self.epochs(machine), self.epochs(0), output)
        self.assertEqual(len(set(self.epochs(0).values())), 4, "they have trained")
        self.assertTrue(os.path.isdir(os.path.join(self.folder, "checkpoints", "machine_2")))

    def test_fragments_that_overlap_are_equal_after_each_epoch(self):
        with Hosts(2) as hosts:
            output = self.ended(self.begin_trainer(hosts, fragments=(3, 2)), 0)
        self.assertEqual({tuple(one["took_part"]) for one in self.rounds()}, {(0, 1)}, output)
        self.assertEqual(set(self.epochs(0)), {0, 1, 2, 3})
        self.assertEqual(self.epochs(1), self.epochs(0), output)
        self.assertEqual(len(set(self.epochs(0).values())), 4, "they have trained")

    @thorough
    def test_a_machine_that_is_killed_ends_its_epochs_and_the_others_do_not_wait(self):
        with Hosts(3) as hosts:
            process = self.begin_trainer(hosts, "--elastic", "2", epochs=12, pause=20)
            self.await_round(process, 4)
            self.kill_machine(hosts, 1)
            killed = len(self.rounds())
            output = self.ended(process, 0, seconds=90)
        rounds = self.rounds()[killed:]
        self.check_wait(rounds[:-1])
        self.assertTrue([one for one in rounds if one["took_part"] == [0, 2]], output)
        self.assertTrue([one for one in rounds if 1 in one["took_part"]], output)
        for machine in range(3):
            self.assertEqual(set(self.epochs(machine)), set(range(12)), output)


@thorough
class IslandsInTrouble(IslandsTest):
    def test_machines_that_meet_have_equal_models(self):
        with Hosts(3) as hosts:
            process = self.begin_islands(hosts, "--encrypt", ranks=2)
            output = self.ended(process, 0)
        rounds = self.rounds()
        self.assertEqual([one["round"] for one in rounds], list(range(1, self.STEPS // self.EVERY + 1)))
        self.assertTrue(all(one["took_part"] == [0, 1, 2] for one in rounds), rounds)
        self.assertEqual(len({self.figures(machine)["hash"] for machine in range(3)}), 1, output)
        self.check_samples([0, 1, 2])

    def test_a_machine_that_is_cut_off_is_left_out(self):
        with Hosts(3) as hosts:
            process = self.begin_islands(hosts, "--elastic", "2", "--max-restarts", "0", steps=200)
            self.await_round(process, 3)
            hosts.cut(0, 2)
            cut = len(self.rounds())
            output = self.ended(process, 0, seconds=90)
        after = self.rounds()[cut:]
        without = [one for one in after if one["took_part"] == [0, 1]]
        self.assertTrue(without, output)
        self.check_wait(without)
        self.assertIn("it was silent for 800 ms", output)
        self.assertIn("lost the coordinator of the rounds", output)
        self.assertEqual(self.figures(0)["hash"], self.figures(1)["hash"])
        self.check_samples([0, 1], lost=[2])

    def test_two_that_are_gone_at_once(self):
        with Hosts(4) as hosts:
            process = self.begin_islands(hosts, "--elastic", "2", steps=500)
            self.await_round(process, 3)
            for host in (1, 3):
                self.kill_machine(hosts, host)
            killed = len(self.rounds())
            output = self.ended(process, 0, seconds=90)
        after = self.rounds()[killed:]
        self.check_wait([one for one in after if one["took_part"] == [0, 2]])
        for machine in (1, 3):
            self.check_way_back(after, machine)
        self.check_samples([0, 1, 2, 3])

    def test_fewer_than_the_least_end_the_run(self):
        with Hosts(3) as hosts:
            process = self.begin_islands(hosts, "--elastic", "3", "--max-restarts", "0", steps=100000)
            self.await_round(process, 3)
            self.kill_machine(hosts, 1)
            output = self.ended(process, 51)
        self.assertIn("fewer than the 3 machines that --elastic demands are left", output)
        self.nothing_left()

    def test_the_coordinators_end_ends_the_machines_by_name(self):
        with Hosts(3) as hosts:
            # As with ssh, agents do not end with the process that has started them.
            apart = "sh -c 'exec 3<&0; ip netns exec \"$0\" \"$@\" <&3 & wait $!' {host}"
            process = self.begin_islands(hosts, "--elastic", "1", steps=100000, launch=apart)
            self.await_round(process, 3)
            self.kill_machine(hosts, 0)
            process.wait(timeout=30)
            self.nothing_left(seconds=40)
        for machine in (1, 2):
            with open(os.path.join(self.folder, "run", f"machine_{machine}", "rank_0.log"), encoding="utf-8") as log:
                self.assertRegex(log.read(), "DiLoCo: .* has lost the coordinator of the rounds: ")

    def test_a_slow_machine_contributes_to_the_next_round(self):
        with Hosts(3) as hosts:
            process = self.begin_islands(hosts, "--elastic", "2", "--round-deadline", "0.3", steps=300)
            self.await_round(process, 2)
            slow = self.programs_of(hosts, 1)
            for _ in range(6):
                for what, seconds in ((signal.SIGSTOP, 0.5), (signal.SIGCONT, 0.2)):
                    for pid in slow:
                        os.kill(pid, what)
                    time.sleep(seconds)
            output = self.ended(process, 0, seconds=90)
        rounds = self.rounds()
        late = [one["round"] for one in rounds if one["left_out"].get("1") == "it is late"]
        self.assertTrue(late, output)
        self.assertTrue([one for one in rounds if 1 in one["took_part"] and one["round"] > late[0]], rounds)
        self.check_samples([0, 1, 2])

    def test_a_machine_that_is_not_finite_is_left_out_by_name(self):
        with Hosts(2) as hosts:
            output = self.ended(self.begin_islands(hosts, nan=(1, 50)), 0)
        left_out = [one for one in self.rounds() if one["took_part"] == [0]]
        self.assertEqual([one["left_out"] for one in left_out], [{"1": "its parameters were not finite"}])
        self.assertIn("machine 1 was left out of the round of step 60: its parameters were not finite", output)
        self.assertEqual(self.figures(0)["hash"], self.figures(1)["hash"])
        self.check_samples([0, 1], lost=[1])

    def test_rounds_in_which_no_machine_is_finite_end_the_run_by_their_numbers(self):
        with Hosts(2) as hosts:
            output = self.ended(self.begin_islands(hosts, "--max-restarts", "0", nan=("all", 50)), 40)
        for machine in (0, 1):
            with open(os.path.join(self.folder, "run", f"machine_{machine}", "rank_0.log"), encoding="utf-8") as log:
                self.assertIn("the parameters of all machines were not finite in 3 rounds in a row, 3, 4 and 5, so nothing", log.read(), output)

    def test_strangers_get_nothing(self):
        with Hosts(2) as hosts:
            process = self.begin_islands(hosts, steps=100000)
            self.await_round(process, 2)
            ends = {line.split()[3] for line in run(*hosts.on(0, "ss", "-Hltn")).stdout.splitlines()}
            self.assertEqual({end.rsplit(":", 1)[0] for end in ends}, {ADDRESSES[0]}, "nothing listens for all networks")
            self.assertEqual(len(ends), 1, ends)
            self.assertEqual(run(*hosts.on(1, "ss", "-Hltn")).stdout, "", "only the coordinator listens")
            got = run(*hosts.on(1, "python3", "-c", STRANGER, *ends.pop().rsplit(":", 1))).stdout.split()
            self.assertLess(sum(map(int, got)), 60 * 8, "an alert of TLS at most")
            self.await_round(process, len(self.rounds()) + 2)
            output = self.stopped(process)
        self.assertIn("without this run's key turned away", output)
        self.assertTrue(all(one["took_part"] == [0, 1] for one in self.rounds()))

    def test_a_machine_that_comes_too_late_is_refused(self):
        with Hosts(2) as hosts:
            process = self.begin_islands(hosts, "--elastic", "1", steps=60)
            self.await_round(process, 2)
            self.kill_machine(hosts, 1)
            output = self.ended(process, 0)
        self.assertEqual(self.rounds()[-1]["took_part"], [0], output)
        self.assertIn("machine 1 is refused: it comes when the others have finished", output)

    def test_a_program_without_diloco_is_told(self):
        with Hosts(2) as hosts:
            output = self.ended(self.begin(*hosts.lockstep_run((1, 1), "--islands", "--run-dir", "run", "true")), 2)
        self.assertIn("took part in no round", output)

    def test_machines_with_other_options_end_the_run(self):
        with Hosts(2) as hosts:
            own = f"exec {BIN}/island_rounds {self.folder} 100 $((20 + ${{LOCKSTEP_ISLAND%%/*}})) 10"
            output = self.ended(self.begin(*hosts.lockstep_run((1, 1), "--islands", "--run-dir", "run", "--", "sh", "-c", own)), 44)
        self.assertRegex(output, "machine [01] has another model, other ranks, or other options of the DiLoCo")
        self.assertRegex(output, "machine [01] has `sync_every 2[01]`, and machine [01] `sync_every 2[01]`")

    def test_a_machine_whose_agent_is_killed_ends_the_run_by_name(self):
        with Hosts(2) as hosts:
            process = self.begin_islands(hosts, "--max-restarts", "0", steps=100000)
            self.await_round(process, 2)
            self.kill_machine(hosts, 1)
            output = self.ended(process, 52)
        self.assertRegex(output, r"machine 1 \(.*\) is lost: its agent was ended by signal 9")
        with open(os.path.join(self.folder, "run", "machine_0", "rank_0.log"), encoding="utf-8") as log:
            self.assertIn("is lost: its agent", log.read())

    def test_a_hang_timeout_ends_a_machine_that_waits_for_another(self):
        with Hosts(2) as hosts:
            process = self.begin_islands(hosts, "--max-restarts", "0", "--hang-timeout", "3", pause=(5, 100000))
            output = self.ended(process, 43, seconds=40)
        self.assertIn("no progress for", output)

    def test_waiting_for_one_that_makes_steps_is_no_hang(self):
        with Hosts(2) as hosts:
            output = self.ended(self.begin_islands(hosts, "--max-restarts", "0", "--hang-timeout", "3", steps=20, pause=(1, 400)), 0)
        self.assertNotIn("no progress for", output)
        self.assertEqual([one["took_part"] for one in self.rounds()], [[0, 1]])

    def test_one_that_begins_without_its_checkpoint_warns_by_name(self):
        with Hosts(2) as hosts:
            process = self.begin_islands(hosts)
            self.await_round(process, 2)
            os.kill(self.launcher_of(hosts), signal.SIGTERM)
            self.ended(process, 60)
            for folder in ("machine_1", "run"):
                shutil.rmtree(os.path.join(self.folder, folder))
            output = self.ended(self.begin_islands(hosts), 0)
        self.assertRegex(output, r"machine 1 has no checkpoint and begins at step 1, and another one goes on from round \d+")

    def test_without_elastic_the_others_wait_until_a_machine_is_back(self):
        with Hosts(2) as hosts:
            process = self.begin_islands(hosts, "--max-restarts", "1")
            self.await_round(process, 3)
            self.kill_machine(hosts, 1)
            output = self.ended(process, 0)
        self.assertFalse([one for one in self.rounds() if "channel" in one["left_out"].get("1", "")], output)
        self.check_samples([0, 1])

    def test_a_killed_rank_ends_its_machine_alone(self):
        with Hosts(2) as hosts:
            process = self.begin_islands(hosts, "--elastic", "1", ranks=2, steps=300)
            self.await_round(process, 3)
            os.kill([pid for pid in processes_of(hosts, 1) if name_of(pid).startswith("island_rounds")][1], signal.SIGKILL)
            output = self.ended(process, 0)
        rounds = self.rounds()
        self.assertTrue([one for one in rounds if one["took_part"] == [0]], output)
        self.assertTrue([one for one in rounds[-8:] if 1 in one["took_part"]], output)
        self.check_samples([0, 1])

    def test_status_and_sigterm(self):
        with Hosts(2) as hosts:
            process = self.begin_islands(hosts, steps=100000)
            self.await_round(process, 3)
            status = run(LOCKSTEP, "status", os.path.join(self.folder, "run")).stdout
            self.assertRegex(status, r"machines that meet in rounds: \d+ rounds, the last \d+; \d+ bytes")
            self.assertRegex(status, r"machine 1  took part in \d+ rounds, last in round \d+\n")
            stacks = subprocess.run([LOCKSTEP, "stacks", os.path.join(self.folder, "run")], capture_output=True, text=True)
            self.assertIn("whose machines are runs of their own", stacks.stderr)
            os.kill(self.launcher_of(hosts), signal.SIGTERM)
            output = process.communicate(timeout=40)[0]
        self.assertIn("the machines are asked to save and leave", output)
        self.assertNotEqual(process.returncode, 0, output)
        self.nothing_left(seconds=10)


if __name__ == "__main__":
    main()
