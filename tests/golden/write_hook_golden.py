"""Writes hooks.safetensors: what PyTorch's communication hooks make of a small model (Gloo, 2 and 3 ranks).

    python3 tests/golden/write_hook_golden.py

Model, weights and inputs are write_ddp_golden.py's. For each world size and hook the file holds gradients after five
steps and parameters after twenty steps of SGD with momentum: "<hook>/<world size>/grad/<name>" and ".../after/<name>".
After post-local SGD every rank has its own: ".../grad_on_<rank>/<name>" and ".../after_on_<rank>/<name>".
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from write_ddp_golden import Plain, batch, fill, write_golden

STEPS = 20


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

    def note(what, key, tensor):
        if name != "post_local_sgd":
            out[f"{name}/{world}/{what}/{key}"] = tensor.detach().clone()
            return
        each = [torch.empty_like(tensor) for _ in range(world)]
        dist.all_gather(each, tensor.detach().contiguous())
        for other, value in enumerate(each):
            out[f"{name}/{world}/{what}_on_{other}/{key}"] = value

    for step in range(STEPS):
        optimizer.zero_grad()
        data, target = batch(step, rank)
        nn.functional.mse_loss(replica(data, step), target).backward()
        if step == 4:
            for key, parameter in model.named_parameters():
                note("grad", key, parameter.grad)
        optimizer.step()
        if averager:
            averager.average_parameters(model.parameters())
    for key, tensor in model.named_parameters():
        note("after", key, tensor)
    return out


if __name__ == "__main__":
    write_golden("hooks.safetensors", HOOKS, run_hook)
