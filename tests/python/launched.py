"""A training run under `lockstep run` in which rank 1 fails in step 3: launched.py BACKEND FAULT."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, FAULTY_STEP = 6, 3


def fail():
    raise ValueError("a bad batch")


FAULTS = {
    "none": lambda: None,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exception": fail,
    "hangs": lambda: time.sleep(600),
    "leaves": lambda: sys.exit(0),
    "calls_another": lambda: dist.broadcast(torch.ones(3), 0),
    "skips": lambda: None,
}


def main():
    backend, fault = sys.argv[1:3]
    dist.init_process_group(backend)
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        faulty = dist.get_rank() == 1 and step == FAULTY_STEP
        if faulty:
            FAULTS[fault]()
        model.require_backward_grad_sync = not (faulty and fault == "skips")
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    dist.all_reduce(torch.ones(3))
    if fault == "none":
        # Nobody waits for these before the group is gone, so nobody may be called late.
        for _ in range(3):
            dist.all_reduce(torch.ones(5), async_op=True)
        time.sleep(5)
    dist.barrier()
    dist.destroy_process_group()


main()
