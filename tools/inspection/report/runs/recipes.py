"""How the recipe of a run differs from a shipped one, and from those of other runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .....datasets.recipe import flatten, shipped_recipes
from .....train.config import PACKAGE, TrainRecipe, load

ABSENT = "-"


@dataclass(frozen=True)
class RecipeDiff:
    """A run's recipe beside the shipped one that it was made from.

    Args:
      shipped: its name.
      is_nearest: the run does not say which one it was; this has the fewest keys that differ.
      rows: key, value of the shipped recipe, value of this run.
    """

    shipped: str
    is_nearest: bool
    rows: list[tuple[str, str, str]]


def resolved(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a run's recipe; those that are newer than the run have their defaults."""
    defaults = TrainRecipe().model_dump()
    sections = dict(recipe) | {
        name: keys | inner for name, keys in defaults.items() if isinstance(inner := recipe.get(name, {}), dict)
    }
    return flatten(sections)


def diff_to_shipped(recipe: Mapping[str, Any], name: str) -> RecipeDiff:
    """Compare a run's recipe with the shipped one.

    Args:
      name: that the run was started with; another than a shipped one, or "", is of none.
    """
    ours = resolved(recipe)
    shipped = shipped_recipes(PACKAGE)
    names = [name] if name in shipped else list(shipped)
    found = [(each, differing([flatten(load(each, []).model_dump()), ours])) for each in names]
    nearest, rows = min(found, key=lambda one: len(one[1]))
    return RecipeDiff(nearest, name not in shipped, [(key, theirs, own) for key, theirs, own in rows])


def differing(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Keys whose values are not the same in all recipes, with the value of each.

    Args:
      recipes: by dotted key.
    """
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    rows = [(key, *(shown(recipe.get(key, ABSENT)) for recipe in recipes)) for key in keys]
    return sorted(row for row in rows if len(set(row[1:])) > 1)


def shown(value: Any) -> str:
    """A value of a recipe as its file has it, shortly."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value or '""'
    return str(value)
