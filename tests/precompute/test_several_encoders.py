"""Stores of several text encoders and image features: from the start, and added to a finished store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Failpoint
from making import (
    CPU,
    add_image,
    caption_recipe,
    encode,
    lasting_digest,
    make_caption_folder,
    smooth_image,
    tree_digest,
)
from safetensors.torch import load_file, save_file
from stores import content, small_shards
from tiny_models import make_dinov2, save_clip

from leandit.datasets.disk import files
from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.store import LatentStore
from leandit.errors import (
    EncoderError,
    FingerprintMismatch,
    RecipeError,
    ResourceError,
    StoreError,
    UnknownKey,
)
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.encoders.loading import load_encoders
from leandit.tools.export.compact import compact
from leandit.tools.inspection.store_facts import StoreFacts
from leandit.tools.inspection.store_text import render

BASE = ("vae.flip=true", "vae.batch_size=4", "store.text_dtype=int8")
SHORT = ("text.short.kind=t5", "text.short.model=shipped:t5", "text.short.max_tokens=5", "text.short.full_length=true")


@pytest.fixture(scope="module", autouse=True)
def _several_shards() -> Iterator[None]:
    """Plans are laid out in small shards wherever they are read, too."""
    with small_shards():
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_caption_folder(tmp_path_factory.mktemp("source") / "images")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dinov2(tmp_path_factory.mktemp("teacher") / "dinov2")


def feature(teacher: Path, *more: str) -> tuple[str, ...]:
    model = f"features.dino.model={teacher}"
    return (model, "features.dino.output=both", "features.dino.dtype=int8", *more)


@pytest.fixture(scope="module")
def recipe(teacher: Path) -> PrecomputeRecipe:
    return caption_recipe(*BASE, *SHORT, *feature(teacher))


@pytest.fixture(scope="module")
def stores(source: Path, recipe: PrecomputeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of the source: "plain", "whole" with more encoders from the start, "added" with them added."""
    root = tmp_path_factory.mktemp("stores")
    encode(caption_recipe(*BASE), source, root / "plain")
    encode(recipe, source, root / "whole")
    shutil.copytree(root / "plain", root / "added")
    assert encode(recipe, source, root / "added").num_encoded == 14
    return root


def test_rows_are_those_of_a_store_that_had_the_feature_from_the_start(stores: Path) -> None:
    before, after = lasting_digest(stores / "plain"), lasting_digest(stores / "added")
    assert {path: content for path, content in after.items() if path in before} == before
    # The arrays of text are those of a store that had the encoder from the start.
    assert tree_digest(stores / "added" / "captions") == tree_digest(stores / "whole" / "captions")
    whole, added = LatentStore(stores / "whole"), LatentStore(stores / "added")
    assert added.texts == ["", "short"]
    assert (added.features, LatentStore(stores / "added", revision=1).features) == (["dino"], [])
    assert content(added) == content(whole)
    for bucket in whole.buckets:
        rows, columns = added.spec.features[0].spec.grid(*map(int, bucket.split("x")))
        assert added.feature("dino", bucket).arrays("patches")[0].row_shape == (rows * columns, 8)
    assert added.captions["text"].equals(whole.captions["text"])
    assert added.records["min_cosine_dino"].to_numpy().min() > 0.99
    assert added.captions["num_tokens_short"].to_pylist() == whole.captions["num_tokens_short"].to_pylist()


