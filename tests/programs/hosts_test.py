"""Two hosts with two ranks each train over Gloo by torchrun's variables. The hosts are network namespaces joined by a
veth pair, which only root can make."""

import json
import os
import subprocess
import unittest

from support import TRAIN, ProgramTest, environment, main, python_with_torch, run

ADDRESSES = ("10.213.7.1", "10.213.7.2")


class Hosts:
    """Two network namespaces that reach each other at ADDRESSES, and nothing else."""

    def __enter__(self):
        self.names = [f"lockstep-{os.getpid()}-{i}" for i in (0, 1)]
        ends = [f"lk{os.getpid() % 100000}{i}" for i in "ab"]
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
            run("ip", "link", "add", ends[0], "netns", self.names[0], "type", "veth", "peer", "name", ends[1], "netns", self.names[1])
            for name, end, address in zip(self.names, ends, ADDRESSES):
                run("ip", "-n", name, "address", "add", address + "/24", "dev", end)
                run("ip", "-n", name, "link", "set", end, "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)  # takes its end of the pair along

    def on(self, host, *command):
        return ["ip", "netns", "exec", self.names[host], *map(str, command)]


def why_not():
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"lockstep-probe-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    except FileNotFoundError:
        return "no `ip`: apt-get install iproute2"
    if made.returncode != 0:
        return "no network namespace can be made here: " + made.stderr.strip()
    subprocess.run(["ip", "netns", "delete", probe])
    return None


class TwoHosts(ProgramTest):
    def setUp(self):
        reason = why_not()
        if reason:
            self.skipTest(reason)
        super().setUp()

    def command(self, name):
        return [TRAIN, "--data", self.data, "--epochs", "2", "--batch-size", "16", "--json",
                os.path.join(self.folder, name + ".json"), "--run-dir", os.path.join(self.folder, name)]

    def read(self, name):
        with open(os.path.join(self.folder, name + ".json")) as file:
            return json.load(file)

    def wait_all(self, processes, timeout=120):
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        for process, output in zip(processes, outputs):
            self.assertEqual(process.returncode, 0, output)
        return outputs

    def start(self, *command, env=None):
        process = subprocess.Popen([str(part) for part in command], env=env or environment(), stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, cwd=self.folder, start_new_session=True)
        self.addCleanup(lambda: process.poll() is None and os.killpg(process.pid, 9))
        return process

    def test_two_ranks_on_each(self):
        with Hosts() as hosts:
            ranks = [self.start(*hosts.on(rank // 2, *self.command("by_hand")),
                                env=environment(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2",
                                                MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29511", OMP_NUM_THREADS="1"))
                     for rank in range(4)]
            # While they run, nothing may listen on a wildcard address.
            listening = set()
            while any(rank.poll() is None for rank in ranks):
                for host in (0, 1):
                    for line in run(*hosts.on(host, "ss", "-Hltn"), check=False).stdout.splitlines():
                        listening.add(line.split()[3].rsplit(":", 1)[0])
            outputs = self.wait_all(ranks)
        self.assertIn("4 ranks on 2 machines by torchrun's variables, gloo", "".join(outputs))
        self.assertTrue(listening)
        self.assertLessEqual(listening, set(ADDRESSES))
        figures = self.read("by_hand")
        self.assertEqual((figures["world_size"], figures["test_samples"]), (4, 99))
        same_machine = self.figures(os.path.join(os.path.dirname(TRAIN), "lockstep"), "run", "-n", 4, "--",
                                    arguments=("--backend", "gloo"))
        self.assertEqual(figures["train_loss"], same_machine["train_loss"])

    def test_torchrun_on_each(self):
        python = python_with_torch()
        if python is None:
            self.skipTest("no Python with torch, so no torchrun")
        with Hosts() as hosts:
            agents = [self.start(*hosts.on(node, python, "-m", "torch.distributed.run", "--no-python", "--nnodes", 2, "--node-rank",
                                           node, "--nproc-per-node", 2, "--master-addr", ADDRESSES[0], "--master-port", 29512,
                                           *self.command("torchrun")), env=environment(GLOO_SOCKET_IFNAME=""))
                      for node in (0, 1)]
            self.wait_all(agents)
        self.assertEqual(self.read("torchrun")["world_size"], 4)

    def test_a_host_that_does_not_come_is_named(self):
        with Hosts() as hosts:
            ranks = [self.start(*hosts.on(0, *self.command("missing")),
                                env=environment(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
                                                MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29513", LOCKSTEP_JOIN_TIMEOUT_S="3"))
                     for rank in range(2)]
            for rank in ranks:
                output = rank.communicate(timeout=60)[0]
                self.assertNotEqual(rank.returncode, 0)
                self.assertIn("2 of 4 ranks are there, missing 2, 3", output)


if __name__ == "__main__":
    main()
