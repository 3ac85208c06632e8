"""Writes training.safetensors: learning rates, averages and loss scales as PyTorch has them.

    python3 tests/golden/write_training_golden.py

"schedule/<name>/lr" [STEPS + 1, 2]: the rates of two groups before each optimizer step; ".../momentum" [STEPS + 1] where
it varies. "ema/...": averages of values that are closed formulas of the step; those with warm-up by timm's formula
(timm.utils.ModelEmaV3.get_decay), written down here anew, the others by torch.optim.swa_utils. "scaler/...": weights,
scale and growth counter after each step of torch.amp.GradScaler.
"""

import os
import warnings

import torch
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from write_ddp_golden import formula, write_safetensors

STEPS = 400
RATES = (0.1, 0.037)

SCHEDULES = {
    "constant": lambda o: lr.ConstantLR(o, 0.3, 17),
    "linear": lambda o: lr.LinearLR(o, 0.01, 0.9, 137),
    "step": lambda o: lr.StepLR(o, 37, 0.3),
    "multi_step": lambda o: lr.MultiStepLR(o, [5, 80, 80, 81, 333], 0.2),
    "exponential": lambda o: lr.ExponentialLR(o, 0.987),
    "polynomial": lambda o: lr.PolynomialLR(o, 301, 2.3),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 123, 1e-4),
    "cosine_to_zero": lambda o: lr.CosineAnnealingLR(o, 400),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 31, 2, 1e-3),
    "equal_restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 50),
    "one_cycle": lambda o: lr.OneCycleLR(o, list(RATES), STEPS, pct_start=0.23, div_factor=13.0, final_div_factor=77.0),
    "one_cycle_three_phases": lambda o: lr.OneCycleLR(o, 0.2, STEPS, anneal_strategy="linear", three_phase=True,
                                                      base_momentum=0.7, max_momentum=0.99),
    "warm_up": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 1e-3, 1.0, 50), lr.CosineAnnealingLR(o, 350)], [50]),
    "sequential": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, 0.7, 33), lr.StepLR(o, 20, 0.5), lr.PolynomialLR(o, 200, 1.5)], [40, 151]),
}


def schedules():
    out = {}
    for name, make in SCHEDULES.items():
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in RATES]
        optimizer = torch.optim.SGD([{"params": [p], "lr": rate} for p, rate in zip(parameters, RATES)], lr=1.0, momentum=0.9)
        scheduler = make(optimizer)
        rates, momenta = [], []
        for step in range(STEPS + 1):
            rates.append([group["lr"] for group in optimizer.param_groups])
            momenta.append(optimizer.param_groups[1]["momentum"])
            if step < STEPS:
                optimizer.step()
                scheduler.step()
        out[f"schedule/{name}/lr"] = torch.tensor(rates, dtype=torch.float64)
        if len(set(momenta)) > 1:
            out[f"schedule/{name}/momentum"] = torch.tensor(momenta, dtype=torch.float64)
    return out


EMA_STEPS = 60


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 4))
        self.register_buffer("running", torch.zeros(5))
        self.register_buffer("count", torch.tensor(0))
        self.set(0)

    @torch.no_grad()
    def set(self, step):
        self.weight.copy_(formula((3, 4), step))
        self.running.copy_(formula((5,), step + 0.5))
        self.count.fill_(step)


def timm_decay(step, decay, gamma, power, min_decay, update_after):
    step = max(0, step - update_after - 1)
    if step <= 0:
        return 0.0
    return max(min(1 - (1 + step / gamma) ** -power, decay), min_decay)


def averages():
    out = {}
    for name, decay, settings in (("fast", 0.9, (1.0, 2 / 3, 0.0, 0)), ("slow", 0.97, (1.0, 2 / 3, 0.0, 0)),
                                  ("odd", 0.9, (7.0, 0.8, 0.2, 3))):
        model = Weights()
        weight, running = model.weight.detach().clone(), model.running.clone()
        for step in range(1, EMA_STEPS + 1):
            model.set(step)
            d = timm_decay(step, decay, *settings)
            weight = d * weight.double() + (1 - d) * model.weight.detach().double()
            running = d * running.double() + (1 - d) * model.running.double()
        out[f"ema/{name}/weight"], out[f"ema/{name}/running"] = weight, running
    model = Weights()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    averaged.update_parameters(model)  # the first one copies
    for step in range(1, EMA_STEPS + 1):
        model.set(step)
        averaged.update_parameters(model)
    for key, tensor in averaged.module.state_dict().items():
        out[f"ema/torch/{key}"] = tensor.clone()
    return out


SCALER_STEPS = 30
OVERFLOWS = (4, 5, 13, 29)


def scaler():
    parameter = torch.nn.Parameter(formula((5,), 1).float())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=3)
    weights, scales, trackers = [], [], []
    for step in range(SCALER_STEPS):
        optimizer.zero_grad()
        scaler.scale((parameter * formula((5,), step + 0.25).float()).sum()).backward()
        if step in OVERFLOWS:
            parameter.grad[2] = float("inf") if step % 2 else float("nan")
        scaler.step(optimizer)
        scaler.update()
        state = scaler.state_dict()
        weights.append(parameter.detach().clone())
        scales.append(state["scale"])
        trackers.append(state["_growth_tracker"])
    return {"scaler/weights": torch.stack(weights), "scaler/scale": torch.tensor(scales, dtype=torch.float64),
            "scaler/tracker": torch.tensor(trackers)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    everything = {**schedules(), **averages(), **scaler()}
    write_safetensors(os.path.join(os.path.dirname(os.path.abspath(__file__)), "training.safetensors"), everything)
    print(f"{len(everything)} tensors, PyTorch {torch.__version__}")
