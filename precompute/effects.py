"""Which keys of a precompute recipe are read only with certain values of others: a key that is not read is not ignored.

``sources/keys.py`` has those of [source] that depend on the kind of source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..effects import Condition

if TYPE_CHECKING:
    from .config import PrecomputeRecipe, StoreSection


def _encodes_text(recipe: PrecomputeRecipe, _: object) -> bool:
    return bool(recipe.text)


def _narrows_text(recipe: PrecomputeRecipe, store: StoreSection) -> bool:
    return bool(recipe.text) and store.caption_dtype != "float32"


def _acts_on_low_quality(recipe: PrecomputeRecipe, store: StoreSection) -> bool:
    if not _narrows_text(recipe, store) or not store.min_text_cosine:
        return False
    has_tokens = any(section.output != "pooled" for section in recipe.text.values())
    return store.on_low_quality != "float16" or (store.caption_dtype == "int8" and has_tokens)


NARROW_TEXT = "captions in a dtype other than float32"
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
    Condition("store.min_text_cosine", _narrows_text, NARROW_TEXT),
    Condition(
        "store.on_low_quality",
        _acts_on_low_quality,
        f'{NARROW_TEXT} and store.min_text_cosine above 0; for "float16" tokens in int8',
    ),
]
