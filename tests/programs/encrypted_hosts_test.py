"""`lockstep run --hosts --encrypt`: what ranks send between machines, which are network namespaces, is neither read nor changed on the way. The links themselves are tested in
tests/hosts/link_process_test.cpp."""

import os
import signal
import socket
import subprocess
import sys
import time

from hosts_test import ADDRESSES, Hosts, OneCommandTest, kill_if_there, processes_of
from support import BIN, LOCKSTEP, main, marked_processes, run

# Reads all that goes over the interfaces of a namespace, but for loopback, until its input ends; then says how many bytes it has seen, and how many of them were the mark.
SNIFFER = """
import select, socket, sys
sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
print("ready", flush=True)
seen = marks = 0
while True:
    ready = select.select([sniffer, sys.stdin], [], [])[0]
    if sniffer in ready:
        frame, origin = sniffer.recvfrom(1 << 17)
        if origin[0] != "lo":
            seen += len(frame)
            marks += frame.count(b"MARKED_GRADIENT_")
    elif sys.stdin in ready:
        break
print(seen, marks)
"""


def outer_listeners(hosts, host):
    """Sockets of a host that listen elsewhere than on loopback."""
    lines = run(*hosts.on(host, "ss", "-Hltn"), check=False).stdout.splitlines()
    return {end for end in (line.split()[3] for line in lines) if not end.startswith("127.")}


def name_of(pid):
    with open(f"/proc/{pid}/comm", encoding="utf-8") as file:
        return file.read().strip()


