"""The role of each weight of a model: Muon, weight decay, FP8 and first weights ask for it.

A model declares the roles of its linear layers and convolutions in one place, its class attribute ``roles``. A layer
with no declared role, or with two, is an error. The roles of all other parameters follow from their kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

DeclaredRole = Literal["hidden", "modulation", "embedding", "head", "projector"]
"""What the weight of a linear layer or a convolution does.

"hidden": within the blocks, it maps tokens of images or captions to others. "modulation": it gives shifts, scales and
gates from the conditioning. "embedding": it maps an input of the model (patches, time, captions) to the model's width.
"head": it maps tokens to an output of the model. "projector": it connects two parts of the model, or maps tokens to the
features that they are aligned with.
"""
Role = DeclaredRole | Literal["table", "norm", "bias"]
"""What a parameter does.

"table": it is looked up or added, such as embedded labels, PixArt's tables of modulation, and tokens that stand for
padding. "norm": gain or offset of a norm. "bias": of a linear layer or a convolution.
"""
RolePatterns = Mapping[DeclaredRole, tuple[str, ...]]
"""For each role the names of its layers in the model, in which * stands for any part of a name."""

DIFFUSERS_MODEL = "net."  # before the names of a model of diffusers, whose patterns leave it out
ADAPTER_SUFFIX = re.compile(r"\.(base_layer|lora_[AB]\.\w+)$")  # that peft appends to the name of an adapted layer


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """The role of each parameter, by name; the matrices of a low-rank adapter have that of the layer they adapt.

    Args:
      model: declares ``roles``.
    Raises: ValueError: as ``declared_role``.
    """
    roles: dict[str, Role] = {}
    for module_name, module in model.named_modules():
        for leaf, _ in module.named_parameters(recurse=False):
            name = f"{module_name}.{leaf}" if module_name else leaf
            if "Norm" in type(module).__name__:  # of torch, of diffusers, and ours
                roles[name] = "norm"
            elif not isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                roles[name] = "table"
            elif leaf == "bias":
                roles[name] = "bias"
            else:
                roles[name] = declared_role(model, module_name)
    return roles


def declared_role(model: nn.Module, layer_name: str) -> DeclaredRole:
    """The role that a model declares for the weight of a linear layer or a convolution.

    Raises: ValueError: it declares none, or more than one.
    """
    patterns: RolePatterns = getattr(model, "roles", {})
    name = ADAPTER_SUFFIX.sub("", layer_name).removeprefix(DIFFUSERS_MODEL)
    matching: list[DeclaredRole] = []
    for role, names in patterns.items():
        if any(fnmatchcase(name, pattern) for pattern in names):
            matching.append(role)
    if len(matching) != 1:
        raise ValueError(
            f"{type(model).__name__}.roles: layer '{name}' has {' and '.join(matching) or 'no role'}, expected one "
            "role. Declare it there."
        )
    return matching[0]


def layers_of(model: nn.Module, *roles: DeclaredRole) -> dict[str, nn.Module]:
    """The linear layers and convolutions whose weights have one of these roles, by name."""
    return {
        name.removesuffix(".weight"): model.get_submodule(name.removesuffix(".weight"))
        for name, role in parameter_roles(model).items()
        if role in roles
    }
