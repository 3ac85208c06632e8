"""A model whose training needs 1.5 times a machine's memory trains, saves and goes on, fully sharded over three machines. The machines are network namespaces with a
memory control group each, which only root can make."""

import os
import subprocess
import threading
import time

from hosts_test import ADDRESSES, Hosts, HostsTest
from support import BIN, environment, main, write_text

MACHINES = 3
# 24 layers of width 592 and what surrounds them; AdamW in float holds 16 bytes for each: value, gradient and two arrays.
PARAMETERS = 24 * (12 * 592 * 592 + 13 * 592) + (256 + 16 + 2) * 592 + 257 * 592
LIMIT = PARAMETERS * 16 * 2 // 3


class MemoryGroup:
    """A control group, of version 1 or 2, that limits the memory of its processes."""

    made = 0

    def __init__(self, limit):
        self.first = os.path.isdir("/sys/fs/cgroup/memory")
        MemoryGroup.made += 1
        self.path = f"/sys/fs/cgroup/{'memory/' if self.first else ''}lockstep-test-{os.getpid()}-{MemoryGroup.made}"
        self.most = 0  # bytes of processes and of what they share; look() was there
        os.mkdir(self.path)
        try:
            self.write("memory.limit_in_bytes" if self.first else "memory.max", limit)
        except BaseException:
            self.remove()
            raise

    def write(self, name, value):
        with open(os.path.join(self.path, name), "w") as file:
            file.write(str(value))

    def numbers(self, name):
        with open(os.path.join(self.path, name)) as file:
            return {words[0]: int(words[1]) for words in map(str.split, file) if len(words) == 2}

    def enter(self):
        self.write("cgroup.procs", os.getpid())

    def look(self):
        found = self.numbers("memory.stat")
        self.most = max(self.most, sum(found[name] for name in (("total_rss", "total_shmem") if self.first else ("anon", "shmem"))))

    def kills(self):
        return self.numbers("memory.oom_control" if self.first else "memory.events").get("oom_kill", 0)

    def hits(self):
        """How often the limit was reached, the page cache included."""
        if not self.first:
            return self.numbers("memory.events")["max"]
        with open(os.path.join(self.path, "memory.failcnt")) as file:
            return int(file.read())

    def remove(self):
        os.rmdir(self.path)


def why_no_groups():
    try:
        MemoryGroup(1 << 30).remove()
    except OSError as error:
        return f"no memory control group can be made here: {error}"
    return None


class LargeModel(HostsTest):
    def setUp(self):
        super().setUp()
        reason = why_no_groups()
        if reason:
            self.skipTest(reason)

    def train(self, hosts, epochs):
        """gpt_text on one rank of each machine; returns the control groups and what rank 0 printed."""
        groups = []
        for _ in range(MACHINES):
            groups.append(MemoryGroup(LIMIT))
            self.addCleanup(groups[-1].remove)
        text = os.path.join(self.folder, "text")
        write_text(text, 320)
        ranks = []
        for rank, group in enumerate(groups):
            env = environment(RANK=str(rank), WORLD_SIZE=str(MACHINES), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR=ADDRESSES[0],
                              MASTER_PORT="29500", OMP_NUM_THREADS="1")
            command = hosts.on(rank, os.path.join(BIN, "gpt_text"), "--fully-sharded", "--text", text, "--epochs", epochs, "--width", 592,
                               "--heads", 8, "--layers", 24, "--block-length", 16, "--batch-size", 4, "--generate", 1, "--folder",
                               os.path.join(self.folder, "states"), "--json", os.path.join(self.folder, "figures.json"))
            ranks.append(subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "--", *command], env=env, preexec_fn=group.enter,
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True))
            self.addCleanup(lambda rank=ranks[-1]: rank.poll() is None and os.killpg(rank.pid, 9))

        def watch():
            while any(rank.poll() is None for rank in ranks):
                for group in groups:
                    group.look()
                time.sleep(0.02)

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        outputs = self.wait_all(ranks, timeout=600)
        watching.join()
        print(f"{[group.most >> 20 for group in groups]} MiB of {LIMIT >> 20} were needed; the limit was hit {[group.hits() for group in groups]} "
              "times", flush=True)
        for group in groups:
            self.assertEqual(group.kills(), 0)
            self.assertGreater(group.most, PARAMETERS * 16 // MACHINES)
            self.assertLess(group.most, 0.85 * LIMIT)
        return groups, outputs[0]

    def test_a_model_of_one_and_a_half_machines_trains_saves_and_goes_on(self):
        with Hosts(MACHINES) as hosts:
            groups, output = self.train(hosts, 1)
            self.assertIn("epoch 1/1", output)
            self.assertEqual([group.hits() for group in groups], [0] * MACHINES)
            states = os.listdir(os.path.join(self.folder, "states"))
            self.assertTrue(any(name.endswith(".pt") for name in states), states)
            # The file is mapped, so the kernel may fill the machine's memory with its pages, and takes them back.
            _, output = self.train(hosts, 2)
            self.assertIn("epoch 2/2", output)
            self.assertNotIn("epoch 1/2  loss", output)


if __name__ == "__main__":
    main()
