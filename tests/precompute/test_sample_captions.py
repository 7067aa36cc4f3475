"""Captions that no record has: own prompts (``captions.sample``), and the null caption of an image without one."""

from __future__ import annotations

import json
from pathlib import Path

import making
import numpy as np
import pytest
import torch
from making import (
    CPU,
    caption_recipe,
    label_recipe,
    read_metadata,
    store_digest,
    train_recipe,
    write_metadata,
)
from runs import HOLDOUT, run_to
from safetensors import safe_open
from safetensors.torch import load_file
from stores import copy_of

from leandit.datasets.batches.captions import Captions
from leandit.datasets.batches.latents import denormalise
from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError
from leandit.precompute.pipeline import Report
from leandit.train.models.conditioning import Conditioner
from leandit.train.run.evaluation.decoding import Decoding
from leandit.train.run.evaluation.grids import own_subjects
from leandit.train.run.fit import model_spec
from leandit.train.run.state import Run
from leandit.train.sampling.guided import Solver, draw_latents
from leandit.train.sampling.snapshot import load_snapshot

FOX, SNOW = "a red fox", "a circle in snow"
pytestmark = pytest.mark.usefixtures("quick")


def with_captions(*texts: str) -> str:
    return f"captions.sample={[*texts]!r}".replace("'", '"')


def encode(source: Path, store: Path, *overrides: str) -> Report:
    return making.encode(caption_recipe(*overrides), source, store)


def embedding(store: LatentStore, text: str) -> bytes:
    (number,) = store.find_captions([text])
    return store.caption_embedding(number).tobytes()


def test_a_new_store_and_a_grown_one_hold_the_same_sample_captions_and_no_record_has_them(
    caption_folder: Path, caption_store: LatentStore, tmp_path: Path
) -> None:
    num_captions, grown = caption_store.num_captions, copy_of(caption_store.path, tmp_path / "grown")
    encode(caption_folder, tmp_path / "one", with_captions(FOX, f" {SNOW} ", FOX))
    encode(caption_folder, tmp_path / "two", with_captions(FOX, SNOW))
    assert store_digest(tmp_path / "one") == store_digest(tmp_path / "two")
    report = encode(caption_folder, grown, with_captions(FOX))
    assert (report.num_encoded, report.tokens.num_captions) == (0, 1)  # nothing but the new caption
    report = encode(caption_folder, grown, with_captions(SNOW))  # the first one stays
    assert (report.num_encoded, report.tokens.num_captions) == (0, 1)
    again = encode(caption_folder, grown, with_captions(SNOW))
    assert again.manifest == report.manifest
    fresh, store = LatentStore(tmp_path / "one"), LatentStore(grown)
    assert fresh.spec.sample_captions == store.spec.sample_captions == [FOX, SNOW]
    assert fresh.num_captions == store.num_captions == num_captions + 2
    assert fresh.spec.fingerprint == caption_store.spec.fingerprint
    for text in (FOX, SNOW):
        assert embedding(fresh, text) == embedding(store, text)
    assert max(max(ids) for ids in fresh.records["caption_ids"].to_pylist()) < fresh.num_captions
    used = {i for ids in fresh.records["caption_ids"].to_pylist() for i in ids}
    assert not used & {*fresh.find_captions([FOX, SNOW])}
    assert verify_store(grown).findings == []


@pytest.mark.usefixtures("tiny_models")
def test_a_run_draws_exactly_its_sample_captions_and_loads_no_encoder(
    caption_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoding, "start", lambda _: None)  # the latents stay
    encode(caption_folder, tmp_path / "store", with_captions(FOX))
    store = LatentStore(tmp_path / "store")
    drawn = [HOLDOUT, "run.sample_every=6", "run.sample_steps=2", "run.sample_count=5"]
    recipe = train_recipe("pixart-tiny", *drawn, f'run.sample_captions=["{FOX}", "a red circle"]')
    run_to(recipe, store, tmp_path / "run")
    path = tmp_path / "run/samples/step-6.safetensors"
    latents = load_file(path)["latents"]
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["grid"])["names"] == [FOX, "a red circle"]
    snapshot, ids = load_snapshot(tmp_path / "run", CPU), store.find_captions([FOX, "a red circle"])
    captions = Captions.of(
        [torch.tensor(np.array(store.caption_embedding(i), np.float32)) for i in ids if i is not None]
    )
    given, size = snapshot.conditioner(None, {"": captions}), latents.shape[-2:]
    wanted = draw_latents(snapshot, given, size=size, seed=0, solver=Solver(steps=2, guidance=4.0))
    torch.testing.assert_close(latents, denormalise(wanted, snapshot.latent))
    encode(caption_folder, tmp_path / "store", with_captions(FOX, SNOW))
    store = LatentStore(tmp_path / "store", revision=1)
    with pytest.raises(RecipeError, match=f"'{SNOW}': .* does not hold it.* reads an older revision"):
        own_subjects(
            Run.open(train_recipe("pixart-tiny", *drawn, f'run.sample_captions=["{SNOW}"]'), [store], CPU, print)
        )


@pytest.mark.usefixtures("tiny_models")
def test_a_caption_that_no_store_has_is_refused_before_anything_is_written(
    caption_store: LatentStore, tmp_path: Path
) -> None:
    own = ["run.sample_every=2", 'run.sample_captions=["a blue fox"]']
    with pytest.raises(RecipeError, match=r"sample_captions 'a blue fox'.*sample captions: none\. .*captions\.sample"):
        run_to(train_recipe("pixart-tiny", *own), caption_store, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError, match=r"model 'DiT-S/4' takes labels"):
        train_recipe("dit-s-4", *own)
    with pytest.raises(RecipeError, match=r"captions\.sample needs a text encoder"):
        label_recipe(with_captions(FOX))


@pytest.mark.usefixtures("tiny_models")
def test_an_image_without_a_caption_is_stored_and_trains_as_the_null_caption(
    caption_folder: Path, tmp_path: Path
) -> None:
    """``source.missing_caption = "null"``, which may be set and unset."""
    source, without_caption = copy_of(caption_folder, tmp_path / "source"), ("images/2.png", "images/5.png")
    rows = read_metadata(source)
    rows[2].pop("captions")
    rows[5]["captions"] = [" "]
    write_metadata(source, rows)
    for revision, missing in enumerate(("reject", "null", "reject", "null"), 1):
        making.encode(caption_recipe(f"source.missing_caption={missing}"), source, tmp_path / "store", drop_gone=True)
        store = LatentStore(tmp_path / "store")
        assert store.revision == revision
        reasons = {store.record(key).reason for key in without_caption}
        assert reasons == {"no_caption" if missing == "reject" else None}
    without = {store.record(key).index for key in without_caption}
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
    run_to(recipe, store, tmp_path / "run")
