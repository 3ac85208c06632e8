"""Two and three hosts train, through shared memory on each host and Gloo between them: by torchrun's variables, by torchrun, and by one `lockstep run --hosts`. The hosts
are network namespaces joined by veth pairs, which only root can make; some tests have one machine that passes for two."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import time
import unittest

from support import BIN, LOCKSTEP, TRAIN, ProgramTest, dies_with_us, environment, main, marked_processes, python_with_torch, run, thorough

ADDRESSES = ("10.213.7.1", "10.213.7.2", "10.213.7.3", "10.213.7.4")


class Hosts:
    """Network namespaces that reach each other at ADDRESSES, by a veth pair between each two, and nothing else."""

    made = itertools.count()

    def __init__(self, count=2):
        self.names = [f"lockstep-{os.getpid()}-{next(self.made)}" for _ in range(count)]
        self.ends = {}

    def __enter__(self):
        forget_hosts_of_the_dead()
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            for one in range(len(self.names)):
                for other in range(one):
                    self.join(one, other)
        except BaseException:
            self.__exit__()
            raise
        return self

    def join(self, one, other):
        ends = self.ends[one, other], self.ends[other, one] = [f"lk{os.getpid() % 10000}{a}{b}" for a, b in ((one, other), (other, one))]
        run("ip", "link", "add", ends[0], "netns", self.names[one], "type", "veth", "peer", "name", ends[1], "netns", self.names[other])
        for host, peer, end in ((one, other, ends[0]), (other, one, ends[1])):
            run("ip", "-n", self.names[host], "address", "add", ADDRESSES[host] + "/32", "dev", end)
            run("ip", "-n", self.names[host], "link", "set", end, "up")
        for host, peer, end in ((one, other, ends[0]), (other, one, ends[1])):
            run("ip", "-n", self.names[host], "route", "add", ADDRESSES[peer] + "/32", "dev", end, "src", ADDRESSES[host])

    def cut(self, one, other):
        run("ip", "-n", self.names[one], "link", "set", self.ends[one, other], "down")

    def lose_packets(self, one, other):
        """From now on nothing that `one` sends gets to `other`, and nobody says so."""
        run("ip", "-n", self.names[one], "neigh", "replace", ADDRESSES[other], "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", self.ends[one, other])

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)  # takes its ends of the pairs along

    def kill_all(self):
        """Kills what runs on the hosts: also what has left the group and the session of whoever started it."""
        for host in range(len(self.names)):
            for pid in processes_of(self, host):
                kill_if_there(pid)

    def on(self, host, *command):
        return ["ip", "netns", "exec", self.names[host], *map(str, command)]

    def lockstep_run(self, slots, *rest):
        """`lockstep run --hosts` on the first host."""
        hosts = ",".join(f"{name}:{count}" for name, count in zip(self.names, slots))
        return self.on(0, LOCKSTEP, "run", "--hosts", hosts, "--launch-command", "ip netns exec {host}", *rest)


def forget_hosts_of_the_dead():
    """A test that is killed leaves the names of its namespaces."""
    for name in os.listdir("/run/netns") if os.path.isdir("/run/netns") else []:
        made = re.fullmatch(r"lockstep-(?:probe-)?(\d+)-\d+", name)
        if made and not os.path.isdir(f"/proc/{made[1]}"):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def processes_of(hosts, host):
    return [int(pid) for pid in run("ip", "netns", "pids", hosts.names[host]).stdout.split()]


def kill_if_there(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # the death of another has ended it


def listening_addresses(hosts, processes):
    """Where anything listened on the hosts while any of the processes ran."""
    found = set()
    while any(process.poll() is None for process in processes):
        for host in range(len(hosts.names)):
            for line in run(*hosts.on(host, "ss", "-Hltn"), check=False).stdout.splitlines():
                found.add(line.split()[3].rsplit(":", 1)[0])
    return found


def why_not():
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"lockstep-probe-{os.getpid()}-{next(Hosts.made)}"
    try:
        made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    except FileNotFoundError:
        return "no `ip`: apt-get install iproute2"
    if made.returncode != 0:
        return "no network namespace can be made here: " + made.stderr.strip()
    subprocess.run(["ip", "netns", "delete", probe])
    return None


class HostsTest(ProgramTest):
    def setUp(self):
        reason = why_not()
        if reason:
            self.skipTest(reason)
        super().setUp()

    def command(self, name, epochs=2):
        return [TRAIN, "--data", self.data, "--epochs", epochs, "--batch-size", "16", "--json",
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
        process = subprocess.Popen(dies_with_us(*command), env=env or environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   cwd=self.folder, start_new_session=True)
        self.addCleanup(lambda: process.poll() is None and os.killpg(process.pid, 9))
        return process


class TwoHosts(HostsTest):
    def test_two_ranks_on_each(self):
        with Hosts() as hosts:
            ranks = [self.start(*hosts.on(rank // 2, *self.command("by_hand")),
                                env=environment(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2",
                                                MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29511", OMP_NUM_THREADS="1"))
                     for rank in range(4)]
            # While they run, nothing may listen on a wildcard address.
            listening = listening_addresses(hosts, ranks)
            outputs = self.wait_all(ranks)
        self.assertIn("4 ranks on 2 machines by torchrun's variables, hierarchical", "".join(outputs))
        self.assertTrue(listening)
        self.assertLessEqual(listening, set(ADDRESSES))
        figures = self.read("by_hand")
        self.assertEqual((figures["world_size"], figures["test_samples"]), (4, 99))
        same_machine = self.figures(LOCKSTEP, "run", "-n", 4, "--",
                                    arguments=("--backend", "shm"))
        self.assertEqual(figures["train_loss"], same_machine["train_loss"], "every sum is the same, bit by bit")

    def test_three_ranks_and_one(self):
        def train(name, backend, rank_of_second_host):
            with Hosts() as hosts:
                ranks = [self.start(*hosts.on(int(rank == rank_of_second_host), *self.command(name), "--backend", backend),
                                    env=environment(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29514",
                                                    OMP_NUM_THREADS="1"))
                         for rank in range(4)]
                self.wait_all(ranks)
            return self.read(name)["train_loss"]
        self.assertEqual(train("three_and_one", "hierarchical", 3), train("in_turns", "hierarchical", 1))

    @thorough
    def test_virtual_ranks_give_the_same_bits_as_on_one_machine(self):
        exact = ("--virtual-ranks", 6)

        def bits(figures):
            return figures["parameters_hash"], figures["train_loss"]
        alone = bits(self.figures(LOCKSTEP, "run", "-n", 1, "--", arguments=exact, name="alone"))
        self.assertEqual(bits(self.figures(LOCKSTEP, "run", "-n", 4, "--", arguments=exact, name="one_machine")), alone)
        for engine in ("hierarchical", "gloo"):
            with Hosts() as hosts:
                ranks = [self.start(*hosts.on(rank // 2, *self.command(engine), *exact, "--backend", engine),
                                    env=environment(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2",
                                                    MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29516"))
                         for rank in range(4)]
                outputs = self.wait_all(ranks)
            self.assertIn(f"4 ranks on 2 machines by torchrun's variables, {engine}", "".join(outputs))
            self.assertEqual(bits(self.read(engine)), alone, engine)

    def test_a_rank_that_is_killed_ends_both_hosts(self):
        with Hosts() as hosts:
            ranks = [self.start(*hosts.on(rank // 2, *self.command("killed", epochs=100000)),
                                env=environment(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2",
                                                MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29515", OMP_NUM_THREADS="1"))
                     for rank in range(4)]
            metrics = os.path.join(self.folder, "killed", "metrics_rank0.jsonl")
            began = time.monotonic()
            while not os.path.exists(metrics):  # then they train
                self.assertTrue(all(rank.poll() is None for rank in ranks) and time.monotonic() < began + 100)
                time.sleep(0.1)
            time.sleep(0.5)
            os.killpg(ranks[3].pid, 9)
            killed = time.monotonic()
            outputs = [rank.communicate(timeout=60)[0] for rank in ranks[:3]]
            self.assertLess(time.monotonic() - killed, 12)
        for rank, output in zip(ranks, outputs):
            self.assertNotEqual(rank.returncode, 0, output)
            # Ranks that know of no other name 3 among several; and one that was late before says where it was then.
            self.assertRegex(output, r"rank 3 \(.*\) ended while|ranks? (\d, )*3 (reported nothing: it has ended|last seen waiting in)",
                             output)

    @thorough
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
                                                MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29513", LOCKSTEP_JOIN_TIMEOUT_S="8"))
                     for rank in range(2)]
            for rank in ranks:
                output = rank.communicate(timeout=60)[0]
                self.assertNotEqual(rank.returncode, 0)
                self.assertIn("2 of 4 ranks had joined, missing rank 2, 3", output)


class OneCommandTest(HostsTest):
    """What tests of `lockstep run --hosts` share."""

    def setUp(self):
        super().setUp()
        self.mark = "LOCKSTEP_TEST_MARK=" + self.folder

    def begin(self, *command):
        return self.start(*command, env=environment(LOCKSTEP_TEST_MARK=self.folder, OMP_NUM_THREADS="1"))

    def nothing_left(self, seconds=2):
        deadline = time.monotonic() + seconds
        while marked_processes(self.mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual(marked_processes(self.mark), {})

    def train_for_ever(self, hosts, slots, *options):
        """A training that has made steps."""
        run_ = self.begin(*hosts.lockstep_run(slots, "--log-dir", "run", *options, "--", os.path.join(BIN, "train_until_stopped"), "checkpoints", 10 ** 9))
        steps = 0
        for line in run_.stdout:
            steps += line.startswith("step ")  # after every tenth; it may go on from a checkpoint of another run
            if steps == 5:
                return run_
        self.fail("the training ended")

    def ended(self, process, code, seconds=60):
        output = process.communicate(timeout=seconds)[0]
        self.assertEqual(process.returncode, code, output)
        return output


class OneCommand(OneCommandTest):
    def test_two_machines_have_the_bits_of_one(self):
        with Hosts() as hosts:
            process = self.begin(*hosts.lockstep_run((2, 2), "--log-dir", "run", "--", *self.command("hosts")))
            listening = listening_addresses(hosts, [process])
            output = self.ended(process, 0)
        self.assertIn("4 ranks on 2 machines by lockstep run, hierarchical", output)
        self.assertTrue(listening)
        self.assertLessEqual(listening, set(ADDRESSES), "nothing listens for all networks, or on loopback")
        same_machine = self.figures(LOCKSTEP, "run", "-n", 4, "--", arguments=("--backend", "shm"))
        self.assertEqual(self.read("hosts")["train_loss"], same_machine["train_loss"], "every sum is the same, bit by bit")
        self.nothing_left()


class Names(OneCommandTest):
    """Names before addresses: what a machine's names mean on it and on the others, and which of its networks serves."""

    HELLO = ["--tee", "all", "--", "sh", "-c", f"echo $RANK uses $LOCKSTEP_ADDRESS; exec {BIN}/hello_ranks"]

    def knowing(self, hosts, host, names, *command):
        """A command on a host that has these lines in /etc/hosts and asks no name server."""
        mounts = ""
        for name, text in {"hosts": names, "nsswitch.conf": "hosts: files\n"}.items():
            path = os.path.join(self.folder, f"{name}-{host}")
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            mounts += f"mount --bind {path} /etc/{name} && "
        return hosts.on(host, "unshare", "-m", "sh", "-c", mounts + 'exec "$@"', "sh", *command)

    def met(self, output):
        """The addresses that ranks 0 and 1, on two machines, use; they have added up a number."""
        self.assertIn("1 + ... + 2 = 3", output)
        self.assertIn("2 ranks on 2 machines", output)
        self.nothing_left()
        used = dict(re.findall(r"(?m)^\[\d\] (\d) uses (\S+)$", output))
        return [used["0"], used["1"]]

    def meet(self, hosts, names, rendezvous):
        """hello_ranks, one on each of two hosts, by --nnodes: the addresses used, and where anything listened meanwhile."""
        key = os.path.join(self.folder, "key")
        with open(os.open(key, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(os.urandom(32).hex())
        runs = [self.begin(*self.knowing(hosts, node, names[node], LOCKSTEP, "run", "--nnodes", 2, "--node-rank", node, "--rendezvous", rendezvous,
                                         "--key-file", key, *self.HELLO)) for node in (0, 1)]
        listening = listening_addresses(hosts, runs)
        outputs = [self.ended(one, 0) for one in runs]
        return self.met(outputs[0]), listening

    def test_debians_name_for_the_machine_itself(self):
        everybodys = "127.0.0.1 localhost\n" + "".join(f"{address} node{i}\n" for i, address in enumerate(ADDRESSES[:2]))
        names = [everybodys.replace(f"{address} node{i}", f"127.0.1.1 node{i}") for i, address in enumerate(ADDRESSES[:2])]
        with Hosts() as hosts:
            used, listening = self.meet(hosts, names, "node0:29521")
            self.assertEqual(used, list(ADDRESSES[:2]))
            self.assertLessEqual(listening, {*ADDRESSES, "127.0.1.1"})
            resolvable = f"127.0.1.1 {hosts.names[0]}\n{ADDRESSES[1]} {hosts.names[1]}\n"
            launched = self.begin(*self.knowing(hosts, 0, resolvable, *hosts.lockstep_run((1, 1), *self.HELLO)[4:]))
            self.assertEqual(self.met(self.ended(launched, 0)), list(ADDRESSES[:2]))

    def test_ipv6_alone(self):
        with Hosts() as hosts:
            for host, other in ((0, 1), (1, 0)):
                end = hosts.ends[host, other]
                run("ip", "-n", hosts.names[host], "-4", "address", "flush", "dev", end)
                run("ip", "-n", hosts.names[host], "-6", "address", "add", f"fd00:213::{host + 1}/64", "dev", end, "nodad")
            names = "::1 localhost\nfd00:213::1 node0\nfd00:213::2 node1\n"
            for rendezvous in ("node0:29522", "[fd00:213::1]:29522"):
                used, listening = self.meet(hosts, [names, names], rendezvous)
                self.assertEqual(used, ["fd00:213::1", "fd00:213::2"])
                self.assertLessEqual(listening, {"[fd00:213::1]", "[fd00:213::2]"})

    def test_one_of_several_networks(self):
        with Hosts() as hosts:
            for host, other in ((0, 1), (1, 0)):
                run("ip", "-n", hosts.names[host], "address", "add", f"10.214.{host}.1/32", "dev", "lo")
                run("ip", "-n", hosts.names[host], "address", "add", f"10.215.7.{host + 1}/24", "dev", hosts.ends[host, other])
            # Of the two addresses that the name has, the first leads nowhere from the other host.
            names = f"10.214.0.1 node0\n{ADDRESSES[0]} node0\n"
            used, listening = self.meet(hosts, [names, names], "node0:29523")
            self.assertEqual(used, list(ADDRESSES[:2]), "the route to the coordinator chooses, and for its own machine that of the others to it")
            self.assertLessEqual(listening, {"10.214.0.1", *ADDRESSES[:2]})
            chosen = {"10.215.7.1", "10.215.7.2"}
            launched = self.begin(*hosts.lockstep_run((1, 1), "--interface", "10.215.7.0/24", *self.HELLO))
            self.assertLessEqual(listening_addresses(hosts, [launched]), chosen)
            self.assertEqual(set(self.met(self.ended(launched, 0))), chosen)
            name = hosts.ends[0, 1]  # which the other host's interface does not have
            refused = self.begin(*hosts.lockstep_run((1, 1), "--interface", name, *self.HELLO))
            self.assertIn(f"{hosts.names[1]}: --interface {name}: no interface of this machine that is up has that name, address or network; "
                          "there are lo 127.0.0.1, ", self.ended(refused, 46))


class OneMachineAsTwo(ProgramTest):
    """What can be tried anywhere: two agents of one machine, each with another LOCKSTEP_MACHINE."""

    def test_two_machines_have_the_bits_of_one(self):
        one_thread = ("--env", "OMP_NUM_THREADS=1")  # a machine of its own would use all its cores, and add up in another order
        launcher = (LOCKSTEP, "run", "--hosts", "a:1,b:1", "--launch-command", "env LOCKSTEP_MACHINE={host}", *one_thread, "--")
        as_two = self.figures(*launcher, name="as_two", arguments=("--backend", "gloo"))
        as_one = self.figures(LOCKSTEP, "run", "-n", 2, *one_thread, "--", name="as_one", arguments=("--backend", "shm"))
        self.assertEqual((as_two["world_size"], as_two["train_loss"]), (2, as_one["train_loss"]))
        report = run(LOCKSTEP, "report", os.path.join(self.folder, "run_as_two")).stdout.strip()
        with open(report, encoding="utf-8") as page:
            text = page.read()
        for rank in ("rank 0", "rank 1"):
            self.assertIn(rank, text)

    def test_another_libtorch_is_named(self):
        other = f"[ $RANK = 1 ] && export LD_PRELOAD={BIN}/other_libtorch.so; exec {BIN}/hello_ranks"
        said = r"rank 1 on \S+ has LibTorch 2\.0\.7, and rank 0 on \S+ has LibTorch 2\.1\d\.\d\S*; install the same version on all machines"
        launched = run(LOCKSTEP, "run", "--hosts", "a:1,b:1", "--launch-command", "env LOCKSTEP_MACHINE={host}", "--", "sh", "-c", other,
                       check=False, cwd=self.folder, env=environment())
        self.assertEqual(launched.returncode, 46, launched.stderr)
        self.assertRegex(launched.stderr, said)
        self.assertRegex(launched.stderr, r"rank 1 on b has .*, and rank 0 on a has ")
        self.assertRegex(launched.stderr, r"lockstep: rank 1 of 2 ")
        # Without our launcher rank 0 serves the store, and stays until the others have read what they throw.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        for round_ in range(3):
            ranks = [subprocess.Popen(["sh", "-c", other], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder,
                                      env=environment(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port))
                     for rank in range(3)]
            for rank in ranks:
                error = rank.communicate(timeout=60)[1]
                self.assertEqual(rank.returncode, 1, error)
                self.assertRegex(error, said, round_)


if __name__ == "__main__":
    main()
