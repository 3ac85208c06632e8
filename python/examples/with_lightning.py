"""Lightning with lockstep.attach(): torchrun --nproc-per-node 2 with_lightning.py. The strategy attaches, and wraps nothing."""

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

import lockstep


class AttachStrategy(DDPStrategy):
    def _setup_model(self, model):
        lockstep.attach(model)
        return model


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def train(attached=True):
    lightning.seed_everything(0, verbose=False)
    examples = torch.utils.data.TensorDataset(torch.randn(96, 10), torch.randint(3, (96,)))
    model = Classifier()
    strategy = (AttachStrategy if attached else DDPStrategy)(process_group_backend="lockstep")
    trainer = lightning.Trainer(accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, logger=False,
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, torch.utils.data.DataLoader(examples, batch_size=8, shuffle=True))
    return model


if __name__ == "__main__":
    train()
    dist.destroy_process_group()
