"""lockstep.attach() and its optimizer as Python programs see them: gradients, edits, errors, lifetimes, launchers."""

import functools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import torch

import attach_programs
import backend_test
import diloco_programs
import end_programs
import hosts_test
import misuse_programs
import optimizer_programs
import wrong_programs

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.path.abspath(os.environ.get("LOCKSTEP_BUILD_DIR", os.path.join(HERE, "../../build")))


class Attach(backend_test.Ranks):
    def test_two_ranks(self):
        self.spawn(2, attach_programs.everything)

    def test_three_ranks(self):
        self.spawn(3, attach_programs.everything)

    def test_over_a_group_of_gloo(self):
        self.spawn(2, attach_programs.gradients, "gloo")

    def test_alone(self):
        model = attach_programs.network()
        replica = lockstep_attach(model)
        self.assertEqual((replica.rank, replica.world_size), (0, 1))
        attach_programs.backward(model, 0, 0)
        expected = attach_programs.network()
        attach_programs.backward(expected, 0, 0)
        for one, other in zip(model.parameters(), expected.parameters()):
            self.assertTrue(torch.equal(one.grad, other.grad))


class InShort(backend_test.Ranks):
    """For make test; the others try all of it on two ranks and on three."""

    def test_three_ranks(self):
        self.spawn(3, in_short)

    def test_a_backend_without_options_has_the_usual_timeout(self):
        import lockstep._groups as groups

        class Raises:  # as torch's own backends without options do since 2.14
            @property
            def options(self):
                raise RuntimeError("Backend does not implement getBackendOptions")

        for backend in (None, object(), Raises()):
            self.assertEqual(groups._timeout_of(backend), groups._TIMEOUT)


def in_short(rank, size):
    for function in (attach_programs.golden, attach_programs.gradients, attach_programs.checks, attach_programs.edits,
                     attach_programs.held_gradients, attach_programs.lock_of_python, optimizer_programs.clipped, optimizer_programs.groups):
        function(rank, size)


class Optimizer(backend_test.Ranks):
    def test_two_ranks(self):
        self.spawn(2, optimizer_programs.everything)

    def test_three_ranks(self):
        self.spawn(3, optimizer_programs.everything)


class SeveralMachines(backend_test.Ranks):
    """As in backend_test: ranks that take themselves for ranks of the machines that these letters name."""

    def on(self, machines, function, backend="lockstep"):
        return self.spawn(len(machines), function, backend, target=backend_test.join_from_machines, more=(machines,))

    def test_in_short(self):
        self.on("aab", attach_programs.gradients)

    def test_two_and_one(self):
        self.on("aab", attach_programs.on_several_machines)
        self.on("aab", optimizer_programs.on_several_machines)

    def test_one_rank_on_each(self):
        for machines in ("ab", "abc"):
            self.on(machines, attach_programs.on_several_machines)
            self.on(machines, optimizer_programs.on_several_machines)

    def test_over_a_group_of_gloo(self):
        self.on("aab", attach_programs.gradients, "gloo")

    def test_bits_are_those_of_one_machine(self):
        for machines in ("ab", "aab", "abb"):
            together = self.on("a" * len(machines), optimizer_programs.trained)
            self.assertEqual(self.on(machines, optimizer_programs.trained), together)
            self.assertEqual(together, together[:1] * len(machines))


