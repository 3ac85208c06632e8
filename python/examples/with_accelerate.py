"""accelerate with lockstep.attach(): lockstep run -n 2 -- python with_accelerate.py. The module stays out of prepare()."""

import torch
import torch.distributed as dist
from accelerate import Accelerator

import lockstep


def train(attached=True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))
    examples = torch.utils.data.TensorDataset(torch.randn(96, 10), torch.randint(3, (96,)))
    loader = torch.utils.data.DataLoader(examples, batch_size=8, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    accelerator = Accelerator(cpu=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    if attached:
        lockstep.attach(model)
    else:
        model = accelerator.prepare(model)  # torch's DistributedDataParallel
    for inputs, targets in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    dist.init_process_group("lockstep")
    train()
    dist.destroy_process_group()
