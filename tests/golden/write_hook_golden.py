"""Writes hooks.safetensors: what PyTorch's communication hooks make of a small model (Gloo, 2 and 3 ranks).

    python3 tests/golden/write_hook_golden.py

Model, weights and inputs are write_ddp_golden.py's. For each world size and hook the file holds gradients after five
steps and parameters after ten steps of SGD with momentum: "<hook>/<world size>/grad/<name>" and ".../after/<name>".
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from write_ddp_golden import STEPS, Plain, batch, fill, write_safetensors


def power_sgd(**options):
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **options), powerSGD_hook.powerSGD_hook


def bf16_anywhere(state, bucket):
    """Under its own name DistributedDataParallel refuses it on CPUs, where it works."""
    return default_hooks.bf16_compress_hook(state, bucket)


def make_hook(name):
    if name == "fp16":
        return None, default_hooks.fp16_compress_hook
    if name == "bf16":
        return None, bf16_anywhere
    if name == "power_sgd":
        return power_sgd()
    if name == "power_sgd_rank2":
        return power_sgd(matrix_approximation_rank=2, min_compression_rate=0.5)
    if name == "power_sgd_rank3":  # by QR instead of Gram-Schmidt
        return power_sgd(matrix_approximation_rank=3, min_compression_rate=0.3, random_seed=7)
    if name == "power_sgd_bare":
        return power_sgd(use_error_feedback=False, warm_start=False, orthogonalization_epsilon=1e-3)
    return (post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=4, post_local_gradient_allreduce=False),
            post_localSGD_hook.post_localSGD_hook)


HOOKS = ("fp16", "bf16", "power_sgd", "power_sgd_rank2", "power_sgd_rank3", "power_sgd_bare", "post_local_sgd")


def run_hook(name, rank, world):
    model = Plain()
    fill(model)
    replica = DistributedDataParallel(model)
    replica.register_comm_hook(*make_hook(name))
    averager = PeriodicModelAverager(period=3, warmup_steps=4) if name == "post_local_sgd" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    out = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        data, target = batch(step, rank)
        nn.functional.mse_loss(replica(data, step), target).backward()
        if step == 4:
            for key, parameter in model.named_parameters():
                out[f"{name}/{world}/grad/{key}"] = parameter.grad.clone()
        optimizer.step()
        if averager:
            averager.average_parameters(model.parameters())
    for key, tensor in model.named_parameters():
        out[f"{name}/{world}/after/{key}"] = tensor.detach().clone()
    return out


def worker(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    out = {}
    for name in HOOKS:
        out.update(run_hook(name, rank, world))
    if rank == 0:
        torch.save(out, f"{folder}/out{world}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    everything = {}
    for world_size in (2, 3):
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(worker, (world_size, directory), nprocs=world_size)
            everything.update(torch.load(f"{directory}/out{world_size}.pt"))
    write_safetensors(os.path.join(os.path.dirname(os.path.abspath(__file__)), "hooks.safetensors"), everything)
    print(f"{len(everything)} tensors, PyTorch {torch.__version__}")