class Launchers(unittest.TestCase):
    def run_attached(self, *command, code=0):
        done = subprocess.run([*command], capture_output=True, text=True, timeout=backend_test.DEADLINE_S, cwd=self.folder.name)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.program = os.path.join(HERE, "attached.py")

    def tearDown(self):
        self.folder.cleanup()

    def launch(self, fault, code):
        return self.run_attached(os.path.join(BUILD, "bin/lockstep"), "run", "-n", "3", "--run-dir", "run", "--tee", "all", "--", sys.executable,
                                 self.program, fault, code=code)

    def losses(self, done):
        return sorted(line[line.index("loss"):] for line in done.stdout.splitlines() if "loss" in line)

    def test_lockstep_run_and_torchrun_give_the_same(self):
        ours = self.losses(self.launch("none", 0))
        theirs = self.losses(self.run_attached(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3",
                                               self.program, "none"))
        self.assertEqual(len(ours), 3)
        self.assertEqual(ours, theirs)

    def test_torchrun_on_each_of_two_hosts(self):
        reason = hosts_test.why_not()
        if reason:
            self.skipTest(reason)
        with hosts_test.Hosts() as hosts:
            agents = [subprocess.Popen(hosts.on(node, sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", node,
                                                "--nproc-per-node", 2 - node, "--master-addr", hosts_test.ADDRESSES[0], "--master-port", 29518,
                                                self.program, "none"),
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder.name) for node in (0, 1)]
            self.addCleanup(lambda: [agent.kill() for agent in agents if agent.poll() is None])
            outputs = [agent.communicate(timeout=backend_test.DEADLINE_S) for agent in agents]
        for agent, (_, err) in zip(agents, outputs):
            self.assertEqual(agent.returncode, 0, err)
        lines = [line[line.index("loss"):] for out, _ in outputs for line in out.splitlines() if "loss" in line]
        self.assertEqual(sorted(lines), self.losses(self.launch("none", 0)))

    def test_threads_that_make_the_default_group(self):
        program = """if True:
            import threading, torch, lockstep
            failures, together = [], threading.Barrier(8)
            lockstep.attach
            def attach():
                together.wait()
                try:
                    lockstep.attach(torch.nn.Linear(2, 2))
                except Exception as error:
                    failures.append(error)
            threads = [threading.Thread(target=attach) for _ in range(8)]
            [thread.start() for thread in threads], [thread.join() for thread in threads]
            assert not failures, failures
        """
        self.run_attached(os.path.join(BUILD, "bin/lockstep"), "run", "-n", "1", "--run-dir", "run", "--", sys.executable, "-c", program)

    def test_a_killed_rank(self):
        done = self.launch("killed", 41)
        with open(os.path.join(self.folder.name, "run/report.json")) as file:
            report = json.load(file)
        self.assertEqual(report["culprit"]["rank"], 1, done.stderr)

    def test_an_exception_in_a_step(self):
        done = self.launch("exception", 40)
        self.assertIn("ValueError: a bad batch", done.stderr)

    def test_a_rank_that_leaves(self):
        self.assertRegex(self.launch("leaves", 44).stderr, "rank 1 of 3 ended with exit code 0 while rank [02]")


class WrongPrograms(backend_test.Ranks):
    def test_on_shared_memory(self):
        for size in (2, 3):
            self.spawn(size, wrong_programs.everything)

    def test_over_gloo(self):
        for size in (2, 3):
            self.spawn(size, wrong_programs.everything, "gloo")


class Misuse(backend_test.Ranks):
    def test_two_ranks(self):
        self.spawn(2, misuse_programs.everything)

    def test_three_ranks(self):
        self.spawn(3, misuse_programs.everything)

    def test_over_a_group_of_gloo(self):
        for size in (2, 3):
            self.spawn(size, misuse_programs.everything, "gloo")

    def test_on_several_machines(self):
        self.spawn(3, misuse_programs.changed_means, target=backend_test.join_from_machines, more=("aab",))
        self.spawn(2, misuse_programs.edits, target=backend_test.join_from_machines, more=("ab",))


