"""One process that trains one of bench/step's models on a GPU by PyTorch, alone or by its DistributedDataParallel over NCCL in a
world of one; scripts/gpu_proof tells it when. gpu_worker.cpp has the protocol."""

import json
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "step"))
from step_worker import MODELS, fill, make_batch  # noqa: E402


def main():
    system, name = sys.argv[1:]
    device = torch.device("cuda", 0)
    model = MODELS[name]()
    fill(model)
    model.to(device)
    batch = [tensor.to(device) for tensor in make_batch(name, 0)]
    replica = model
    if system == "ddp":
        store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
        replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for line in sys.stdin:
        steps = int(line)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = replica(*batch)
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        taken = (time.perf_counter() - start) * 1000
        print(json.dumps({"step_ms": taken / steps, "loss": loss.item(),
                          "peak_mib": torch.cuda.max_memory_allocated() / 2**20}), flush=True)
    if system == "ddp":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
