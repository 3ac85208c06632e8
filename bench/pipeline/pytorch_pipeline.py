"""What bench_pipeline measures with layers that wait, by torch.distributed.pipelining on Gloo: a rank of it.

    torchrun --nproc-per-node 4 bench/pipeline/pytorch_pipeline.py
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

LENGTH, WIDTH = 128, 512


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(context, values, wait):
        context.wait = wait
        time.sleep(wait / 1000)
        return values.view_as(values)

    @staticmethod
    def backward(context, gradient):
        time.sleep(2 * context.wait / 1000)
        return gradient, None


class WaitingLayer(torch.nn.Module):
    def __init__(self, wait):
        super().__init__()
        self.wait = wait
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, values):
        return Wait.apply(values * self.scale, self.wait)


def loss_of(output, target):
    return (output - target).square().mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--wait", type=float, default=10)
    parser.add_argument("--micro-batches", type=int, default=8)
    options = parser.parse_args()
    if options.tiny:
        options.rows, options.wait = 1, 1
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    layer = WaitingLayer(options.wait)
    torch.manual_seed(1)
    batch = torch.randn(options.rows * options.micro_batches, LENGTH, WIDTH)
    target = torch.tanh(batch)
    stage = PipelineStage(layer, rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.micro_batches, loss_fn=loss_of)
    times = []
    for turn in range(-1 if options.tiny else -3, 1 if options.tiny else 9):
        layer.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        losses = []
        if rank == 0:
            schedule.step(batch)
        elif rank == stages - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        # The loss on all ranks, as lockstep's has it.
        loss = torch.stack(losses).mean().reshape(1) if losses else torch.zeros(1)
        dist.broadcast(loss, stages - 1)
        took = torch.tensor([1000 * (time.perf_counter() - start)])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if turn >= 0:
            times.append(took.item())
    expected = loss_of(batch, target).item()
    if abs(loss.item() - expected) > 1e-5 * expected:
        raise SystemExit("the loss is wrong")
    if rank == 0:
        bound = (options.micro_batches + stages - 1) * 3 * options.wait
        took = statistics.median(times)
        print(f"PyTorch, layers that wait: {stages} stages, {options.micro_batches} micro-batches of {options.rows * LENGTH * WIDTH * 4 / 2**20:.1f} MiB: "
              f"{took:.1f} ms a step, bound {bound:.1f} ms: {took / bound:.3f} x", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