class Ends(unittest.TestCase):
    """Whoever waits for a rank that does not come is told so, within five seconds."""

    def told(self, size, function, backend="lockstep", machines=None, within_s=5.0):
        """What each rank was told."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "meet")
            target = functools.partial(meet_an_end, backend=backend, machines=machines, function=function)
            self.assertEqual(backend_test.end_of_ranks(target, size, path), [0] * size)
            results = [torch.load(f"{path}.{rank}") for rank in range(size)]
        for rank, (seconds, text) in enumerate(results):
            if text is not None:
                self.assertLess(seconds, within_s + WAITS_S.get(function, 0), f"rank {rank}: {text}")
        return [text for _, text in results]

    def everywhere(self, function, backends=("lockstep", "gloo")):
        for backend in backends:
            for size in (2, 3):
                yield backend, self.told(size, function, backend)
        if "lockstep" in backends:
            yield "lockstep", self.told(3, function, machines="aab")

    def test_a_rank_that_left_before_attaching(self):
        for function in (end_programs.leaves_before_attaching, end_programs.leaves_before_attaching_with_a_timeout):
            for backend, said in self.everywhere(function):
                for rank, text in enumerate(said):
                    if rank != 1:
                        self.assertRegex(text, "[Rr]ank 1" if backend == "lockstep" or rank == 0 else "rank 0")

    def test_a_rank_that_calls_another_collective(self):
        for function in (end_programs.attaches_while_another_does_something_else, end_programs.steps_while_another_does_something_else):
            for _, said in self.everywhere(function, ["lockstep"]):
                for text in said:
                    self.assertRegex(text, "(?s)barrier.*all_|all_.*barrier")

    def test_the_timeout(self):
        for function in (end_programs.waits_as_long_as_the_group, end_programs.waits_as_long_as_it_is_told):
            for _, said in self.everywhere(function):
                self.assertRegex(said[0], "after 2.0 s|2000|timed? ?out")

    def test_a_group_that_was_destroyed(self):
        for text in self.told(2, end_programs.trains_after_the_group_was_destroyed):
            self.assertIn("left the group", text)

    def test_a_failure_that_was_thrown_is_not_warned_of_again(self):
        """When a rank ends, it warns of operations that failed unnoticed: here the program has caught the failure."""
        program = """if True:
            import os, signal, sys, threading, time, torch, torch.distributed as dist, lockstep
            how, first = sys.argv[1], os.environ["RANK"] == "0"
            model = torch.nn.Linear(2, 2)
            replica = lockstep.attach(model)
            if how == "interrupted":
                signal.signal(signal.SIGINT, signal.default_int_handler)
                threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start() if first else time.sleep(1.5)
            try:
                if how == "dropped":
                    dist.all_reduce(torch.ones(3 + int(first)), async_op=True)
                    time.sleep(0.5)
                else:
                    dist.barrier() if first and how == "differs" else model(torch.ones(1, 2)).sum().backward()
            except (RuntimeError, KeyboardInterrupt) as error:
                print("caught", type(error).__name__)
        """
        for how, warns in (("differs", False), ("interrupted", False), ("dropped", True)):
            for machines in ("aa", "ab"):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    port = str(probe.getsockname()[1])
                ranks = [subprocess.Popen([sys.executable, "-c", program, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                          env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                                               "LOCKSTEP_MACHINE": machines[rank]}) for rank in range(2)]
                ends = [rank.communicate(timeout=backend_test.DEADLINE_S) for rank in ranks]
                for rank, (out, err) in enumerate(ends):
                    self.assertEqual("caught" in out, not warns, f"{how} {machines} {rank}: {out}{err}")
                said = any("never waited" in err for _, err in ends)
                self.assertEqual(said, warns, f"{how} {machines}: {ends}")

    def test_ctrl_c(self):
        for function in (end_programs.waits_in_attach, end_programs.waits_in_backward, end_programs.waits_in_a_barrier):
            for size, machines in ((2, None), (3, None), (3, "aba")):
                first, *others = self.told(size, function, machines=machines)
                self.assertRegex(first, r"^interrupted after 0\.\d+ s")
                for text in others:
                    self.assertTrue(text is None or re.search(r"\branks? 0\b", text), text)


class DiLoCo(backend_test.Ranks):
    def on(self, machines, function, backend="lockstep"):
        return self.spawn(len(machines), function, backend, target=backend_test.join_from_machines, more=(machines,))

    def test_it_equals_its_definition(self):
        for machines in ("aa", "aabb", "aba"):
            self.on(machines, diloco_programs.equals_the_definition)

    def test_it_has_the_bits_of_cpp(self):
        self.on("ab", diloco_programs.has_the_bits_of_cpp)

    def test_over_a_group_of_gloo(self):
        self.on("aab", diloco_programs.equals_the_definition, "gloo")

    def test_it_goes_on_from_its_state(self):
        self.on("aabb", diloco_programs.goes_on_from_its_state)

    def test_misuse(self):
        self.on("aabb", diloco_programs.misuse)

    def test_ranks_that_differ_are_told_both_sides(self):
        for machines in ("ab", "aab"):
            self.on(machines, diloco_programs.another_machine_is_told)
            self.on(machines, diloco_programs.another_model_is_told)

    def test_a_killed_rank_is_named(self):
        for machines in ("abb", "aab"):
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "meet")
                codes = backend_test.end_of_ranks(functools.partial(be_killed_in_a_round, machines=machines), 3, path)
                self.assertEqual(codes, [0, -9, 0])
                for rank in (0, 2):
                    with open(f"{path}.{rank}") as file:
                        self.assertLess(float(file.read()), 5)


def be_killed_in_a_round(rank, size, path, machines):
    import torch.distributed as dist

    os.environ.update(LOCKSTEP_MACHINE=machines[rank], MASTER_ADDR="127.0.0.1")
    dist.init_process_group("lockstep", init_method="file://" + path, rank=rank, world_size=size)
    seconds = diloco_programs.is_killed(rank, size)
    with open(f"{path}.{rank}", "w") as file:
        file.write(str(seconds))
    os._exit(0)  # nobody waits for a rank that is gone


# What a program waits for by itself.
WAITS_S = {end_programs.waits_as_long_as_the_group: 2, end_programs.waits_as_long_as_it_is_told: 2, end_programs.waits_in_attach: 5,
           end_programs.waits_in_backward: 5, end_programs.waits_in_a_barrier: 5}


def meet_an_end(rank, size, path, backend, machines, function):
    import torch.distributed as dist

    if machines is not None:
        os.environ.update(LOCKSTEP_MACHINE=machines[rank], MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method="file://" + path, rank=rank, world_size=size)
    start = time.monotonic()
    text = function(rank, size, backend)
    torch.save((time.monotonic() - start, text), f"{path}.{rank}")
    os._exit(0)  # nobody waits for a rank that is gone


class Failures(backend_test.Ranks):
    def test_a_killed_rank_of_another_machine_is_an_error(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "meet")
            codes = backend_test.end_of_ranks(be_killed_on_machines, 3, path)
            self.assertEqual(codes, [0, -9, 0])

    def test_a_killed_rank_is_named_within_a_second(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "meet")
            codes = backend_test.end_of_ranks(be_killed, 3, path)
            self.assertEqual(codes, [0, -9, 0])
            for rank in (0, 2):
                with open(f"{path}.{rank}") as file:
                    self.assertLess(float(file.read()), 1)


def be_killed(rank, size, path):
    import torch.distributed as dist

    dist.init_process_group("lockstep", init_method="file://" + path, rank=rank, world_size=size)
    seconds, _ = attach_programs.be_killed(rank, size)
    with open(f"{path}.{rank}", "w") as file:
        file.write(str(seconds))
    os._exit(0)  # nobody waits for a rank that is gone


def be_killed_on_machines(rank, size, path):
    os.environ.update(LOCKSTEP_MACHINE="abb"[rank], MASTER_ADDR="127.0.0.1")
    be_killed(rank, size, path)


def lockstep_attach(model):
    import lockstep

    return lockstep.attach(model)


if __name__ == "__main__":
    unittest.main(argv=["attach_test", "-v", *sys.argv[1:]])
