"""The training of training_rank.cpp with PyTorch's DistributedDataParallel on Gloo, for torchrun: the same model, steps,
faults and words of the command line (page, fault, rank, at=forward, step, steps, kill_steps). With checkpoint=FILE it saves every
epoch=N steps, goes on from the file, and writes a hash of its parameters to result=FILE."""

import hashlib
import mmap
import os
import signal
import struct
import sys
import time

import torch
import torch.distributed as dist

WORDS = dict(word.split("=", 1) for word in sys.argv[1:])
RANK = int(os.environ["RANK"])
RANK_BYTES = 32  # FaultPage::Rank: int32 pid, uint32 place, int64 step, int64 fault_ns, int64 die_at_write
MADE = 16 * RANK_BYTES  # FaultPage::made
MADE_BEFORE, KILLS = MADE + 24, MADE + 32
FORWARD, END = 3, 9


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256), torch.nn.Linear(256, 10)

    def forward(self, x):
        return self.out(torch.relu(self.second(torch.relu(self.first(x)))))


class Injector:
    def __init__(self):
        with open(WORDS["page"], "r+b") as file:
            self.page = mmap.mmap(file.fileno(), 0)
        if RANK == 0:
            struct.pack_into("<q", self.page, MADE_BEFORE, self.number_at(MADE))
        self.note("<i", 0, os.getpid())

    def note(self, form, at, value):
        struct.pack_into(form, self.page, RANK * RANK_BYTES + at, value)

    def number_at(self, at):
        return struct.unpack_from("<q", self.page, at)[0]

    def count_step(self):
        if RANK == 0:
            struct.pack_into("<q", self.page, MADE, self.number_at(MADE) + 1)

    def wait_for_kill(self, step):
        for kill, at in enumerate(filter(None, WORDS.get("kill_steps", "").split(","))):
            while int(at) == step and self.number_at(KILLS) <= kill:
                time.sleep(0.001)

    def arrive(self, place, step):
        self.note("<q", 8, step)
        self.note("<I", 4, place)
        if place == FORWARD:
            self.wait_for_kill(step)
        if place != FORWARD or int(WORDS.get("rank", -1)) != RANK or int(WORDS.get("step", 0)) != step:
            return
        fault = WORDS.get("fault", "none")
        if fault != "none":
            self.note("<q", 16, time.monotonic_ns())
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "exit0":
            os._exit(0)
        elif fault == "exception":
            raise RuntimeError("the exception that faultbox asked for")


def main():
    injector = Injector()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1 + RANK)
    model = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first, path, epoch = 0, WORDS.get("checkpoint"), int(WORDS.get("epoch", 50))
    if path and os.path.exists(path):
        saved = torch.load(path)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, int(WORDS.get("steps", 12))):
        torch.manual_seed(1000 * step + RANK)
        data, target = torch.randn(32, 256), torch.randint(10, (32,))
        injector.arrive(FORWARD, step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data), target).backward()
        optimizer.step()
        injector.count_step()
        if path and RANK == 0 and (step + 1) % epoch == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, path + ".new")
            os.rename(path + ".new", path)
        time.sleep(int(WORDS.get("pause_ms", 0)) / 1000)
    if RANK == 0 and "result" in WORDS:
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.module.state_dict().values()))
        with open(WORDS["result"], "w", encoding="utf-8") as file:
            file.write(digest.hexdigest())
    dist.destroy_process_group()
    injector.arrive(END, 0)


main()