class EncryptedHosts(OneCommandTest):
    def lockstep_run(self, hosts, slots, *rest):
        return self.begin(*hosts.lockstep_run(slots, "--encrypt", *rest))

    def test_the_bits_are_those_of_one_machine_and_each_machine_has_one_port(self):
        with Hosts(3) as hosts:
            process = self.lockstep_run(hosts, (2, 1, 1), "--log-dir", "run", "--", *self.command("hosts"))
            most = [0, 0, 0]
            while process.poll() is None:
                for host in range(3):
                    most[host] = max(most[host], len(outer_listeners(hosts, host)))
            output = self.ended(process, 0)
        self.assertIn("4 ranks on 3 machines by lockstep run, hierarchical", output)
        self.assertIn(most, ([1, 1, 1], [2, 1, 1]), "one for the links of each machine, and until all agents have come the coordinator's")
        same_machine = self.figures(LOCKSTEP, "run", "-n", 4, "--", arguments=("--backend", "shm"))
        self.assertEqual(self.read("hosts")["train_loss"], same_machine["train_loss"], "every sum is the same, bit by bit")
        self.nothing_left()

    def sniffed(self, *options):
        """Bytes and marks that went over a machine's interfaces."""
        with Hosts() as hosts:
            sniffer = subprocess.Popen(hosts.on(1, sys.executable, "-c", SNIFFER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.addCleanup(sniffer.kill)
            self.assertEqual(sniffer.stdout.readline(), "ready\n")
            process = self.begin(*hosts.lockstep_run((1, 1), *options, "--", os.path.join(BIN, "marked_gradients")))
            self.assertIn("the gradients were the mark", self.ended(process, 0))
            told, _ = sniffer.communicate("", timeout=30)
        return map(int, told.split())

    def test_no_gradient_is_seen_on_the_wire(self):
        seen, marks = self.sniffed()
        self.assertGreater(marks, 1000, "the test sees what is in the clear")
        seen_encrypted, marks = self.sniffed("--encrypt")
        self.assertEqual(marks, 0)
        self.assertGreater(seen_encrypted, seen / 2)

    def test_a_killed_rank_and_restarts(self):
        with Hosts() as hosts:
            process = self.train_for_ever(hosts, (1, 2), "--encrypt", "--max-restarts", 1)
            victim = next(pid for pid, rank in marked_processes(self.mark).items() if rank == "2")
            os.kill(victim, signal.SIGKILL)
            for line in process.stdout:
                if line.startswith("begins at "):
                    break
            self.assertGreaterEqual(int(line.split()[2]), 25)
            for line in process.stdout:
                if line.startswith("step "):
                    break
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            self.ended(process, 60)
        self.nothing_left()

    def test_a_machine_that_is_gone_is_named_as_soon_as_without_encryption(self):
        with Hosts() as hosts:
            process = self.train_for_ever(hosts, (1, 2), "--encrypt")
            killed = time.monotonic()
            for pid in processes_of(hosts, 1):
                kill_if_there(pid)
            output = self.ended(process, 52, 20)
            self.assertLess(time.monotonic() - killed, 6)
        self.assertIn("was lost with its machine: " + hosts.names[1], output)
        self.nothing_left()

    def test_a_cut_network_is_noticed(self):
        with Hosts() as hosts:
            process = self.train_for_ever(hosts, (1, 1), "--encrypt")
            time.sleep(0.5)
            hosts.cut(0, 1)
            cut = time.monotonic()
            output = self.ended(process, 52, 20)
            self.assertLess(time.monotonic() - cut, 8)
            self.assertIn(hosts.names[1] + " has not been heard of for 4 s", output)
        self.nothing_left(8)

    def test_a_link_that_breaks_is_named(self):
        with Hosts() as hosts:
            process = self.train_for_ever(hosts, (1, 1), "--encrypt")
            relay, = (pid for pid in processes_of(hosts, 1) if name_of(pid) == "lockstep-links")
            os.kill(relay, signal.SIGKILL)
            output = process.communicate(timeout=30)[0]
            self.assertNotEqual(process.returncode, 0, output)
        self.assertIn(f"the encrypted link between {hosts.names[0]} and {hosts.names[1]} broke", output)
        self.nothing_left(8)

    def test_a_link_whose_packets_are_lost_is_named_within_twenty_seconds(self):
        with Hosts(3) as hosts:
            process = self.train_for_ever(hosts, (1, 1, 1), "--encrypt", "--relay", hosts.names[0])
            hosts.lose_packets(1, 2), hosts.lose_packets(2, 1)
            lost = time.monotonic()
            output = process.communicate(timeout=90)[0]
            self.assertLess(time.monotonic() - lost, 20)
            self.assertNotEqual(process.returncode, 0, output)
            one, other = hosts.names[1:]
            self.assertRegex(output, f"the encrypted link between ({one} and {other}|{other} and {one}) broke: ")
        self.nothing_left(8)

    def test_a_port_for_the_firewall(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with Hosts() as hosts:
            process = self.train_for_ever(hosts, (1, 1), "--encrypt", "--link-port", port)
            self.assertEqual(outer_listeners(hosts, 1), {f"{ADDRESSES[1]}:{port}"})
            process.send_signal(signal.SIGTERM)
            self.ended(process, 60)

    def test_started_one_by_one(self):
        key = os.path.join(self.folder, "key")
        with open(os.open(key, os.O_CREAT | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            file.write(os.urandom(32).hex())

        def started(*options):
            """Output and exit code of hello_ranks on two machines, each with options of its own."""
            with Hosts() as hosts:
                runs = [self.begin(*hosts.on(node, LOCKSTEP, "run", "--nnodes", 2, "--node-rank", node, "--rendezvous", ADDRESSES[0] + ":29533",
                                             "--key-file", key, *options[node], "--", os.path.join(BIN, "hello_ranks"))) for node in (0, 1)]
                outputs = [runs[1].communicate(timeout=60)[0]]
                if runs[1].returncode != 0:
                    runs[0].send_signal(signal.SIGTERM)
                outputs.insert(0, runs[0].communicate(timeout=60)[0])
            return outputs, [one.returncode for one in runs]
        for second in (["--encrypt"], []):  # the coordinator decides
            outputs, codes = started(["--encrypt"], second)
            self.assertEqual(codes, [0, 0], outputs)
            self.assertIn("1 + ... + 2 = 3", outputs[0])
        outputs, codes = started([], ["--encrypt"])
        self.assertEqual(codes[1], 46, outputs)
        self.assertIn("it was started with --encrypt, and the coordinator without; give it on node 0, too", outputs[1])

    def test_ipv6_alone(self):
        key = os.path.join(self.folder, "key")
        with open(os.open(key, os.O_CREAT | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            file.write(os.urandom(32).hex())
        with Hosts() as hosts:
            for host, other in ((0, 1), (1, 0)):
                end = hosts.ends[host, other]
                run("ip", "-n", hosts.names[host], "-4", "address", "flush", "dev", end)
                run("ip", "-n", hosts.names[host], "-6", "address", "add", f"fd00:213::{host + 1}/64", "dev", end, "nodad")
            runs = [self.begin(*hosts.on(node, LOCKSTEP, "run", "--nnodes", 2, "--node-rank", node, "--rendezvous", "[fd00:213::1]:29535",
                                         "--key-file", key, "-n", 2, "--encrypt", "--", os.path.join(BIN, "collectives"))) for node in (0, 1)]
            outputs = [self.ended(one, 0) for one in runs]
        self.assertIn("4 ranks on 2 machines by lockstep run, hierarchical", outputs[0])

    def test_two_runs_on_the_same_machines(self):
        with Hosts() as hosts:
            runs = [self.begin(*hosts.lockstep_run((1, 1), "--encrypt", "--log-dir", f"run{i}", "--", os.path.join(BIN, "train_until_stopped"), f"checkpoints{i}", 40))
                    for i in range(2)]
            outputs = [self.ended(one, 0, 100) for one in runs]
        self.assertEqual(len(outputs), 2)

    def test_one_machine_given_twice(self):
        enter = os.path.join(self.folder, "enter")  # NAME.LETTER COMMAND...
        with open(os.open(enter, os.O_CREAT | os.O_WRONLY, 0o700), "w", encoding="utf-8") as file:
            file.write('#!/bin/sh\nhost=${1%.*}; shift; exec ip netns exec "$host" "$@"\n')

        def hello(hosts, *names):
            return self.begin(*hosts.on(0, LOCKSTEP, "run", "--hosts", ",".join(name + ":1" for name in names), "--encrypt", "--launch-command", enter + " {host}",
                                        "--", "sh", "-c", f'echo "$RANK uses $LOCKSTEP_ADDRESS $MASTER_ADDR"; exec {BIN}/hello_ranks'))
        with Hosts() as hosts:
            one, other = hosts.names
            output = self.ended(hello(hosts, one + ".a", other + ".a", other + ".b"), 46)
            self.assertIn(f"{other}.a and {other}.b are one machine; with --encrypt give each once", output)
            output = self.ended(hello(hosts, one + ".a", one + ".b"), 0)  # nothing leaves it
        self.assertIn("0 uses 127.0.0.1 \n", output)
        self.assertIn("1 + ... + 2 = 3", output)

    def test_machines_that_cannot_connect_to_each_other_send_by_a_relay(self):
        for hidden in (lambda hosts: hosts.cut(1, 2), lambda hosts: hosts.lose_packets(1, 2)):
            with Hosts(3) as hosts:
                hidden(hosts)
                process = self.lockstep_run(hosts, (1, 1, 1), "--", os.path.join(BIN, "collectives"))
                self.assertIn(" could not make an encrypted link to ", self.ended(process, 52))
                process = self.lockstep_run(hosts, (2, 1, 1), "--relay", hosts.names[0], "--log-dir", "run", "--", *self.command("relayed"))
                output = self.ended(process, 0)
                one, other = hosts.names[1:]
                self.assertRegex(output, f"{one} cannot connect to {other} \\(.*\\): its data for it goes by the relay {hosts.names[0]}|"
                                         f"{other} cannot connect to {one} \\(.*\\): its data for it goes by the relay {hosts.names[0]}")
            same_machine = self.figures(LOCKSTEP, "run", "-n", 4, "--", arguments=("--backend", "shm"))
            self.assertEqual(self.read("relayed")["train_loss"], same_machine["train_loss"], "every sum is the same, bit by bit")
            self.nothing_left()

    def test_a_relay_that_ends_is_named(self):
        with Hosts(3) as hosts:
            hosts.cut(1, 2)
            process = self.train_for_ever(hosts, (1, 1, 1), "--encrypt", "--relay", hosts.names[0])
            relay, = (pid for pid in processes_of(hosts, 0) if name_of(pid) == "lockstep-links")
            os.kill(relay, signal.SIGKILL)
            output = process.communicate(timeout=30)[0]
            self.assertNotEqual(process.returncode, 0, output)
        self.assertRegex(output, "the encrypted link between .* broke")
        self.nothing_left(8)

    def test_a_machine_behind_a_relay_is_lost_or_its_rank_killed(self):
        with Hosts(3) as hosts:
            hosts.cut(1, 2)
            process = self.train_for_ever(hosts, (1, 1, 1), "--encrypt", "--relay", hosts.names[0], "--max-restarts", 1)
            victim = next(pid for pid, rank in marked_processes(self.mark).items() if rank == "2")
            os.kill(victim, signal.SIGKILL)
            for line in process.stdout:
                if line.startswith("begins at "):
                    break
            for line in process.stdout:
                if line.startswith("step "):
                    break
            for pid in processes_of(hosts, 2):
                kill_if_there(pid)
            output = self.ended(process, 52, 20)
        self.assertIn("was lost with its machine: " + hosts.names[2], output)
        self.nothing_left()

    def test_options_that_do_not_fit(self):
        for options, text in ((["--encrypt"], "--encrypt is for runs on several machines; give --hosts, --hostfile or --nnodes"),
                              (["--hosts", "a,b", "--link-port", 4000], "--link-port is the port of encrypted links; give --encrypt, too"),
                              (["--hosts", "a,b", "--encrypt", "--link-port", "x"], "--link-port"),
                              (["--hosts", "a,b", "--relay", "a"], "--relay joins encrypted links; give --encrypt, too"),
                              (["--hosts", "a,b", "--encrypt", "--relay", "c"], "--relay c is none of the machines; give one by its name in --hosts")):
            process = self.begin(LOCKSTEP, "run", *options, "--", "true")
            self.assertIn(text, self.ended(process, 2))


if __name__ == "__main__":
    main()
