"""The techniques, and their keys in the recipe. A technique is its file and the lines here that name it."""

from __future__ import annotations

from typing import Any

from ...recipe import Section
from ..data_recipe import Objective
from . import (
    contrastive,
    dispersive,
    repa,
    routing,
    sra,
)
from .technique import Technique

# In the order in which they draw, and in which their losses are added.
TECHNIQUES: tuple[type[Technique], ...] = (
    contrastive.Contrastive,
    dispersive.Dispersive,
    repa.Repa,
    routing.Routing,
    sra.SelfAlignment,
)


class TechniqueSections(
    routing.Keys,
    sra.Keys,
    repa.Keys,
    Section,
):
    """Sections of a recipe."""


class ObjectiveSection(
    dispersive.Keys,
    contrastive.Keys,
    Objective,
):
    """What the model learns."""


def techniques_of(recipe: Any) -> list[Technique]:
    """The techniques that a recipe uses."""
    return [technique for kind in TECHNIQUES if (technique := kind(recipe)).is_on]


def features_of(recipe: Any) -> list[str]:
    """Names of the image features of the store that the techniques of a recipe read."""
    return [name for technique in techniques_of(recipe) for name in technique.features]


def routed_blocks(techniques: list[Technique], depth: int) -> tuple[int, int]:
    """The first and the last block that some tokens skip, from 1; (0, 0): none. Raises: RecipeError."""
    return max((technique.routed(depth) for technique in techniques), default=(0, 0))
