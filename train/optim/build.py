"""The optimizers, and their learning rate as a function of the step alone, so that no schedule is saved."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ...datasets.errors import needs_extra
from ..config import OptimizerSection, ScheduleSection
from .came import Came
from .muon import IS_MUON, MuonWithAdamW, hidden_matrices

Groups = list[dict[str, Any]]


def build_optimizer(section: OptimizerSection, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the recipe over all parameters that train.

    Raises: RecipeError: its package is not installed.
    """
    groups, betas = parameter_groups(section, model), section.betas
    adam: dict[str, Any] = {"lr": section.lr, "betas": (betas[0], betas[1]), "eps": section.eps}
    adam["weight_decay"] = section.weight_decay
    # One kernel for all parameters; on a CPU it is six times as fast.
    fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    match section.name:
        case "adamw":
            return torch.optim.AdamW(groups, **adam, fused=fused)
        case "muon":
            return MuonWithAdamW(groups, **adam, momentum=section.momentum, fused=fused)
        case "came":
            three = (betas[0], betas[1], betas[2])
            return Came(groups, lr=section.lr, betas=three, weight_decay=section.weight_decay)
    with needs_extra("optimizers", "optimizer.name 'adamw8bit'", "use 'adamw'"):
        from .adamw8bit import AdamW8bit
    return AdamW8bit(groups, **adam)


def parameter_groups(section: OptimizerSection, model: nn.Module) -> Groups:
    """Parameters grouped by weight decay, and for Muon by whether they are hidden matrices."""
    decaying = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)  # not biases, norms, embeddings, tables
    }
    matrices = hidden_matrices(model) if section.name == "muon" else set()
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays, is_muon = section.decay_all or id(parameter) in decaying, id(parameter) in matrices
            decay = section.weight_decay if decays else 0.0
            kind = {IS_MUON: is_muon} if section.name == "muon" else {}
            group = groups.setdefault((decays, is_muon), {"params": [], "weight_decay": decay, **kind})
            group["params"].append(parameter)
    return list(groups.values())


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every group, a number or a tensor."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate


def learning_rate(peak: float, schedule: ScheduleSection, step: int, steps: int) -> float:
    """Rate of the update that makes step ``step`` (the first is 1) of ``steps``."""
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    done = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    left = 1 - done if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (schedule.final_lr_share + (1 - schedule.final_lr_share) * left)
