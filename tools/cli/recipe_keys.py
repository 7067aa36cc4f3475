"""All keys of a recipe, with default and meaning, from the models of its sections: ``leandit recipes --keys``, docs."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from ...recipe import UNNAMED

MODELS = {
    "precompute": ("precompute.config", "PrecomputeRecipe"),
    "train": ("train.config", "TrainRecipe"),
    "import": ("precompute.importing.recipe", "ImportRecipe"),
}


class RecipeKey(NamedTuple):
    """A key of a recipe.

    Args:
      name: with its sections, as ``--set`` takes it.
      default: as JSON, or "required".
      meaning: one or two sentences.
    """

    name: str
    default: str
    meaning: str


def recipe_keys(stage: str) -> list[RecipeKey]:
    """All keys of the recipes of a stage, in their order.

    Args:
      stage: a key of MODELS.
    """
    module, name = MODELS[stage]
    model = getattr(importlib.import_module(f"leandit.{module}"), name)
    keys: list[RecipeKey] = []
    for section, field in model.model_fields.items():
        if inner := _section_in(field.annotation):
            is_single = inner is field.annotation or field.json_schema_extra == UNNAMED  # [text.NAME] is as [text]
            keys += _keys_of(inner, section if is_single else f"{section}.NAME", frozenset())
    return keys


def _keys_of(section: type[BaseModel], prefix: str, above: frozenset[str]) -> Iterator[RecipeKey]:
    """Keys of a section, and of the tables in it.

    Args:
      above: keys of the sections around it, which a table may have too: they are listed once.
    """
    fields = section.model_fields
    for key, field in fields.items():
        if key in above:
            continue
        table = _section_in(field.annotation)
        default = "required" if field.is_required() else json.dumps(field.get_default(call_default_factory=True))
        yield RecipeKey(f"{prefix}.{key}", default, " ".join((field.description or "").split()))
        if table:
            yield from _keys_of(table, f"{prefix}.{key}", above | fields.keys())


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The model of a section: the annotation itself, or that in a list or in a table of names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((section for inner in get_args(annotation) if (section := _section_in(inner))), None)
