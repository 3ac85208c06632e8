"""A rank that trains one model by PyTorch's DistributedDataParallel or lockstep.attach(); the commands are step_job.h's, models models.cpp's."""

import argparse
import hashlib
import math
import os
import socket
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOKENS = 1000
# layers, width, heads, causal, batch, length
TRANSFORMERS = {"transformer": (6, 256, 4, False, 4, 64), "gpt": (6, 256, 4, True, 32, 256), "gpt_24": (24, 592, 8, True, 4, 16)}
BACKENDS = {"pytorch_ddp_gloo": "gloo", "pytorch_zero_gloo": "gloo", "pytorch_ddp_lockstep": "lockstep",
            "pytorch_fsdp2_gloo": "gloo", "pytorch_fsdp2_lockstep": "lockstep", "python_attach": "lockstep", "python_attach_zero": "lockstep", "side_by_side_python": "gloo"}


def formula(shape, key):
    value = torch.arange(math.prod(shape), dtype=torch.float64) * 0.6180339887498949 + key * 0.3771
    return (value - value.floor() - 0.5).reshape(shape)


@torch.no_grad()
def fill(module):
    for key, (name, parameter) in enumerate(module.named_parameters(), 1):
        if parameter.dim() > 1:
            parameter.copy_(formula(parameter.shape, key) * (2 / math.sqrt(parameter[0].numel())))
        else:
            parameter.fill_(0 if name.endswith("bias") else 0.5 if name.startswith("scale") else 1)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 10)

    def forward(self, data, target):
        return F.cross_entropy(self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(data))))), target)


def convolution(channels, out, kernel, stride):
    return nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False)


class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1, self.bn1 = convolution(channels, out, 3, stride), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = convolution(out, out, 3, 1), nn.BatchNorm2d(out)
        self.shortcut = None if channels == out else convolution(channels, out, 1, stride)

    def forward(self, x):
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inner + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    def __init__(self, channels=1, kernel=3, stride=1, pool=False, stages=(32, 64, 128), classes=10):
        super().__init__()
        self.pool = pool
        self.conv, self.bn = convolution(channels, stages[0], kernel, stride), nn.BatchNorm2d(stages[0])
        widths = [stages[0], *(width for width in stages for _ in range(2))]
        blocks = nn.ModuleList([Block(a, b, 1 if a == b else 2) for a, b in zip(widths, widths[1:])])
        fc = nn.Linear(stages[-1], classes)
        self.blocks, self.fc = blocks, fc

    def forward(self, data, target):
        x = torch.relu(self.bn(self.conv(data)))
        if self.pool:
            x = F.max_pool2d(x, 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.fc(x.mean((2, 3))), target)


def resnet18():
    return ResNet(3, 7, 2, True, (64, 128, 256, 512), 1000)


class Layer(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.inner, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.inner(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        y = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return y + self.fc2(F.gelu(self.fc1(self.norm2(y))))


class Transformer(nn.Module):
    def __init__(self, name):
        super().__init__()
        layers, width, heads, causal, _, _ = TRANSFORMERS[name]
        self.embedding = nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList([Layer(width, heads, causal) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS)

    def forward(self, data, target):
        x = self.embedding(data)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


class Small(nn.Module):
    def __init__(self, parameters):
        super().__init__()
        for i in range(parameters):
            self.register_parameter(f"scale{i}", nn.Parameter(torch.ones(64)))
        self.scales = list(self.parameters())

    def forward(self, data, target):
        x = data
        for scale in self.scales:
            x = x * scale + data
        return x.mean()


class Linear100m(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2048, 2048, bias=False) for _ in range(24)])

    def forward(self, data, target):
        for layer in self.layers:
            data = layer(data)
        return data.square().mean()


MODELS = {"mlp": Mlp, "resnet": ResNet, "small_1000": lambda: Small(1000), "small_10000": lambda: Small(10000), "linear_100m": Linear100m, "resnet18": resnet18,
          **{name: lambda name=name: Transformer(name) for name in TRANSFORMERS}}


OPTIMIZERS = {"sgd": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "fused": True}),
              "adamw": (torch.optim.AdamW, {"lr": 1e-4, "fused": True})}


