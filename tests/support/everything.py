"""A store of everything: several text encoders and image features, some added to a finished store, which then grew."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from faults import SHARD_ROWS, ImageSource, encode, small_shards
from making import caption_recipe
from tiny_models import make_dinov2, save_clip, save_qwen3

from leandit.datasets.format.layout import CaptionLayout
from leandit.precompute.config import PrecomputeRecipe

BASE = ("vae.flip=true", "vae.batch_size=4", "store.text_dtype=int8")


class Everything(NamedTuple):
    """A source and stores of it.

    Args:
      source: images and captions.
      before: two revisions, with the encoders of ``first``.
      added: the same, then a revision that adds those of ``recipe``.
      grown: the same, then a revision with new, changed and dropped images.
      source_then: the source as it was when ``added`` was made.
    """

    source: Path
    source_then: Path
    before: Path
    added: Path
    grown: Path
    first: PrecomputeRecipe
    recipe: PrecomputeRecipe


@contextmanager
def several_shards() -> Iterator[None]:
    """Shards of two images, of two captions of full length, and of 32 tokens of other ones."""
    shard_rows = CaptionLayout._shard_rows

    def small(self: CaptionLayout) -> tuple[int, int]:
        return shard_rows(self) if self.spec.full_length else (32, 8)

    with small_shards(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", SHARD_ROWS)
        patch.setattr(CaptionLayout, "_shard_rows", small)
        yield


def make_models(root: Path) -> None:
    """Tiny random models, each in a folder of its name."""
    save_clip(root / "clip", projected=True)
    save_qwen3(root / "qwen3")
    make_dinov2(root / "dinov2")
    make_dinov2(root / "wide", width=12)


def recipes(models: Path, *overrides: str) -> tuple[PrecomputeRecipe, PrecomputeRecipe]:
    """Two recipes: T5, tokens and pooled vectors of a CLIP, and DINOv2 in int8; with three kinds of each more.

    The second adds a CLIP's pooled vectors alone, a language model's tokens, patches in float16, class tokens in int8.
    """
    folders = ("subfolder=text_encoder", "tokenizer_subfolder=tokenizer")

    def text(name: str, kind: str, model: str, *settings: str) -> list[str]:
        return [f"text.{name}.{one}" for one in (f"kind={kind}", f"model={models / model}", *folders, *settings)]

    def feature(name: str, model: str, output: str, dtype: str, *settings: str) -> list[str]:
        found = (f"model={models / model}", f"output={output}", f"dtype={dtype}", *settings)
        return [f"features.{name}.{one}" for one in found]

    first = [
        *BASE,
        *text("pair", "clip", "clip", "output=both", "full_length=true", "max_tokens=60"),
        *feature("dino", "dinov2", "both", "int8"),
    ]
    more = [
        *text("vector", "clip", "clip", "output=pooled", "max_tokens=60"),
        *text("llm", "causal_lm", "qwen3", "max_tokens=24", "layers=[-2]"),
        *feature("grid", "wide", "patches", "float16", "layer=1"),
        *feature("token", "dinov2", "cls", "int8"),
    ]
    return caption_recipe(*first, *overrides), caption_recipe(*first, *more, *overrides)


def everything_in(root: Path, *overrides: str) -> Everything:
    """What ``make_everything`` made in a folder."""
    stores = root / "stores"  # not beside the models, so that a copy elsewhere finds them
    paths = root / "source", root / "source then", stores / "before", stores / "added", stores / "grown"
    return Everything(*paths, *recipes(root / "models", *overrides))


def make_everything(root: Path, *overrides: str, count: int = 7) -> Everything:
    """Make the source and the stores, of several shards each."""
    made = everything_in(root, *overrides)
    first, recipe, stores = made.first, made.recipe, made.added.parent
    make_models(root / "models")
    with several_shards():
        images = ImageSource(root / "source", count)
        for i in range(count):
            images.put(i, words=(" by the sea", " and a cat", " and two dogs")[i % 3])
        images.write()
        encode(first, images.root, stores / "before")
        images.put(1, seed=101)
        for i in (20, 21):
            images.put(i, words=" and a yellow star")
        images.write()
        encode(first, images.root, stores / "before")
        shutil.copytree(images.root, root / "source then", copy_function=shutil.copy2)
        shutil.copytree(stores / "before", stores / "added")
        encode(recipe, images.root, stores / "added")
        shutil.copytree(stores / "added", stores / "grown")
        images.put(0, seed=100)
        images.put(22, words=" and a white star")
        images.drop(3)
        images.write()
        encode(recipe, images.root, stores / "grown", drop_gone=True)
    return made
