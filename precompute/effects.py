"""Which keys of a precompute recipe are read only with certain values of others: a key that is not read is not ignored.

``sources/keys.py`` has those of [source] that depend on the kind of source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..effects import Condition

if TYPE_CHECKING:
    from .config import PrecomputeRecipe


def _encodes_text(recipe: PrecomputeRecipe, _: object) -> bool:
    return bool(recipe.text)


TEXT = "a text encoder, [text] with a kind"
CONDITIONS = [
    Condition("source.caption", _encodes_text, TEXT),
    Condition("source.text_file", _encodes_text, TEXT),
    Condition("source.missing_caption", _encodes_text, TEXT),
    Condition("images.step_px", lambda _, images: images.buckets == "area", 'images.buckets = "area"'),
    Condition(
        "images.max_ratio",
        lambda _, images: images.buckets == "area" or len(images.table) > 1,
        'several buckets, or images.buckets = "area"',
    ),
    Condition(
        "images.variant_zoom",
        lambda _, images: images.variants > 1,
        "images.variants above 1",
        switches=("images.variants",),
    ),
    Condition("store.text_dtype", _encodes_text, TEXT),
]