def make_batch(model, rank):
    def whole(shape, key, end):
        return ((formula(shape, key) + 0.5) * end).floor().long()

    key = 1000 + 10 * rank
    if model == "resnet":
        return formula((64, 1, 28, 28), key).float(), whole((64,), key + 1, 10)
    if model == "resnet18":
        return formula((64, 3, 224, 224), key).float(), whole((64,), key + 1, 1000)
    if model in TRANSFORMERS:
        shape = TRANSFORMERS[model][-2:]
        return whole(shape, key, TOKENS), whole(shape, key + 1, TOKENS)
    if model.startswith("small_"):
        return formula((64,), key).float(), None
    if model == "linear_100m":
        return formula((1, 2048), key).float(), None
    return formula((64, 784), key).float(), whole((64,), key + 1, 10)


class PeakMemory:
    """As peak_memory.h."""

    def __init__(self):
        self.peak, self.ended = 0, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        pause = 0.002
        while not self.ended.wait(pause):
            start = time.perf_counter()
            with open("/proc/self/smaps_rollup") as file:
                held = sum(int(line.split()[1]) for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
            self.peak = max(self.peak, held)
            pause = max(0.002, 4 * (time.perf_counter() - start))

    def stop(self):
        self.ended.set()
        self.thread.join()
        return self.peak / 1024


class Trainer:
    def __init__(self, options, rank):
        self.memory = PeakMemory()
        self.model = MODELS[options.model]()
        fill(self.model)
        self.batch = make_batch(options.model, rank)
        self.system = options.system
        self.optimizer_kind, self.optimizer_options = OPTIMIZERS[options.optimizer]
        self.replica = self.optimizer = None

    def attach(self):
        dist.barrier()
        if self.system.startswith("python_attach"):
            import lockstep

            start = time.perf_counter()
            replica = lockstep.attach(self.model)
            self.replica = self.model
        elif self.system == "side_by_side_python":
            start = time.perf_counter()
            self.replica = self.model
        elif self.system.startswith("pytorch_fsdp2"):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            start = time.perf_counter()
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            self.replica = fully_shard(self.model, mesh=mesh)
        else:
            start = time.perf_counter()
            self.replica = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        taken = time.perf_counter() - start
        if self.system == "python_attach_zero":
            options = {name: value for name, value in self.optimizer_options.items() if name != "fused"}
            self.optimizer = lockstep.ZeroRedundancyOptimizer(replica, self.optimizer_kind, **options)
        elif self.system == "pytorch_zero_gloo":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), self.optimizer_kind, **self.optimizer_options)
        else:
            self.optimizer = self.optimizer_kind(self.model.parameters(), **self.optimizer_options)
        return f"attached {taken * 1000}"

    def step(self):
        self.optimizer.zero_grad()
        loss = self.replica(*self.batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def check(self, steps):
        losses = " ".join(f"{self.step():.10g}" for _ in range(steps))
        hashed = hashlib.sha256()
        for parameter in self.model.parameters():
            parameter = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            hashed.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
        return f"losses {losses} weights {hashed.hexdigest()}"

    def watch(self):
        self.memory.stop()
        self.memory = PeakMemory()
        return "watching"

    def peak(self):
        return f"peak_mib {self.memory.stop()}"

    def time(self, warm, steps):
        for _ in range(warm):
            self.step()
        times, processor = [], time.process_time()
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            times.append((time.perf_counter() - start) * 1000)
        cpu = (time.process_time() - processor) * 1000 / max(1, steps)
        return "times " + " ".join(f"{taken:.6f}" for taken in times) + f" cpu {cpu}"


    def sent(self):
        return "sent 0"


def serve(path, rank, trainer):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    with connection, connection.makefile("rw", buffering=1) as lines:
        lines.write(f"hello {rank} PyTorch {torch.__version__}\n")
        for line in lines:
            verb, *numbers = line.split()
            if verb == "quit":
                return
            lines.write(getattr(trainer, verb)(*map(int, numbers)) + "\n")
            lines.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--system", required=True, choices=BACKENDS)
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--optimizer", required=True, choices=OPTIMIZERS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.path.join(os.path.dirname(options.socket), "store"), world_size)
    dist.init_process_group(BACKENDS[options.system], store=store, rank=rank, world_size=world_size)
    serve(options.socket, rank, Trainer(options, rank))
    os._exit(0)  # nobody waits for a process group's threads


if __name__ == "__main__":
    main()
