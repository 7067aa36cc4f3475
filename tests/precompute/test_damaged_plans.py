"""A damaged plan of an unfinished revision is made again from the source, and no shard is encoded twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import flip, without_seal
from making import add_image, caption_recipe, smooth_image, store_digest, tree_digest
from stores import copy_of

from leandit.datasets.store import LatentStore
from leandit.errors import DamageError
from leandit.precompute.pipeline import Report

PLAN = "revisions/000001/plan"


def _lose(name: str) -> Callable[[Path], Any]:
    return lambda store: shutil.rmtree(store / name) if (store / name).is_dir() else (store / name).unlink()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a bit of plan.json": lambda store: flip(store / PLAN / "plan.json", 5001),
    "a bit of the records": lambda store: flip(store / PLAN / "records.parquet", 5001),
    "a bit of the captions": lambda store: flip(store / PLAN / "captions.parquet", 5001),
    "an empty table": lambda store: (store / PLAN / "records.parquet").write_bytes(b""),
    "no plan.json": _lose(f"{PLAN}/plan.json"),
    "no plan at all": _lose(PLAN),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_plan_of_the_first_revision_costs_no_shard(
    damage: Callable[[Path], Any],
    unfinished: Path,
    caption_folder: Path,
    caption_store: LatentStore,
    encode: Callable[..., Report],
) -> None:
    damage(unfinished)
    report = encode(caption_recipe(), caption_folder, unfinished)
    assert report.num_encoded == 0
    assert store_digest(unfinished) == store_digest(caption_store.path)


def test_a_damaged_plan_of_a_later_revision_costs_no_shard(
    caption_store: LatentStore, caption_folder: Path, tmp_path: Path, encode: Callable[..., Report]
) -> None:
    source = shutil.copytree(caption_folder, tmp_path / "source")
    add_image(source, "later.png", smooth_image(99), text="a later image")
    whole = copy_of(caption_store.path, tmp_path / "whole")
    encode(caption_recipe(), source, whole)
    store = copy_of(caption_store.path, tmp_path / "store")
    without_seal(lambda: encode(caption_recipe(), source, store))
    flip(store / "revisions/000002/plan/records.parquet", 5001)
    report = encode(caption_recipe(), source, store)
    assert report.num_encoded == 0
    assert store_digest(store) == store_digest(whole)


@pytest.mark.parametrize("damage", ["a bit of the records", "no plan at all"])
def test_a_damaged_plan_is_not_replaced_by_that_of_another_source(
    damage: str, unfinished: Path, caption_folder: Path, tmp_path: Path, encode: Callable[..., Report]
) -> None:
    source = shutil.copytree(caption_folder, tmp_path / "source")
    add_image(source, "later.png", smooth_image(99), text="a later image")
    DAMAGES[damage](unfinished)
    before = tree_digest(unfinished)
    with pytest.raises(DamageError, match=r"not the plan that the shards were encoded by.*use another --store"):
        encode(caption_recipe(), source, unfinished)
    assert tree_digest(unfinished) == before
    assert encode(caption_recipe(), caption_folder, unfinished).manifest is not None
