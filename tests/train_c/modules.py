"""Writes the TorchScript modules of the tests into a folder, or with a file of them says what it holds."""

import os
import sys

import torch


class Twice(torch.nn.Sequential):
    """The same parameters as `net`, other code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return 2 * x


class Mse(torch.nn.Module):
    """A loss."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.square(output - target).mean()


class WithLoss(torch.nn.Module):
    """A net that returns its loss."""

    def __init__(self, net: torch.nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.square(self.net(x) - target).mean()


class FailsInBackward(torch.nn.Sequential):
    """Above 5, it spoils what its backward needs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spoils = bool(x.max() > 5)
        for layer in self:
            x = layer(x)
        y = torch.exp(x)
        result = y * 1.5
        if spoils:
            y.add_(1)
            result = result + 0 * y  # or TorchScript leaves it out
        return result


def layers():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)


def write(folder):
    nets = {
        "net": torch.nn.Sequential(*layers()),
        "twice": Twice(*layers()),
        "other": torch.nn.Sequential(torch.nn.Linear(3, 9)),
        "loss": Mse(),
        "with_loss": WithLoss(torch.nn.Sequential(*layers())),
        "fails": FailsInBackward(*layers()),
        "frozen": torch.nn.Sequential(*layers()).requires_grad_(False),
    }
    for name, net in nets.items():
        torch.jit.script(net.double()).save(os.path.join(folder, name + ".pt"))
    torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))).save(os.path.join(folder, "float.pt"))
    with open(os.path.join(folder, "garbage.pt"), "w", encoding="utf-8") as file:
        file.write("no module\n" * 100)


if __name__ == "__main__":
    if os.path.isdir(sys.argv[1]):
        write(sys.argv[1])
    else:
        net = torch.jit.load(sys.argv[1]).eval()
        print(sum(p.numel() for p in net.parameters()), net(torch.zeros(4, 3, dtype=torch.float64)).shape)
