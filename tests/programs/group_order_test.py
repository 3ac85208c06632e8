"""Groups that ranks use in different orders end the run within seconds, with 44 and the names of the groups; programs that only look like that go on."""

import json
import os
import time

from support import BIN, LOCKSTEP, ProgramTest, main, run

PROGRAM = os.path.join(BIN, "group_order")
BACKENDS = ("shm", "gloo")


class GroupOrder(ProgramTest):
    def launched(self, ranks, what, backend):
        start = time.monotonic()
        result = run(LOCKSTEP, "run", "-n", ranks, "--run-dir", "run", "--", PROGRAM, what, backend, check=False, cwd=self.folder)
        return result, time.monotonic() - start

    def expect_cycle(self, ranks, what, backend, *words):
        result, seconds = self.launched(ranks, what, backend)
        self.assertEqual(result.returncode, 44, f"{what} {backend}\n{result.stderr}")
        self.assertLess(seconds, 15)
        for word in (*words, "Every rank must make the same calls of its groups, and of the objects made with them, in the same order"):
            self.assertIn(word, result.stderr, f"{what} {backend}")
        with open(os.path.join(self.folder, "run", "report.json")) as file:
            return json.load(file)

    def test_two_groups_in_different_orders_end_the_run_soon(self):
        # The ranks used to wait for 300 s, and the launcher said: all ranks wait, rank 0 in the earliest collective.
        for backend in BACKENDS:
            for ranks, members in ((2, "ranks 0, 1"), (3, "ranks 0-2")):
                group = f"subgroup 0 ({members})"
                report = self.expect_cycle(
                    ranks, "two", backend, "threw: the ranks wait for each other, so none can go on: rank 0 in all_reduce #", " in the group of all ranks; ",
                    f" in all_reduce #1 in {group}. ")
                self.assertEqual([rank["last_collective"]["group"] for rank in report["ranks"][:2]], ["", group])

    def test_so_does_a_ring_of_three(self):
        for backend in BACKENDS:
            self.expect_cycle(3, "ring", backend, "so none can go on: rank 0 in all_reduce #0 in subgroup 0 (ranks 0, 1); "
                                                  "rank 1 in all_reduce #0 in subgroup 1 (ranks 1, 2); rank 2 in all_reduce #0 in subgroup 2 (ranks 0, 2). ")

    def test_so_do_collectives_with_a_root_in_shared_memory_which_begin_with_all_calls(self):
        # Nobody was told for 300 s: the watch asked whose data a rank needs, which is the root's, or nobody's.
        for what in ("broadcast", "reduce", "gather"):
            self.expect_cycle(3, what, "shm", f"ranks 0, 1 in {what} #2 in the group of all ranks; rank 2 in all_reduce #0 in subgroup 0 (ranks 1, 2)")

    def test_so_does_a_root_that_is_alone_in_a_broadcast(self):
        # Over Gloo nobody was told: the watch asked whose data a rank needs, and a root needs nobody's. It waits for one to which it sends.
        for backend in BACKENDS:
            for ranks, others in ((2, "rank 1"), (3, "ranks 1, 2")):
                self.expect_cycle(ranks, "alone", backend, f"rank 0 in broadcast #2 in the group of all ranks; {others} in all_reduce #0 in subgroup 0")

    def expect_end(self, ranks, what, backend):
        result, _ = self.launched(ranks, what, backend)
        self.assertEqual(result.returncode, 0, f"{what} {backend} on {ranks}\n{result.stderr}")
        self.assertIn("rank 0 is done", result.stdout)  # the others print into their logs
        return result

    def test_collectives_that_are_under_way_are_no_cycle(self):
        for backend in BACKENDS:
            for ranks in (2, 3):
                self.expect_end(ranks, "crossed", backend)

    def test_nor_are_ranks_that_wait_in_a_row_for_one_that_is_late(self):
        for backend in BACKENDS:
            result = self.expect_end(3, "row", backend)
            self.assertIn("rank 0 has not reached", result.stderr)

    def test_nor_is_a_rank_of_which_a_thread_will_make_its_first_call(self):
        # It used to end the run: that thread slept, or computed, and the watch knew only those that had called a group.
        for backend in BACKENDS:
            for ranks in (2, 3):
                self.expect_end(ranks, "helper", backend)

    def test_nor_are_threads_with_groups_of_their_own_that_sleep(self):
        # A page shows the wait of one thread, so the launcher cannot know what the other one will do.
        for backend in BACKENDS:
            for ranks, what in ((2, "threads"), (3, "threads"), (2, "thread_and_main"), (3, "thread_and_main")):
                self.expect_end(ranks, what, backend)


if __name__ == "__main__":
    main()
