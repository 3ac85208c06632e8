"""Writes optimizer.safetensors: what PyTorch's SGD, Adam and AdamW make of three parameters in 50 steps.

    python3 tests/golden/write_optimizer_golden.py

Parameters and gradients are closed formulas (`formula` of write_ddp_golden.py), so that the C++ test builds the same.
The file holds, for each case and dtype, the parameters and their state afterwards: "<case>/<dtype>/<index>" and
".../<index>.<name of the state>". float32 and float64 are PyTorch's plain loop (foreach=False, fused=False); bfloat16 is
its float32 loop with parameters and state rounded after each step. (fused=True is no reference: for SGD on bfloat16,
PyTorch 2.13 gives results far from those of its plain loop.)
"""

import os

import torch
from write_ddp_golden import formula, write_safetensors

STEPS = 50
SHAPES = ((5, 7), (33,), (2, 3, 4))

CASES = {
    "sgd": lambda p, **how: torch.optim.SGD(p, lr=0.05, weight_decay=0.1, **how),
    "sgd_momentum": lambda p, **how: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.4, **how),
    "sgd_nesterov": lambda p, **how: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01, **how),
    "adam": lambda p, **how: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, **how),
    "adam_amsgrad": lambda p, **how: torch.optim.Adam(p, lr=0.01, amsgrad=True, **how),
    "adamw": lambda p, **how: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, **how),
    "adamw_amsgrad": lambda p, **how: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True, **how),
}


def main():
    torch.set_num_threads(1)
    out = {}
    for case, make in CASES.items():
        for name, dtype in (("float32", torch.float32), ("float64", torch.float64), ("bfloat16", torch.bfloat16)):
            computed = torch.float32 if dtype == torch.bfloat16 else dtype
            parameters = [torch.nn.Parameter(formula(shape, i).to(dtype).to(computed)) for i, shape in enumerate(SHAPES)]
            # Two groups, the second at half the rate.
            groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
            optimizer = make(groups, foreach=False, fused=False)
            optimizer.param_groups[1]["lr"] *= 0.5
            for step in range(STEPS):
                for i, parameter in enumerate(parameters):
                    unused = i == 2 and step % 3 != 1
                    parameter.grad = None if unused else formula(SHAPES[i], 10 + 3 * step + i).to(dtype).to(computed)
                optimizer.step()
                for parameter in parameters:
                    for value in (parameter.data, *optimizer.state[parameter].values()):
                        if value is not None and value.dim() > 0:
                            value.copy_(value.to(dtype))
            for i, parameter in enumerate(parameters):
                out[f"{case}/{name}/{i}"] = parameter.detach().double()
                for key, value in optimizer.state[parameter].items():
                    if key != "step" and value is not None:
                        out[f"{case}/{name}/{i}.{key}"] = value.double()
    write_safetensors(os.path.join(os.path.dirname(os.path.abspath(__file__)), "optimizer.safetensors"), out)


if __name__ == "__main__":
    main()
