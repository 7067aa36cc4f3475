"""The families of diffusers' models by name."""

from __future__ import annotations

from typing import Any

from ..spec import ModelSpec
from .model import DiffusersModel, TextRole, without_warnings
from .pixart import PixArt
from .sana import Sana
from .sd3 import SD3

FAMILIES: dict[str, type[DiffusersModel]] = {one.family: one for one in (PixArt, Sana, SD3)}
# Of models that read several text encoders, and their padding; other models read the valid tokens of one.
TEXT_ROLES: dict[str, tuple[TextRole, ...]] = {name: one.texts for name, one in FAMILIES.items() if one.texts}


def diffusers_names() -> list[str]:
    """Names of all models of diffusers."""
    return [name for family in FAMILIES.values() for name in family.sizes]


def family_of(name: str) -> str | None:
    """Family of a model of diffusers, or None for a DiT."""
    return next((family for family, one in FAMILIES.items() if name in one.sizes), None)


def transformer_class(family: str) -> Any:
    """The class of diffusers."""
    with without_warnings():
        return FAMILIES[family].transformer()


def diffusers_config(spec: ModelSpec) -> dict[str, Any]:
    """Arguments of diffusers' class: of the weights to fine-tune, else for training from scratch."""
    family = family_of(spec.name)
    assert family is not None
    return spec.config or FAMILIES[family].config(spec)
