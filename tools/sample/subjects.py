"""Checks of labels and captions to draw. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...datasets.errors import RecipeError
from ...datasets.format.class_names import ClassNames


def find_labels(state: Mapping[str, Any], labels: Sequence[int | str], captions: Sequence[str]) -> list[int]:
    """The index of each class, given by name, folder or index.

    Args:
      state: of a snapshot.
    Raises: RecipeError: labels for a model of captions, or captions for a model of labels; no class has the name, or
      several have.
    """
    spec = state["spec"]
    if labels and spec["caption_width"]:
        raise RecipeError(f"--label: model '{spec['name']}' takes captions. Use --caption.")
    if captions and not spec["caption_width"]:
        raise RecipeError(f"--caption: model '{spec['name']}' takes class labels. Use --label.")
    classes = ClassNames(state["classes"], state.get("class_names"))
    try:
        return [classes.find(label, num_labels=spec["num_classes"]) for label in labels]
    except RecipeError as error:
        raise RecipeError(f"--label: {error}") from error
