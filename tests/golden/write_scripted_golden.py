"""Writes {scripted,traced}_batch_norm.pt, scripted_own_norm.pt and traced_in_eval.pt: batch norm as TorchScript.

    python3 tests/golden/write_scripted_golden.py

Input [n, 6], output [n, 3]. Two of the layers are of one width and on branches that no data ties to an order; one has
momentum None. The traced ones were traced in training and in evaluation, so their graphs hold that as a constant.
"""

import os
import zipfile

import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(6, 8)
        self.bn1 = torch.nn.BatchNorm1d(8)
        self.left = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3))
        self.right = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3, momentum=None))
        self.out = torch.nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.fc(x))).reshape(x.size(0), 2, 2, 2)
        return self.out((torch.relu(self.left(x)) + torch.tanh(self.right(x))).flatten(1))


class OwnNorm(torch.nn.Module):
    """Batch norm by the functional form, which no conversion can take for a layer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, self.mean, self.var, training=self.training)


def save(module, name):
    """Without the debug information, which is of the machine that wrote it."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    module.save(path)
    with zipfile.ZipFile(path) as archive:
        entries = [(item, archive.read(item)) for item in archive.infolist() if not item.filename.endswith(".debug_pkl")]
    with zipfile.ZipFile(path, "w") as archive:
        for item, content in entries:
            archive.writestr(zipfile.ZipInfo(item.filename), content)


if __name__ == "__main__":
    torch.manual_seed(7)
    x = torch.rand(5, 6)
    save(torch.jit.script(Net()), "scripted_batch_norm.pt")
    save(torch.jit.script(torch.nn.Sequential(torch.nn.BatchNorm1d(6), OwnNorm())), "scripted_own_norm.pt")
    save(torch.jit.trace(Net(), x, check_trace=False), "traced_batch_norm.pt")
    save(torch.jit.trace(Net().eval(), x), "traced_in_eval.pt")
