"""The Python package as its users see it: collectives, DistributedDataParallel, FSDP2, launchers, failures."""

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
import hosts_test  # noqa: E402
import programs  # noqa: E402
import training_programs  # noqa: E402

DEADLINE_S = 100


def join_group(rank, size, path, backend, function):
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method="file://" + path, rank=rank, world_size=size)
    result = function(rank, size)
    if result is not None:
        torch.save(result, f"{path}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


class Ranks(unittest.TestCase):
    """Starts ranks with mp.spawn, all in one group of the backend, and ends them if they take too long."""

    def spawn(self, size, function, backend="lockstep", target=join_group, more=()):
        """Runs function(rank, size) on every rank; returns what each rank returned."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "meet")
            ranks = mp.spawn(target, (size, path, backend, *more, function), nprocs=size, join=False)
            end = time.monotonic() + DEADLINE_S
            while not ranks.join(timeout=1):
                if time.monotonic() > end:
                    for process in ranks.processes:
                        process.kill()
                    self.fail(f"{function} on {size} ranks is not done after {DEADLINE_S} s")
            return [torch.load(f"{path}.{rank}") if os.path.exists(f"{path}.{rank}") else None for rank in range(size)]


class Collectives(Ranks):
    def test_every_collective(self):
        for size in (1, 2, 3):
            self.spawn(size, programs.every_collective)

    def test_every_dtype_and_reduction(self):
        self.spawn(3, programs.every_dtype_and_reduction)

    def test_messages(self):
        self.spawn(3, programs.messages)

    def test_asynchronous_works_and_futures(self):
        for size in (2, 3):
            self.spawn(size, programs.futures)

    def test_futures_at_the_end(self):
        for destroys in (False, True):
            self.spawn(2, functools.partial(programs.futures_at_the_end, destroys=destroys))

    def test_coalesced(self):
        for size in (2, 3):
            self.spawn(size, programs.coalesced)

    def test_subgroups(self):
        self.spawn(3, programs.subgroups)

    def test_split_and_merge(self):
        self.spawn(3, programs.split)

    def test_shutdown_and_abort(self):
        for size in (2, 3):
            self.spawn(size, programs.shutdown)
            self.spawn(size, programs.abort)

    def test_a_fork_is_harmless(self):
        self.spawn(2, training_programs.fork)

    def test_several_threads(self):
        self.spawn(2, programs.threads)


class Training(Ranks):
    def test_ddp_equals_gloo(self):
        for size in (2, 3):
            ours, gloo = (self.spawn(size, training_programs.train_ddp, backend) for backend in ("lockstep", "gloo"))
            for rank in range(size):
                for name, weight in gloo[rank].items():
                    torch.testing.assert_close(ours[rank][name], weight)
                    self.assertTrue(torch.equal(ours[rank][name], ours[0][name]), "ranks differ in bits")
                    if size == 2:  # there is one order of two
                        self.assertTrue(torch.equal(ours[rank][name], weight), "bits differ from Gloo's")

    def test_ddp_buckets_are_reduced_in_shared_memory(self):
        for size in (2, 3):
            self.spawn(size, training_programs.buckets_in_shared_memory)

    def test_ddp_communication_hooks(self):
        self.spawn(2, training_programs.communication_hooks)

    def test_fsdp2_equals_gloo(self):
        ours, gloo = (self.spawn(2, training_programs.train_fsdp2, backend) for backend in ("lockstep", "gloo"))
        for name, weight in gloo[0].items():
            torch.testing.assert_close(ours[0][name], weight)


def join_from_machines(rank, size, path, backend, machines, function):
    os.environ.update(LOCKSTEP_MACHINE=machines[rank], MASTER_ADDR="127.0.0.1")
    join_group(rank, size, path, backend, function)


class SeveralMachines(Ranks):
    """Ranks that take themselves for ranks of different machines: the letters of `machines`, one a rank."""

    def on(self, machines, function):
        return self.spawn(len(machines), function, target=join_from_machines, more=(machines,))

    def test_every_collective(self):
        for machines in ("ab", "aab", "aaab"):
            self.on(machines, programs.every_collective)

    def test_futures_and_subgroups(self):
        self.on("aab", programs.futures)
        self.on("aba", programs.subgroups)

    def test_ddp_communication_hooks(self):
        self.on("aab", training_programs.communication_hooks)

    def test_ddp_has_the_bits_of_one_machine(self):
        for machines in ("aab", "aabb", "aaab"):
            spread, together = (self.on(where, training_programs.train_ddp) for where in (machines, "a" * len(machines)))
            for of_spread, of_together in zip(spread, together):
                for name, weight in of_together.items():
                    self.assertTrue(torch.equal(of_spread[name], weight), f"{machines}: {name}")

    def test_torchrun_on_each_of_two_hosts(self):
        reason = hosts_test.why_not()
        if reason:
            self.skipTest(reason)
        with hosts_test.Hosts() as hosts:
            agents = [subprocess.Popen(hosts.on(node, sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", node,
                                                "--nproc-per-node", 2, "--master-addr", hosts_test.ADDRESSES[0], "--master-port", 29517,
                                                programs.__file__),
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for node in (0, 1)]
            self.addCleanup(lambda: [agent.kill() for agent in agents if agent.poll() is None])
            outputs = [agent.communicate(timeout=DEADLINE_S) for agent in agents]
        for agent, (_, err) in zip(agents, outputs):
            self.assertEqual(agent.returncode, 0, err)
        self.assertEqual(sorted("".join(out for out, _ in outputs).split()), [f"{rank}:10.0" for rank in range(4)])


class Launching(unittest.TestCase):
    def run_python(self, *arguments, **environment):
        done = subprocess.run([sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True,
                              text=True, timeout=DEADLINE_S)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_torchrun(self):
        out = self.run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                              programs.__file__)
        self.assertEqual(sorted(out.split()), ["0:3.0", "1:3.0"])

    def test_torchrun_starts_again(self):
        # Its agent keeps the store: keys of ranks that had ended were taken for those of the next start.
        for ranks in (2, 3):
            out = self.run_python("-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "--nproc-per-node",
                                  str(ranks), os.path.join(os.path.dirname(programs.__file__), "restarted.py"))
            total = ranks * (ranks + 1) / 2
            self.assertEqual(sorted(line for line in out.split() if ":3:" in line),
                             [f"{rank}:3:{total}:{total}" for rank in range(ranks)])

    def test_a_group_after_the_last_one_is_destroyed(self):
        # In torchrun's store its keys are the same as those of the first.
        out = self.run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3",
                              os.path.join(os.path.dirname(programs.__file__), "restarted.py"), "twice")
        self.assertEqual(sorted(out.split()), [f"{rank}:0:6.0:6.0" for rank in (0, 0, 1, 1, 2, 2)])

    def test_importing_torch_loads_nothing_and_sets_one_variable(self):
        program = ("import os, sys, torch; print('lockstep._C' in sys.modules, os.environ['DDP_DISABLE_COMM_MEM'], "
                   "torch.distributed.Backend.LOCKSTEP)")
        environment = {k: v for k, v in os.environ.items() if k != "DDP_DISABLE_COMM_MEM"}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True,
                              timeout=DEADLINE_S)
        self.assertEqual(done.stdout.split(), ["False", "0", "lockstep"], done.stderr)
        self.assertIn(" 1 ", self.run_python("-c", program, DDP_DISABLE_COMM_MEM="1"))

    def test_another_release_of_torch_is_refused(self):
        program = ("import torch, torch.distributed as dist; torch.__version__ = torch.__version__.__class__('2.10.1'); "
                   "store = dist.HashStore(); dist.init_process_group('lockstep', store=store, rank=0, world_size=1)")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
        self.assertNotEqual(done.returncode, 0)
        built_with = ".".join(torch.__version__.split(".")[:2])
        self.assertRegex(done.stderr.strip().splitlines()[-1],
                         f"this lockstep was built for torch {built_with}, but torch 2.10.1 is installed: pip install .torch=={built_with}")


class UnderLockstepRun(unittest.TestCase):
    """What the launcher learns about Python programs: collectives from the lockstep backend, else only exits and their order."""

    def test_programs_see_torchruns_launcher_and_a_share_of_the_cores(self):
        program = ("import os, torch; print(torch.distributed.is_torchelastic_launched(), "
                   "torch.get_num_threads() == int(os.environ['OMP_NUM_THREADS']))")
        done = self.launch("-c", program, options=("--tee", "all"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("True True", done.stdout)
        self.assertNotIn("False", done.stdout)

    def launch(self, *command, ranks=2, options=()):
        build = os.environ.get("LOCKSTEP_BUILD_DIR", os.path.join(os.path.dirname(programs.__file__), "../../build"))
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([os.path.join(build, "bin/lockstep"), "run", "-n", str(ranks), "--run-dir", "run", *options, "--",
                                   sys.executable, *command],
                                  capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder)
            report = os.path.join(folder, "run/report.json")
            if os.path.exists(report):
                with open(report) as file:
                    done.report = json.load(file)
            return done

    def train(self, backend, fault, code, ranks=2, options=()):
        """The report of a training run in which rank 1 fails."""
        done = self.launch(os.path.join(os.path.dirname(programs.__file__), "launched.py"), backend, fault, ranks=ranks, options=options)
        self.assertEqual(done.returncode, code, done.stderr)
        block = done.stderr[done.stderr.rindex("lockstep: rank"):] if code else done.stderr
        if code not in (0, 44):  # if two ranks do not call the same, neither is to blame
            self.assertRegex(block, f"^lockstep: rank 1 of {ranks} ")
            self.assertEqual(done.report["culprit"]["rank"], 1)
        self.report = getattr(done, "report", None)
        return block

    def test_another_libtorch_is_named(self):
        build = os.environ.get("LOCKSTEP_BUILD_DIR", os.path.join(os.path.dirname(programs.__file__), "../../build"))
        program = ("import os, sys\n"
                   "if os.environ['RANK'] == '1' and 'LD_PRELOAD' not in os.environ:\n"
                   f"    os.environ['LD_PRELOAD'] = '{os.path.abspath(build)}/bin/other_libtorch.so'\n"
                   "    os.execv(sys.executable, sys.orig_argv)\n"
                   "import torch.distributed as dist\n"
                   "dist.init_process_group('lockstep')\n")
        said = (r"rank 1 on \S+ has LibTorch 2\.0\.7, and rank 0 on \S+ has LibTorch "
                + re.escape(torch.__version__.split("+")[0]) + "; install the same version on all machines")
        done = self.launch("-c", program, ranks=3)
        self.assertEqual(done.returncode, 46, done.stderr)
        self.assertRegex(done.stderr, said)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        # Rank 0 serves the store, and stays until the others know.
        ranks = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True,
                                  env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
                 for rank in range(3)]
        for rank in ranks:
            err = rank.communicate(timeout=DEADLINE_S)[1]
            self.assertEqual(rank.returncode, 1, err)
            self.assertRegex(err, said)

    def test_a_right_program_raises_no_alarm(self):
        block = self.train("lockstep", "none", 0, ranks=3, options=["--hang-timeout", "2"])
        self.assertNotRegex(block, "no progress|stopping")

    def test_a_killed_rank(self):
        self.train("lockstep", "killed", 41, ranks=3)
        self.assertEqual(self.report["culprit"]["last_collective"]["name"], "all_reduce")
        self.assertEqual(self.report["culprit"]["last_collective"]["shape"], [4810])

    def test_an_exception(self):
        self.assertRegex(self.train("lockstep", "exception", 40), "ValueError: a bad batch")

    def test_a_rank_that_does_not_come(self):
        block = self.train("lockstep", "hangs", 43, ranks=3, options=["--hang-timeout", "3"])
        self.assertRegex(block, r"rank 1 of 3 hangs: rank 1 has not reached all_reduce #\d+ \(float32 \[4810\]\)")
        self.assertRegex(block, r"rank 0 waits in all_reduce #\d+ \(float32 \[4810\]\) for rank 1")
        self.assertRegex(block, r"rank 1 is not in a collective; its last one: all_reduce #\d+ \(float32 \[4810\]\)")

    def test_groups_in_different_orders(self):
        program = ("import torch, torch.distributed as dist\n"
                   "dist.init_process_group('lockstep')\n"
                   "groups = [dist.group.WORLD, dist.new_group()]\n"
                   "for group in groups:\n"
                   "    dist.all_reduce(torch.ones(4), group=group)\n"
                   "for group in groups if dist.get_rank() == 0 else reversed(groups):\n"
                   "    dist.all_reduce(torch.ones(4), group=group)\n")
        start = time.monotonic()
        done = self.launch("-c", program, ranks=2)
        self.assertEqual(done.returncode, 43, done.stderr)
        self.assertLess(time.monotonic() - start, 45)
        self.assertIn("rank 0 waits for rank 1 in the group of all ranks, rank 1 for rank 0 in process group 1 (ranks 0, 1)", done.stderr)
        self.assertIn("use the groups in the same order on every rank", done.stderr)

    def test_a_collective_that_nobody_waited_for(self):
        program = ("import torch, torch.distributed as dist\n"
                   "dist.init_process_group('lockstep')\n"
                   "work = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)\n"
                   "{}\n"
                   "dist.destroy_process_group()\n")
        done = self.launch("-c", program.format(""), options=["--tee", "all"])
        for rank, elements in ((0, 3), (1, 4)):
            self.assertRegex(done.stderr, f"rank {rank} of 2 leaves a group in which it never waited .*float32, {elements} elements")
        waits = "try: work.wait()\nexcept dist.DistBackendError as error: print(str(error).splitlines()[0])"
        done = self.launch("-c", program.format(waits), options=["--tee", "all"])
        self.assertIn("[0, 1] ranks disagree", done.stdout)
        self.assertNotIn("leaves a group", done.stderr)

    def test_the_rank_that_serves_the_store_may_be_done_at_once(self):
        program = ("import sys, torch.distributed as dist\n"
                   "rank, port = map(int, sys.argv[1:])\n"
                   "store = dist.TCPStore('127.0.0.1', port, 2, is_master=rank == 0, wait_for_workers=False)\n"
                   "print(store.port, flush=True)\n"
                   "dist.init_process_group('lockstep', store=store, rank=rank, world_size=2)\n"
                   "dist.destroy_process_group()\n")
        for _ in range(3):
            first = subprocess.Popen([sys.executable, "-c", program, "0", "0"], stdout=subprocess.PIPE, text=True)
            self.addCleanup(first.kill)
            port = first.stdout.readline().strip()
            second = subprocess.run([sys.executable, "-c", program, "1", port], capture_output=True, text=True, timeout=DEADLINE_S)
            self.assertEqual((first.wait(DEADLINE_S), second.returncode), (0, 0), second.stderr)
            first.stdout.close()

    def test_a_root_beyond_32_bits_is_no_rank(self):
        program = ("import torch, torch.distributed as dist\n"
                   "dist.init_process_group('lockstep')\n"
                   "x, rows = torch.ones(3), [torch.ones(3), torch.ones(3)]\n"
                   "for root in 2**32, 2**32 + 1, -2**32:\n"
                   "    own = dist.get_rank() == root % 2**32\n"
                   "    for call in (lambda: dist.broadcast(x, group_src=root), lambda: dist.reduce(x, group_dst=root),\n"
                   "                 lambda: dist.gather(x, rows if own else None, group_dst=root),\n"
                   "                 lambda: dist.scatter(x, rows if own else None, group_src=root)):\n"
                   "        try: call()\n"
                   "        except ValueError as error: print(error)\n"
                   "dist.barrier()\n"
                   "dist.destroy_process_group()\n")
        done = self.launch("-c", program, options=["--tee", "all"])
        self.assertEqual(done.returncode, 0, done.stderr)
        for call in ("broadcast", "reduce"):
            self.assertIn(f"{call}: a group of 2 ranks has no such root: 4294967297", done.stdout)

    def test_a_rank_that_is_done_before_the_others(self):
        self.assertRegex(self.train("lockstep", "leaves", 44), "^lockstep: rank 1 of 2 ended with exit code 0 while rank 0 needed it")

    def test_collectives_that_do_not_match(self):
        block = self.train("lockstep", "calls_another", 44, ranks=3)
        self.assertRegex(block, "^lockstep: rank (1 of 3 and rank [02]|[02] of 3 and rank 1) make different calls")
        self.assertRegex(block, "all_reduce.*broadcast|broadcast.*all_reduce")

    def test_a_collective_left_out(self):
        block = self.train("lockstep", "skips", 44)
        self.assertRegex(block, "^lockstep: rank . of 2 and rank . make different calls")
        self.assertRegex(block, r"4810 elements.*\b3 elements|\b3 elements.*4810 elements")

    def test_a_killed_rank_on_gloo(self):
        self.train("gloo", "killed", 41, ranks=3)

    def test_an_exception_on_gloo(self):
        # The others fail at once because it has ended.
        self.assertRegex(self.train("gloo", "exception", 40, ranks=3), "ValueError: a bad batch")

    def test_the_error_that_record_writes(self):
        done = self.launch("-c", "import os, time\n"
                           "from torch.distributed.elastic.multiprocessing.errors import record\n"
                           "@record\n"
                           "def main():\n"
                           "    if os.environ['RANK'] == '1': raise ValueError('a bad batch')\n"
                           "    time.sleep(600)\n"
                           "main()\n")
        self.assertEqual(done.returncode, 40, done.stderr)
        self.assertRegex(done.stderr, "rank 1 of 2 failed first: exit code 1\n  what      .*ValueError.*a bad batch")


def end_of_ranks(target, world_size, path):
    """Exit codes of the ranks. Not with mp.spawn, which ends the others when one has died."""
    context = mp.get_context("spawn")
    ranks = [context.Process(target=target, args=(rank, world_size, path)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE_S)
    return [process.exitcode for process in ranks]


class Failures(Ranks):
    def test_ranks_that_disagree_are_told_both_sides(self):
        self.spawn(2, programs.disagree)

    def test_a_message_of_another_dtype_is_refused_on_both_sides(self):
        self.spawn(2, programs.disagree_on_a_message)

    def test_ranks_of_several_hosts_are_refused_by_name(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "meet")
            end_of_ranks(programs.join_from_several_hosts, 4, path)
            for rank in range(4):
                with open(f"{path}.{rank}") as file:
                    self.assertIn("run on 2: ranks 0, 2 on host host-0; ranks 1, 3 on host host-1", file.read())

    def test_a_killed_rank_is_named_within_a_second(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "meet")
            codes = end_of_ranks(programs.be_killed, 3, path)
            self.assertEqual(codes, [0, -signal.SIGKILL, 0])
            for rank in (0, 2):
                with open(f"{path}.{rank}") as file:
                    seconds, text = file.read().split(" ", 1)
                self.assertLess(float(seconds), 1)
                self.assertIn("rank 1 ", text)

    def test_monitored_barrier_names_all_that_are_missing(self):
        self.spawn(3, programs.miss_a_barrier)


if __name__ == "__main__":
    unittest.main(argv=["backend_test", "-v", *sys.argv[1:]])
