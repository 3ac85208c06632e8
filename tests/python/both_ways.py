"""A program of python/examples, trained by lockstep.attach() and by the framework's own DistributedDataParallel: under
torchrun, both_ways.py EXAMPLE. The weights must have the same bits: on two ranks there is one order of two summands."""

import importlib
import os
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../python/examples"))


def main(name):
    torch.set_num_threads(1)
    dist.init_process_group("lockstep")
    example = importlib.import_module(name)
    start, attached, wrapped = ({key: value.clone() for key, value in train().state_dict().items()}
                                for train in (lambda: example.train(), lambda: example.train(), lambda: example.train(False)))
    assert len(attached) > 3 and attached.keys() == wrapped.keys(), (attached.keys(), wrapped.keys())
    for key, weight in wrapped.items():
        assert torch.equal(start[key], attached[key]), f"{key} differs from run to run"
        assert torch.equal(attached[key], weight), f"{key}: attach() gives {attached[key]}, DistributedDataParallel {weight}"
    print(f"{dist.get_rank()}:{len(attached)} equal\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main(sys.argv[1])
