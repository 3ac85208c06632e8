"""Trains a few steps with Lightning; started by torchrun: train_with_lightning.py BACKEND FILE. Rank r writes FILE.r."""

import sys

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))
        self.losses = []

    def training_step(self, batch, _):
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.wrapper = type(self.trainer.strategy.model).__name__
        self.losses.append(self.all_gather(loss.detach()))
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def main(backend, path):
    lightning.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    examples = torch.utils.data.TensorDataset(torch.randn(96, 10), torch.randint(3, (96,)))
    model = Classifier()
    trainer = lightning.Trainer(accelerator="cpu", devices=2, max_epochs=1, gradient_clip_val=1.0, logger=False,
                                strategy=DDPStrategy(process_group_backend=backend), enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, torch.utils.data.DataLoader(examples, batch_size=8, shuffle=True))
    torch.save({"backend": dist.get_backend(), "wrapper": model.wrapper,
                "losses": torch.stack(model.losses), "imported": "lockstep._C" in sys.modules,
                "weights": dict(model.state_dict())}, f"{path}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