def test_another_recipe_is_refused_and_says_what_to_do_with_what_only_one_of_them_has(
    stores: Path, recipe: PrecomputeRecipe, source: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree_digest(stores / "added")
    assert encode(recipe, source, stores / "added").num_encoded == 0
    with pytest.raises(FingerprintMismatch) as caught:
        encode(caption_recipe(*BASE), source, stores / "added")
    assert f"'leandit compact {stores / 'added'} --out NEW --without short --without dino'" in str(caught.value)
    lines = str(caught.value).splitlines()[1:]
    assert lines == [f"  [{name}] is in the store, not in the recipe" for name in ("text.short", "features.dino")]
    longer = caption_recipe(*BASE, *SHORT, "text.short.max_tokens=6", *feature(teacher))
    with pytest.raises(FingerprintMismatch, match=r"texts\.short\.spec\.max_tokens is 5"):
        encode(longer, source, stores / "added")
    assert tree_digest(stores / "added") == before
    # An addition that was cut off is finished by its own recipe.
    root = shutil.copytree(stores / "plain", tmp_path / "store")
    monkeypatch.setattr(files, "failpoint", Failpoint("eio", 30))
    with pytest.raises(ResourceError, match=r"Input/output error\. The disk"):
        encode(recipe, source, root)
    monkeypatch.setattr(files, "failpoint", None)
    more = caption_recipe(*BASE, *SHORT, *feature(teacher), f"features.more.model={teacher}")
    with pytest.raises(FingerprintMismatch, match=r"it adds the rest\. To give the addition up, remove its folder"):
        encode(more, source, root)
    encode(recipe, source, root)
    assert encode(more, source, root).manifest


def test_the_order_of_tables_in_a_recipe_makes_no_other_store(source: Path, teacher: Path, tmp_path: Path) -> None:
    folder, root = shutil.copytree(source, tmp_path / "images"), tmp_path / "store"
    token = (f"features.token.model={teacher}", "features.token.output=cls")
    long = ("text.kind=none", "text.long.kind=t5", "text.long.model=shipped:t5")
    encode(caption_recipe(*BASE, *long, *SHORT, *feature(teacher), *token), folder, root)
    add_image(folder, "images/new.png", smooth_image(77, 64, 64), text="a new image")
    turned = caption_recipe(*BASE, *SHORT, *token, *long, *feature(teacher))
    report = encode(turned, folder, root)
    assert (report.num_encoded, report.manifest and report.manifest.revision) == (1, 2)
    other = (f"features.other.model={teacher}", "features.other.output=cls")
    report = encode(caption_recipe(*BASE, *SHORT, *other, *token, *long, *feature(teacher)), folder, root)
    assert (report.manifest and report.manifest.revision) == 3
    store = LatentStore(root)
    assert (store.texts, store.features) == (["long", "short"], ["dino", "token", "other"])
    assert verify_store(root).findings == []
    compact(root, tmp_path / "compact", progress=lambda *_: None)
    assert verify_store(tmp_path / "compact").findings == []
    assert content(LatentStore(tmp_path / "compact")) == content(store)


def test_an_added_feature_is_left_out_by_a_compaction(stores: Path, tmp_path: Path) -> None:
    root = tmp_path / "compact"
    for _ in range(2):  # the second finds it made
        compact(stores / "added", root, progress=lambda *_: None, without=["dino", "short"])
    store, plain = LatentStore(root), LatentStore(stores / "plain")
    assert (store.texts, store.features) == ([""], [])
    assert store.spec.fingerprint == plain.spec.fingerprint
    assert verify_store(root).findings == []
    assert not any("dino" in path or "short" in path for path in tree_digest(root))
    for bucket in store.buckets:
        np.testing.assert_array_equal(store.latents(bucket)[:], plain.latents(bucket)[:])
    with pytest.raises(RecipeError, match=r"--without 'clip': expected a feature.*: short, dino"):
        compact(stores / "added", tmp_path / "other", progress=lambda *_: None, without=["clip"])
    with pytest.raises(StoreError, match="it already exists"):
        compact(stores / "added", root, progress=lambda *_: None, without=["dino"])


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        *(("text", f"{name}.kind=t5", "has the name of an array") for name in ("scales", "null_pooled")),
        *(("text", f"{name}.kind=t5", "is a folder of every store") for name in ("c", "buckets", "captions")),
        ("features", "companions.model=any", "is a folder of every store"),
        ("companions", "features.kind=mask", "is a folder of every store"),
    ],
)
def test_no_table_can_have_the_name_of_an_array_or_folder_beside_it(name: str, setting: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        caption_recipe(f"{name}.{setting}")


def test_an_error_of_a_text_encoder_says_which_table_it_is_about(source: Path, tmp_path: Path) -> None:
    save_clip(tmp_path / "clip", projected=True)
    folders = ("subfolder=text_encoder", "tokenizer_subfolder=tokenizer")
    settings = ("kind=clip", f"model={tmp_path / 'clip'}", *folders, "output=pooled")
    clip = [f"text.clip_l.{setting}" for setting in settings]
    with pytest.raises(EncoderError, match=r"^\[text\.clip_l\]: text\.max_tokens 300: .* reads at most 77 tokens"):
        load_encoders(caption_recipe(*clip), CPU)
    with pytest.raises(EncoderError, match=r"^\[text\.clip_l\]: text\.model .* there is no such folder"):
        load_encoders(caption_recipe(*clip, f"text.clip_l.model={tmp_path / 'none'}"), CPU)
    weights = tmp_path / "clip/text_encoder/model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor * float("nan") for name, tensor in tensors.items()}, weights, {"format": "pt"})
    with pytest.raises(EncoderError, match=r"^\[text\.clip_l\]: text\.model '.* produced NaN"):
        encode(caption_recipe(*clip, "text.clip_l.max_tokens=77"), source, tmp_path / "store")


def test_pooled_vectors_are_stored_beside_tokens_or_alone(source: Path, tmp_path: Path) -> None:
    save_clip(tmp_path / "clip", projected=True)
    places = (f"model={tmp_path / 'clip'}", "subfolder=text_encoder", "tokenizer_subfolder=tokenizer")
    recipe = caption_recipe(
        "text.kind=none",
        *(f"text.{name}.{key}" for name in ("both", "vector") for key in ("kind=clip", *places)),
        *("text.both.output=both", "text.vector.output=pooled"),
        *(f"text.{name}.max_tokens=16" for name in ("both", "vector")),
        *("text.both.full_length=true", "store.text_dtype=bfloat16"),
    )
    encode(recipe, source, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert store.texts == ["both", "vector"]
    assert verify_store(tmp_path / "store").findings == []
    both, pooled = store.text("both"), store.text("vector")
    assert len(both.pooled) == len(pooled.pooled) == store.captions.num_rows
    assert both.lengths.tolist() == [16] * store.captions.num_rows
    encoder = load_encoders(recipe, CPU).captions["both"]
    null, close = encoder.encode_null().row(0), partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-2)
    for caption, text in enumerate(store.captions["text"].to_pylist()):
        alone = encoder.encode([text]).row(0)
        close(both[caption], alone.tokens)
        close(both.pooled_vector(caption), alone.pooled)
        close(pooled.pooled_vector(caption), alone.pooled)
    close(both.null_pooled, null.pooled)
    close(both.null, null.tokens)
    batch = next(iter(make_loader(store, global_batch=4)))
    vectors, tokens = batch.texts["vector"].pooled, batch.texts["both"].padded
    assert not batch.texts["vector"].has_tokens
    assert (vectors.dtype, tuple(tokens.shape[:2])) == (torch.bfloat16, (len(batch), 16))
    with pytest.raises(StoreError, match="only pooled vectors"):
        _ = pooled[0]
    compact(tmp_path / "store", tmp_path / "compact", progress=lambda *_: None)
    assert verify_store(tmp_path / "compact").findings == []
    assert content(LatentStore(tmp_path / "compact")) == content(store)


def test_inspect_tells_of_each(stores: Path) -> None:
    store = LatentStore(stores / "added")
    facts = StoreFacts(store)
    summary, shown = facts.to_json(), render(facts)
    with pytest.raises(RecipeError, match=r"no feature .clip.\. Available: dino"):
        make_loader(store, global_batch=4, features=["clip"])
    with pytest.raises(UnknownKey, match="no feature 'clip'"):
        store.feature("clip", "64x64")
    with pytest.raises(UnknownKey, match="no text encoder 'long'"):
        store.text("long")
    assert summary["features"]["dino"]["spec"]["output"] == "both"
    assert summary["features"]["dino"]["bytes_per_record"] > 0
    assert summary["texts"]["short"]["caption_quality"]["min_cosine"] > 0.99
    assert {"feature dino", "captions short", "captions"} <= summary["bytes"].keys()
    assert "feature dino        4 x 4 patches and class token, 8 wide, stored as int8, 56 px for the model" in shown
    width = store.spec.texts[0].spec.width
    assert f"captions short      tokens, {width} wide, stored as int8, all 5 tokens" in shown
