"""Process groups that form again in place, which torch has since 2.14: after a rank was killed, and with one that joins."""

import os
import signal
import sys
import tempfile
import time
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 3
AT_MOST_S = 1
LONG = timedelta(seconds=30)


class Rank:
    """A process's default group and what it knows of the others."""

    def __init__(self, path, rank, size, reconfigures=True):
        torch.set_num_threads(1)
        self.number = rank
        self.store = dist.FileStore(path, -1)
        more = {"enable_reconfigure": True} if reconfigures else {}
        dist.init_process_group("lockstep", store=dist.PrefixStore("group", self.store), rank=rank, world_size=size, timeout=LONG, **more)

    def handles(self, meeting, processes):
        """Those of these processes, which all call it."""
        self.store.set(f"{meeting}/{self.number}", dist._get_reconfigure_handle())
        return {process: self.store.get(f"{meeting}/{process}").decode() for process in processes}

    def meet(self, meeting, processes):
        self.store.set(f"{meeting}/came/{self.number}", "1")
        for process in processes:
            self.store.get(f"{meeting}/came/{process}")


def check_all_reduce(members):
    x = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    assert dist.get_world_size() == members, dist.get_world_size()
    assert torch.equal(x, torch.full((1000,), members * (members + 1) / 2)), x[0]


def error_of(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("it passed")


def survive(number, path, victim, steps):
    """Processes 0 to 2 are a group, in which `victim` is killed; process 3 joins those that are left."""
    newcomer = RANKS
    rank = Rank(path, number, RANKS if number != newcomer else 1)
    handles = rank.handles("first", range(RANKS + 1))
    assert "reconfigure() first" in error_of(lambda: dist.all_reduce(torch.ones(1)))
    left = [handles[process] for process in range(RANKS) if process != victim]
    if number != newcomer:
        dist._reconfigure(1, [handles[process] for process in range(RANKS)], timeout=LONG).wait()
        assert dist.get_rank() == number

        def train():
            step = 0
            while True:
                if number == victim and step == steps:
                    os.kill(os.getpid(), signal.SIGKILL)
                check_all_reduce(RANKS)
                step += 1

        assert f"rank {victim}" in error_of(train)
        start = time.monotonic()
        dist._reconfigure(2, left, timeout=LONG).wait()
        assert dist.get_rank() == number - (number > victim)
        check_all_reduce(RANKS - 1)
        taken = time.monotonic() - start
        assert taken < AT_MOST_S, taken
        assert "already used" in error_of(lambda: dist._reconfigure(2, left))
    dist._reconfigure(3, [*left, handles[newcomer]], timeout=LONG).wait()
    check_all_reduce(RANKS)


def form_again(number, path):
    """A group that was formed as usual."""
    rank = Rank(path, number, RANKS, reconfigures=False)
    check_all_reduce(RANKS)
    work = dist.all_reduce(torch.ones(5), async_op=True) if number else None  # rank 0 never calls it
    handles = rank.handles("again", range(RANKS))
    rank.meet("called", range(RANKS))
    dist._reconfigure(1, set(handles.values()), timeout=LONG).wait()
    assert dist.get_rank() == number  # a set: sorted by the earlier ranks
    if work is not None:
        error_of(work.wait)
    check_all_reduce(RANKS)
    dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).abort()
    assert "abort()" in error_of(lambda: dist.all_reduce(torch.ones(1)))
    dist._reconfigure(2, [handles[process] for process in reversed(range(RANKS))], timeout=LONG).wait()
    assert dist.get_rank() == RANKS - 1 - number
    check_all_reduce(RANKS)


def fail_together(number, path):
    """What keeps ranks from forming a group is told on all that called."""
    rank = Rank(path, number, RANKS)
    handles = [*rank.handles("first", range(RANKS)).values()]
    short = timedelta(milliseconds=500)
    if number != 1:
        told = error_of(lambda: dist._reconfigure(1, handles, timeout=short))
        assert "rank 1 of the new group has not called it" in told, told
    rank.meet("late", range(RANKS))
    told = error_of(lambda: dist._reconfigure(2, handles if number < 2 else [handles[0], handles[2], handles[1]], timeout=LONG))
    assert "given other handles" in told, told
    rank.meet("other", range(RANKS))
    dist._reconfigure(3, handles, timeout=LONG).wait()
    check_all_reduce(RANKS)


def last_words(function, number, *arguments):
    function(number, *arguments)
    dist.destroy_process_group()


class Processes(unittest.TestCase):
    def run_processes(self, count, function, *arguments):
        """Exit codes."""
        with tempfile.TemporaryDirectory() as folder:
            processes = [mp.get_context("fork").Process(target=last_words, args=(function, number, os.path.join(folder, "store"), *arguments))
                         for number in range(count)]
            for process in processes:
                process.start()
            end = time.monotonic() + 100
            for process in processes:
                process.join(max(0, end - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join()
            return [process.exitcode for process in processes]

    def kill_and_go_on(self, kills):
        for kill in range(kills):
            victim = kill % RANKS
            with self.subTest(kill=kill):
                codes = self.run_processes(RANKS + 1, survive, victim, kill % 13)
                self.assertEqual(codes, [-signal.SIGKILL if number == victim else 0 for number in range(RANKS + 1)])


class Reconfigure(Processes):
    def test_survivors_of_a_kill_go_on_and_another_joins(self):
        self.kill_and_go_on(20)

    def test_a_group_formed_as_usual_forms_again(self):
        self.assertEqual(self.run_processes(RANKS, form_again), [0] * RANKS)

    def test_what_fails_is_told_on_all(self):
        self.assertEqual(self.run_processes(RANKS, fail_together), [0] * RANKS)


class Often(Processes):
    def test_survivors_of_a_kill_go_on_and_another_joins(self):
        self.kill_and_go_on(200)


if __name__ == "__main__":
    if not hasattr(dist, "_reconfigure"):
        print(f"SKIPPED BECAUSE torch {torch.__version__} cannot form groups again; 2.14 can")
        sys.exit(77)
    unittest.main(verbosity=2)
