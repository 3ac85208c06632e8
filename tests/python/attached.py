"""Ranks under a launcher that attach a module, with no line about process groups; rank 1 fails in step 3: attached.py FAULT."""

import os
import signal
import sys

import torch

import lockstep


def fail():
    raise ValueError("a bad batch")


FAULTS = {"none": lambda: None, "killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "exception": fail,
          "leaves": lambda: sys.exit(0)}


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    replica = lockstep.attach(model)
    optimizer = lockstep.ZeroRedundancyOptimizer(replica, torch.optim.AdamW, lr=1e-2)
    for step in range(6):
        if replica.rank == 1 and step == 3:
            FAULTS[sys.argv[1]]()
        torch.manual_seed(100 * step + replica.rank)
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
    print(f"loss of rank {replica.rank}: {loss.item():.9g}\n", end="", flush=True)  # in one piece


main()
