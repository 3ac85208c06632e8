"""Defines a small network for Fashion-MNIST and saves it as TorchScript, for train_torchscript to train.

    python3 examples/train_torchscript.py net.pt
"""

import sys

import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, stride=2, padding=1), torch.nn.ReLU(),
            torch.nn.Conv2d(8, 16, 3, stride=2, padding=1), torch.nn.ReLU())
        self.classifier = torch.nn.Linear(16 * 7 * 7, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images [n, 1, 28, 28]; returns scores [n, 10]."""
        return self.classifier(self.features(images).flatten(1))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.manual_seed(0)
    torch.jit.script(Net()).save(sys.argv[1])
