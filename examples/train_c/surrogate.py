"""Defines a small network in float64 and saves it as TorchScript, for surrogate.f90 and Surrogate.java.

    python3 examples/train_c/surrogate.py net.pt
"""

import sys

import torch

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.manual_seed(0)
    # From a cell and its two neighbours [n, 3] to the cell's rate of change [n, 1].
    net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    torch.jit.script(net).save(sys.argv[1])
