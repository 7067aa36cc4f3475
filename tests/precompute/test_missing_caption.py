"""``source.missing_caption = "null"``: an image without a caption is stored, and trains as the null caption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from making import CPU, caption_recipe, encode, make_caption_folder, read_metadata, train_recipe, write_metadata

from leandit.datasets.batches.captions import Captions
from leandit.datasets.loader import make_loader
from leandit.datasets.store import LatentStore
from leandit.train.loop import StopRequest, train
from leandit.train.models.conditioning import Conditioner
from leandit.train.run.fit import model_spec

pytestmark = pytest.mark.usefixtures("quick", "tiny_models")
WITHOUT = ("images/2.png", "images/5.png")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """12 images, two of them without a caption."""
    root = make_caption_folder(tmp_path / "source", count=12)
    rows = read_metadata(root)
    rows[2].pop("captions")
    rows[5]["captions"] = [" "]
    write_metadata(root, rows)
    return root


def encoded(source: Path, store: Path, missing: str) -> LatentStore:
    encode(caption_recipe(f"source.missing_caption={missing}"), source, store, drop_gone=True)
    return LatentStore(store)


def test_a_batch_holds_the_null_caption_and_a_model_trains_on_it(source: Path, tmp_path: Path) -> None:
    store = encoded(source, tmp_path / "store", "null")
    assert {store.record(key).status for key in WITHOUT} == {"stored"}
    without = {store.record(key).index for key in WITHOUT}
    recipe = train_recipe("pixart-tiny", "run.steps=2", "run.checkpoint_every=2")
    spec = model_spec(recipe, store.spec, str(store.path))
    null = torch.from_numpy(store.null_caption).float()
    conditioner, seen = Conditioner(spec, null), set()
    for batch in make_loader(store, global_batch=4, seed=0):
        given = conditioner(batch.labels, batch.texts)
        dropped = conditioner.drop(given, torch.ones(len(batch), dtype=torch.bool))
        assert isinstance(given.captions, Captions)
        assert isinstance(dropped.captions, Captions)
        for i, index in enumerate(batch.records.tolist()):
            is_null = torch.equal(given.captions[[i]].tokens, dropped.captions[[i]].tokens)
            assert is_null == (index in without)
            seen |= {index} & without
    assert seen == without
    train(recipe, store_path=store.path, run=tmp_path / "run", device=CPU, report=lambda _: None, stop=StopRequest())


def test_the_setting_may_change_and_the_store_follows(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = encoded(source, path, "reject")
    assert {store.record(key).reason for key in WITHOUT} == {"no_caption"}
    store = encoded(source, path, "null")
    assert (store.revision, {store.record(key).status for key in WITHOUT}) == (2, {"stored"})
    assert encoded(source, path, "null").revision == 2
    store = encoded(source, path, "reject")
    assert (store.revision, {store.record(key).reason for key in WITHOUT}) == (3, {"no_caption"})
