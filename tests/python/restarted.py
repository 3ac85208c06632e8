"""Groups under torchrun: in each of the first three starts rank 1 ends in a different way and place. restarted.py [twice]

With `twice` there are no faults, and the group is made again in the same processes."""

import os
import signal
import sys

import torch
import torch.distributed as dist


def add_up(group=None):
    tensor = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor, group=group)
    return tensor[999].item()


def main():
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    twice = sys.argv[1:] == ["twice"]
    faulty = os.environ["RANK"] == "1" and not twice
    for _ in range(2 if twice else 1):
        if faulty and start == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.init_process_group("lockstep")
        if faulty and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        world = add_up()
        if faulty and start == 1:
            raise ValueError("on purpose")
        part = add_up(dist.new_group())
        print(f"{dist.get_rank()}:{start}:{world}:{part}\n", end="", flush=True)  # in one piece
        dist.destroy_process_group()


main()
