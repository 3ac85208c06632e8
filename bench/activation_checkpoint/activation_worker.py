"""What activation_worker.cpp does, in PyTorch."""

import argparse
import ctypes
import json
import statistics
import time

import torch
from torch.utils.checkpoint import checkpoint


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = 8
        self.norm_1 = torch.nn.LayerNorm(width)
        self.attention = torch.nn.Linear(width, 3 * width)
        self.projection = torch.nn.Linear(width, width)
        self.norm_2 = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        n, length, width = x.shape
        qkv = self.attention(self.norm_1(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = torch.nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm_2(x))))


def status_mib(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":")) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 12), ("width", 256), ("length", 128), ("batch", 8), ("steps", 5)):
        parser.add_argument("--" + name, type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    models = {}
    for name in ("plain", "checkpointed"):
        torch.manual_seed(1)
        models[name] = torch.nn.ModuleList(Layer(options.width) for _ in range(options.layers))
    optimizers = {name: torch.optim.SGD(model.parameters(), 0.01) for name, model in models.items()}
    found = {name: {"ms": [], "mib": 0, "losses": []} for name in models}
    for step in range(options.steps + 1):
        for name, model in models.items():
            torch.manual_seed(100 + step)
            x = torch.randn(options.batch, options.length, options.width)
            optimizers[name].zero_grad()
            libc.malloc_trim(0)
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            before, start = status_mib("VmRSS"), time.perf_counter()
            y = x
            for layer in model:
                y = checkpoint(layer, y, use_reentrant=False) if name == "checkpointed" else layer(y)
            loss = y.square().mean()
            loss.backward()
            took = (time.perf_counter() - start) * 1000
            most = status_mib("VmHWM") - before
            optimizers[name].step()
            if step > 0:
                found[name]["ms"].append(took)
                found[name]["mib"] = max(found[name]["mib"], most)
                found[name]["losses"].append(loss.item())
    for figures in found.values():
        figures["ms"] = statistics.median(figures["ms"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
