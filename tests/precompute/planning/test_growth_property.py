"""Growth gives what a fresh store gives: random edits of images, captions, labels, sidecars and tables in between."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from making import caption_recipe, encode, label_recipe, smooth_image

from leandit.datasets.store import LatentStore
from leandit.precompute.config import PrecomputeRecipe

pytestmark = pytest.mark.usefixtures("quick")
# One image, one caption a forward: how many there are changes the bits.
RECIPE = ("source.max_reject_share=1", "source.max_rejects_in_a_row=999", "vae.batch_size=1", "text.batch_size=1")
LONG = "long " * 14_000  # 70,000 characters
SIZES = [(64, 64), (60, 100), (100, 60)]
CAPTIONS: list[Any] = ["a circle", "a square ", ["a circle", "two"], " ", [], None, 7, LONG, "\ud800", [3], "new"]
LABELS: list[Any] = [None, 0, 1, 3, "x", -5]
IMAGES = ["same", "touched", "other", "other size", "no image", "cut", "gone"]
NUM_EDITED = 8  # images that every round of edits changes; one more stays as it is


def edit_image(path: Path, how: str, seed: int) -> None:
    """Change the file of an image, or do nothing."""
    if how == "touched" and path.exists():
        path.write_bytes(path.read_bytes())
    elif how in ("other", "other size", "cut"):
        smooth_image(seed, *SIZES[seed % 3 if how == "other size" else 0]).save(path)
        path.write_bytes(path.read_bytes()[: -200 if how == "cut" else None])
    elif how == "no image":
        path.write_text("no image")
    elif how == "gone":
        path.unlink(missing_ok=True)


def each_image(**choices: list[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """A round of edits: one of each image."""
    values = {name: st.sampled_from(some) for name, some in choices.items()} | {"seed": st.integers(0, 50)}
    return st.lists(st.fixed_dictionaries(values), min_size=NUM_EDITED, max_size=NUM_EDITED)


class TableSource:
    """Images that a ``metadata.jsonl`` names."""

    edits = each_image(image=IMAGES, captions=CAPTIONS, label=LABELS, listed=[1, 1, 1, 1, 0, 2])
    folders = ("",)

    def __init__(self, root: Path) -> None:
        self.root = root
        for i in range(NUM_EDITED + 1):
            path = root / self.folders[i % len(self.folders)] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            smooth_image(i, *SIZES[i % 3]).save(path)

    def edit(self, edits: list[dict[str, Any]]) -> None:
        rows: list[dict[str, Any]] = [{"file_name": f"{NUM_EDITED}.png", "captions": "a circle"}]
        for at, edit in enumerate(edits):
            edit_image(self.root / f"{at}.png", edit["image"], edit["seed"])
            row = {"file_name": f"{at}.png", "captions": edit["captions"], "label": edit["label"]}
            rows += [row, {**row, "captions": "again"}][: edit["listed"]]
        (self.root / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))


class ClassSource(TableSource):
    """Images in class folders."""

    edits = each_image(folder=list("abcde"), image=IMAGES)
    folders = ("a", "c", "e")

    def edit(self, edits: list[dict[str, Any]]) -> None:
        for at, edit in enumerate(edits):
            (self.root / edit["folder"]).mkdir(exist_ok=True)
            edit_image(self.root / edit["folder"] / f"{at}.png", edit["image"], edit["seed"])


Rounds = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def contents(store: LatentStore) -> list[tuple[Any, ...]]:
    """What a store says of each record, and the bytes that it holds of it; in the order of the keys."""
    texts, found = store.captions["text"].to_pylist() if store.spec.text else [], []
    for i, row in enumerate(store.records.to_pylist()):
        record, latents, captions = store.record_at(i), b"", ()
        if record.status == "stored":
            assert record.bucket
            latents = store.latents(record.bucket)[record.row].tobytes()
            captions = tuple((texts[c], store.caption_embedding(c).tobytes()) for c in record.caption_ids)
        detail = "" if record.reason == "duplicate_key" else row["detail"]  # where the first one stands, which moves
        name = store.spec.classes[record.label] if store.spec.classes and record.label >= 0 else ""
        found.append((record.key, record.status, record.reason, detail, record.label, name, captions, latents))
    return sorted(found, key=lambda one: (one[0], one[1], one[2] or ""))


def grow(source: TableSource, store: Path, recipe: PrecomputeRecipe) -> LatentStore:
    encode(recipe, source.root, store, drop_gone=True)
    return LatentStore(store)


def check(kind: Callable[[Path], TableSource], recipe: PrecomputeRecipe, rounds: Rounds, tmp: Path) -> None:
    """Grow a store after each round of edits, then compare it with a fresh one."""
    shutil.rmtree(tmp / "trial", ignore_errors=True)
    (tmp / "trial").mkdir()
    source, grown = kind(tmp / "trial/source"), None
    for edits in rounds:
        source.edit(edits)
        grown = grow(source, tmp / "trial/grown", recipe)
    assert grown is not None
    assert contents(grown) == contents(grow(source, tmp / "trial/fresh", recipe))


QUICK = settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(rounds=st.tuples(TableSource.edits, TableSource.edits))
@QUICK
def test_of_a_table(rounds: Rounds, tmp_path: Path) -> None:
    check(TableSource, caption_recipe("source.missing_caption=null", *RECIPE), rounds, tmp_path)


@given(rounds=st.tuples(ClassSource.edits, ClassSource.edits))
@QUICK
def test_of_class_folders(rounds: Rounds, tmp_path: Path) -> None:
    check(ClassSource, label_recipe(*RECIPE[:-1]), rounds, tmp_path)


@pytest.mark.parametrize(("before", "after"), [("header", "manifest"), ("manifest", "header")])
def test_of_a_table_whose_sizes_are_believed_from_now_on_or_no_longer(tmp_path: Path, before: str, after: str) -> None:
    real = {"right": (64, 64), "lies": (64, 64), "short": (64, 64), "long": (20, 200), "unsaid": (64, 64)}
    said = {"right": (64, 64), "lies": (60, 100), "short": (10, 200), "long": (64, 64), "broken": (64, 64)}
    rows = [{"file_name": f"{name}.png", "captions": "a circle"} for name in [*real, "broken"]]
    for row in rows:
        name = row["file_name"].removesuffix(".png")
        row |= dict(zip(("height", "width"), said.get(name, ()), strict=False))
    source = TableSource(tmp_path / "source")
    for name, size in real.items():
        smooth_image(3, *size).save(source.root / f"{name}.png")
    (source.root / "broken.png").write_text("no image")
    (source.root / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, then = (caption_recipe(f"source.sizes={sizes}", *RECIPE) for sizes in (before, after))
    old = contents(grow(source, tmp_path / "grown", first))
    assert (("long.png", "rejected", "wrong_size") in [one[:3] for one in old]) == (before == "manifest")
    grown = grow(source, tmp_path / "grown", then)
    assert contents(grown) == contents(grow(source, tmp_path / "fresh", then)) != old
    assert grow(source, tmp_path / "grown", then).revision == grown.revision == 2
