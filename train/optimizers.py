"""The optimizer and its learning rate. The rate is a function of the step alone, so there is no schedule to save."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..datasets.errors import RecipeError
from .config import OptimizerSection, ScheduleSection


def build_optimizer(section: OptimizerSection, model: nn.Module) -> torch.optim.AdamW:
    """AdamW over all parameters, fused on a GPU.

    Raises: RecipeError: an optimizer that this release does not have.
    """
    if section.name != "adamw":
        raise RecipeError(f"optimizer.name '{section.name}': this release trains with 'adamw'.")
    parameters = list(model.parameters())
    fused = all(p.is_cuda for p in parameters)
    return torch.optim.AdamW(
        parameters,
        lr=section.lr,
        betas=(section.betas[0], section.betas[1]),
        weight_decay=section.weight_decay,
        fused=fused or None,
    )


def learning_rate(peak: float, schedule: ScheduleSection, step: int, steps: int) -> float:
    """Rate of the update that makes step ``step`` (the first is 1) of ``steps``."""
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    done = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as tensors named "<parameter>/<field>"."""
    return {
        f"{name}/{field}": torch.as_tensor(value)
        for name, parameter in model.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    }


def expected_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Meta tensors with the names, shapes and dtypes of ``optimizer_tensors`` once AdamW has made a step."""
    expected = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            expected |= {f"{name}/{field}": parameter.detach().to("meta") for field in ("exp_avg", "exp_avg_sq")}
            expected[f"{name}/step"] = torch.empty((), dtype=torch.float32, device="meta")
    return expected


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Undo ``optimizer_tensors``; the step counter stays where the optimizer keeps it, on the CPU unless fused."""
    parameters = dict(model.named_parameters())
    fused = optimizer.param_groups[0].get("fused")
    for key, value in tensors.items():
        name, field = key.rsplit("/", 1)
        parameter = parameters[name]
        device = parameter.device if field != "step" or fused else torch.device("cpu")
        optimizer.state[parameter][field] = value.to(device)
