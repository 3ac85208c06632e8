"""Strangers at each port that a run of several machines listens on: the rendezvous, the links of --encrypt, a relay, the hub of --islands. None gets in, the run goes on,
and its launchers and link processes have as many descriptors and threads as before, and hardly more memory. 100,000 attempts at each port with LOCKSTEP_NIGHTLY."""

import json
import os
import signal
import threading
import time

from encrypted_hosts_test import name_of, outer_listeners
from hosts_test import ADDRESSES, Hosts, processes_of
from islands_test import IslandsTest
from support import BIN, LOCKSTEP, main, run

ATTEMPTS = 100000 if os.environ.get("LOCKSTEP_NIGHTLY") else 2000
MOST_ANSWER = 64        # bytes to one without the key: alerts of TLS
MOST_TO_A_REPLAY = 4096  # the server's half of a handshake
MOST_MEMORY = 32 << 10  # KiB
SETTLES = 30            # seconds, for those that the kernel has still kept to be taken, and handshakes to be given up


def counts_of(hosts):
    """Of each launcher, agent and link process: descriptors, threads, KiB of memory."""
    found = {}
    for host in range(len(hosts.names)):
        for pid in processes_of(hosts, host):
            try:
                if not name_of(pid).startswith("lockstep"):
                    continue
                with open(f"/proc/{pid}/status", encoding="utf-8") as file:
                    status = dict(line.split(":", 1) for line in file.read().splitlines())
                found[pid] = len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0])
            except (FileNotFoundError, ProcessLookupError, KeyError):
                continue
    return found


class Drained:
    """Reads a process's output, so that it never waits for its reader."""

    def __init__(self, process):
        self.lines = []
        self.thread = threading.Thread(target=lambda: self.lines.extend(process.stdout), daemon=True)
        self.process = process
        self.thread.start()

    def steps(self):
        return sum(line.startswith("step ") for line in list(self.lines))

    def ended(self, seconds=60):
        code = self.process.wait(timeout=seconds)
        self.thread.join(seconds)
        return code, "".join(self.lines)


class HostilePorts(IslandsTest):
    def setUp(self):
        super().setUp()
        self.key = os.path.join(self.folder, "run.key")
        with open(os.open(self.key, os.O_CREAT | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            file.write(os.urandom(32).hex())

    def attack(self, hosts, host, where, key="-"):
        """Attempts from a machine; what they got."""
        before = counts_of(hosts)
        began = time.monotonic()
        got = json.loads(run(*hosts.on(host, os.path.join(BIN, "hostile_attempts"), where, ATTEMPTS, key)).stdout)
        seconds = time.monotonic() - began
        until = time.monotonic() + SETTLES
        while [one[:2] for one in counts_of(hosts).values()] != [one[:2] for one in before.values()] and time.monotonic() < until:
            time.sleep(0.2)
        after = counts_of(hosts)
        self.assertEqual({pid: one[:2] for pid, one in after.items()}, {pid: one[:2] for pid, one in before.items()}, "descriptors and threads of each process")
        grown = {pid: after[pid][2] - before[pid][2] for pid in before}
        self.assertLess(max(grown.values()), MOST_MEMORY, "KiB")
        self.assertEqual(sum(kind["attempts"] for kind in got.values()), ATTEMPTS)
        connected = sum(kind["connected"] for kind in got.values())
        self.assertGreater(connected, ATTEMPTS * 0.9)
        self.assertEqual({name: kind["got_in"] for name, kind in got.items() if kind["got_in"]}, {})
        for name, kind in got.items():
            self.assertLessEqual(kind["most_bytes"], MOST_TO_A_REPLAY if name in ("replayed", "slow") else MOST_ANSWER, name)
        print(f"{where}: {ATTEMPTS} attempts, {connected} connected, in {seconds:.0f} s; {len(before)} processes, {sum(one[0] for one in before.values())} descriptors before and after, "
              f"{max(grown.values())} KiB more memory at most", flush=True)
        return got

    def goes_on(self, steps, at_most=60):
        """Waits until a count grows."""
        before, until = steps(), time.monotonic() + at_most
        while steps() <= before:
            self.assertLess(time.monotonic(), until, "the run makes no step")
            time.sleep(0.05)

    def test_the_rendezvous_and_the_links_of_encrypt(self):
        where = ADDRESSES[0] + ":29541"
        with Hosts() as hosts:
            words = [LOCKSTEP, "run", "--nnodes", 2, "--rendezvous", where, "--key-file", self.key, "--encrypt", "--log-dir", "run"]
            runs = [self.begin(*hosts.on(node, *words, "--node-rank", node, "--", os.path.join(BIN, "train_until_stopped"), "checkpoints", 10 ** 9)) for node in (0, 1)]
            outputs = [Drained(one) for one in runs]
            self.goes_on(outputs[0].steps)
            link, = outer_listeners(hosts, 1)
            for port in (where, link):
                before = outputs[0].steps()
                self.attack(hosts, 0 if port == link else 1, port, self.key)
                self.assertGreater(outputs[0].steps(), before, "the training went on")
            self.goes_on(outputs[0].steps)
            runs[0].send_signal(signal.SIGTERM)
            code, output = outputs[0].ended()
            self.assertEqual(code, 60, output)
            outputs[1].ended()
        self.assertIn("without this run's key turned away", output)
        self.assertIn("did not have the run's key", output)
        self.nothing_left()

    def test_a_relay(self):
        with Hosts(3) as hosts:
            hosts.cut(1, 2)
            process = self.train_for_ever(hosts, (1, 1, 1), "--encrypt", "--relay", hosts.names[0])
            output = Drained(process)
            relay, = outer_listeners(hosts, 0)
            before = output.steps()
            self.attack(hosts, 1, relay)
            self.assertGreater(output.steps(), before, "the training went on")
            self.goes_on(output.steps)
            process.send_signal(signal.SIGTERM)
            code, text = output.ended()
            self.assertEqual(code, 60, text)
        self.nothing_left()

    def test_the_hub_of_islands(self):
        where = ADDRESSES[0] + ":29542"
        with Hosts(2) as hosts:
            process = self.begin_islands(hosts, "--rendezvous", where, "--key-file", self.key, steps=20000, pause=40)
            output = Drained(process)
            self.goes_on(lambda: len(self.rounds()))
            before = len(self.rounds())
            self.attack(hosts, 1, where, self.key)
            rounds = self.rounds()[before:]
            self.assertTrue(rounds, "rounds went on")
            self.goes_on(lambda: len(self.rounds()))
            for _ in range(2):  # the first one asks the machines to leave
                process.send_signal(signal.SIGTERM)
                time.sleep(0.5)
            _, text = output.ended()
        self.assertTrue(all(one["took_part"] == [0, 1] for one in rounds), text)
        self.assertIn("without this run's key turned away", text)
        self.nothing_left(10)


if __name__ == "__main__":
    main()
