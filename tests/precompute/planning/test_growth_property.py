"""A store that grew, and dropped what is gone, says and holds what a fresh one does, whatever was edited in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from making import SIZES, caption_recipe, encode, label_recipe, smooth_image, write_file, write_metadata

from leandit.datasets.store import LatentStore
from leandit.precompute.config import PrecomputeRecipe

pytestmark = pytest.mark.usefixtures("quick")
# One image, one caption a forward: how many there are changes the bits.
LABELED = ("source.max_reject_share=1", "source.max_rejects_in_a_row=999", "vae.batch_size=1")
CAPTIONED = (*LABELED, "text.batch_size=1")
LONG = "long " * 14_000  # 70,000 characters
# Good ones are more likely, so that some records stay and are only described anew.
IMAGES = ["same"] * 6 + ["touched", "other", "other size", "no image", "cut", "gone"]
CAPTIONS: list[Any] = ["a circle", "a square ", ["a circle", "two"], "new"] * 4
CAPTIONS += [" ", [], None, 7, LONG, "\ud800", [3]]
LABELS = [None, 0, 1, 3, 0, 1, 0, 1, "x", -5]
TEXTS = [b"a circle", b"a square\na square\n", b"new"] * 3 + [b" ", b"caf\xe9", LONG.encode(), None]  # one not UTF-8
JSONS = [None, b'{"label": 1}', b'{"label": 0}'] * 3 + [b'{"label": "x"}', b"{", b'{"caption": 5}']
NUM_EDITED = 8  # images that every round edits; one more stays as it is


def edit_image(path: Path, rng: Random) -> None:
    how, seed = rng.choice(IMAGES), rng.randrange(50)
    if how in ("other", "other size", "cut"):
        smooth_image(seed, *SIZES[seed % 3 if how == "other size" else 0]).save(path)
    if how in ("touched", "cut") and path.exists():
        path.write_bytes(path.read_bytes()[: -200 if how == "cut" else None])
    elif how == "no image":
        path.write_text("no image")
    elif how == "gone":
        path.unlink(missing_ok=True)


def edit_table(root: Path, rng: Random) -> None:
    rows: list[dict[str, Any]] = [{"file_name": f"{NUM_EDITED}.png", "captions": "a circle"}]
    for i in range(NUM_EDITED):
        edit_image(root / f"{i}.png", rng)
        row = {"file_name": f"{i}.png", "captions": rng.choice(CAPTIONS), "label": rng.choice(LABELS)}
        rows += [row, {**row, "captions": "again"}][: rng.choice([1, 1, 1, 1, 0, 2])]
    write_metadata(root, rows)


def edit_sidecars(root: Path, rng: Random) -> None:
    write_file(root / f"{NUM_EDITED}.txt", "a circle")
    for i in range(NUM_EDITED):
        edit_image(root / f"{i}.png", rng)
        for suffix, choices in (("txt", TEXTS), ("json", JSONS)):
            (root / f"{i}.{suffix}").unlink(missing_ok=True)
            if (text := rng.choice(choices)) is not None:
                write_file(root / f"{i}.{suffix}", text)


def edit_classes(root: Path, rng: Random) -> None:
    for i in range(NUM_EDITED):
        (folder := root / rng.choice("abcde")).mkdir(exist_ok=True)
        edit_image(folder / f"{i}.png", rng)


def grow(source: Path, path: Path, recipe: PrecomputeRecipe) -> list[tuple[Any, ...]]:
    """Let the store grow. Returns: what it says of each record, and the bytes that it holds of it; by key."""
    encode(recipe, source, path, drop_gone=True)
    store, found = LatentStore(path), []
    texts = store.captions["text"].to_pylist() if store.spec.text_encoders else []
    for i, row in enumerate(store.records.to_pylist()):
        record, latents = store.record_at(i), b""
        if record.status == "stored":
            latents = store.latents(row["bucket"])[record.row].tobytes()
        captions = [(texts[j], store.caption_embedding(j).tobytes()) for j in record.caption_ids if latents]
        detail = "" if record.reason == "duplicate_key" else row["detail"]  # where the first one stands, which moves
        name = store.spec.classes[record.label] if store.spec.classes and record.label >= 0 else ""
        found.append((record.key, record.status, record.reason or "", detail, record.label, name, captions, latents))
    return sorted(found, key=lambda one: one[:3])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("edit", "recipe"),
    [
        *((edit_table, caption_recipe(f"source.missing_caption={how}", *CAPTIONED)) for how in ("reject", "null")),
        *((edit_sidecars, recipe) for recipe in (caption_recipe(*CAPTIONED), label_recipe(*LABELED))),
        (edit_classes, label_recipe(*LABELED)),
    ],
)
def test_edits(edit: Callable[[Path, Random], None], recipe: PrecomputeRecipe, seed: int, tmp_path: Path) -> None:
    rng, source, grown = Random(seed), tmp_path / "source", []
    for i in range(NUM_EDITED + 1):
        image = write_file(source / ("ace"[i % 3] if edit is edit_classes else "") / f"{i}.png")
        smooth_image(i, *SIZES[i % 3]).save(image)
    for _ in range(2):
        edit(source, rng)
        grown = grow(source, tmp_path / "grown", recipe)
    assert grown == grow(source, tmp_path / "fresh", recipe)


@pytest.mark.parametrize(("before", "after"), [("header", "manifest"), ("manifest", "header")])
def test_sizes_that_are_believed_from_now_on_or_no_longer(before: str, after: str, tmp_path: Path) -> None:
    source, path = tmp_path / "source", tmp_path / "grown"
    first, then = (caption_recipe(f"source.sizes={sizes}", *CAPTIONED) for sizes in (before, after))
    real = {"right": (64, 64), "lies": (64, 64), "short": (64, 64), "long": (20, 200), "unsaid": (64, 64), "broken": ()}
    said = {"right": (64, 64), "lies": (60, 100), "short": (10, 200), "long": (64, 64), "broken": (64, 64)}
    rows: list[dict[str, Any]] = []
    for name, size in real.items():
        image = write_file(source / f"{name}.png", "no image")
        if size:
            smooth_image(3, *size).save(image)
        height_and_width = zip(("height", "width"), said.get(name, ()), strict=False)
        rows.append({"file_name": image.name, "captions": "a circle", **dict(height_and_width)})
    write_metadata(source, rows)
    old = grow(source, path, first)
    assert grow(source, path, then) == grow(source, tmp_path / "fresh", then) != old
    grow(source, path, then)
    assert LatentStore(path).revision == 2  # nothing is left to do
