"""Trains a few steps with accelerate; started by torchrun: train_with_accelerate.py BACKEND FILE. Rank r writes FILE.r."""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator


def main(backend, path):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # On CPUs accelerate makes a Gloo group, and refuses another name, unless there is a group already.
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    examples = torch.utils.data.TensorDataset(torch.randn(96, 10), torch.randint(3, (96,)))
    loader = torch.utils.data.DataLoader(examples, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()))
    weights = accelerator.unwrap_model(model).state_dict()
    torch.save({"backend": dist.get_backend(), "wrapper": type(model).__name__, "losses": torch.stack(losses),
                "imported": "lockstep._C" in sys.modules, "weights": dict(weights)}, f"{path}.{dist.get_rank()}")
    accelerator.wait_for_everyone()
    accelerator.end_training()  # also destroys the group


if __name__ == "__main__":
    main(*sys.argv[1:])
