"""The optimizers, and their learning rate as a function of the step alone, so that no schedule is saved."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ...errors import needs_extra
from ..config import OptimizerSection, ScheduleSection
from ..models.roles import Role, parameter_roles
from .came import Came
from .muon import IS_MUON, MuonWithAdamW, hidden_matrices

Groups = list[dict[str, Any]]
WITHOUT_DECAY: tuple[Role, ...] = ("table", "norm", "bias")  # unless optimizer.decay_all


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
    roles = parameter_roles(model)
    matrices = hidden_matrices(model) if section.name == "muon" else set()
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = section.decay_all or roles[name] not in WITHOUT_DECAY
        is_muon = name in matrices
        if (decays, is_muon) not in groups:
            group: dict[str, Any] = {"params": [], "weight_decay": section.weight_decay if decays else 0.0}
            if section.name == "muon":
                group[IS_MUON] = is_muon
            groups[decays, is_muon] = group
        groups[decays, is_muon]["params"].append(parameter)
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
