"""Stores whose captions are bfloat16, int8 or float32: read, trained on, resumed, grown, compacted, repaired."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from making import caption_recipe, encode, loaded_encoders, no_progress
from stores import content, deep, make_grown, small_shards

from leandit.datasets.errors import EncoderError
from leandit.datasets.format.layout import CaptionLayout
from leandit.datasets.format.token_dtypes import ON_DISK, narrow, widen
from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.compact import compact
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.store import LatentStore
from leandit.precompute.encoders.text.encoder import CaptionEncoder, EncodedCaptions
from leandit.precompute.encoders.vae import ImageEncoder

pytestmark = pytest.mark.usefixtures("tiny_models")


@pytest.fixture(scope="module", autouse=True)
def _several_shards_of_captions() -> Iterator[None]:
    with small_shards(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(CaptionLayout, "_shard_rows", lambda _: (16, 8))
        yield


@pytest.fixture(scope="module", params=["bfloat16", "int8", pytest.param("float32", marks=pytest.mark.slow)])
def grown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, str]:
    """Three revisions."""
    return *make_grown(tmp_path_factory.mktemp("grown"), f"store.text_dtype={request.param}"), request.param


def encoded(text: str) -> np.ndarray:
    """What the encoder gives of a caption, float32, in a batch of its own."""
    recipe = caption_recipe()
    encoder = loaded_encoders(recipe.vae, recipe.text).captions[""]
    assert encoder is not None
    return encoder.encode([text]).tokens[0]


def test_a_caption_is_what_the_encoder_gave_narrowed_once(grown: tuple[Any, Path, str]) -> None:
    _, root, dtype = grown
    store = LatentStore(root)
    assert (store.spec.text and store.spec.text.dtype) == dtype
    assert store.tokens.arrays[0].dtype == ON_DISK[dtype]
    for i, row in enumerate(store.captions.to_pylist()):
        wanted = encoded(row["text"])
        found = store.caption_embedding(i)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, widen(narrow(wanted, dtype), dtype), atol=2e-2 if dtype == "int8" else 1e-2)


def test_the_quality_is_that_of_what_is_stored(grown: tuple[Any, Path, str]) -> None:
    _, root, dtype = grown
    store = LatentStore(root)
    assert store.captions.num_rows >= 5
    for i, row in enumerate(store.captions.to_pylist()):
        if dtype == "float32":
            assert (row["min_cosine"], row["max_error"]) == (None, None)
            continue
        before, after = torch.from_numpy(encoded(row["text"])), torch.from_numpy(store.caption_embedding(i))
        cosine = torch.nn.functional.cosine_similarity(before.double(), after.double()).min()
        assert row["min_cosine"] == pytest.approx(float(cosine), abs=1e-6)
        assert row["max_error"] == pytest.approx(float((before - after).abs().max()), rel=1e-3, abs=1e-6)
        assert 0 < row["max_error"] < 0.1


def test_zarr_opens_every_caption_array(grown: tuple[Any, Path, str]) -> None:
    _, root, dtype = grown
    store, group = LatentStore(root), zarr.open_group(root, mode="r")
    array: Any = group["captions/embeddings"]
    parts = [np.asarray(array[:])]
    assert dict(array.attrs) == ({"bits_of": "bfloat16"} if dtype == "bfloat16" else {})
    if dtype == "int8":
        scales: Any = group["captions/scales"]
        parts.append(np.asarray(scales[:]))
    for i, row in enumerate(store.captions.to_pylist()):
        start, stop = row["start"], row["start"] + row["num_tokens"]
        for ours, part in zip(store.tokens.stored_rows(i), parts, strict=True):
            np.testing.assert_array_equal(ours, part[start:stop])
    gaps = np.ones(len(parts[0]), bool)
    for start, length in zip(store.tokens.starts, store.tokens.lengths, strict=True):
        gaps[start : start + length] = False
    assert gaps.any()  # between two shards, and nobody's
    values = parts[-1] if dtype != "bfloat16" else (parts[0].astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(values[gaps]).all()


@pytest.mark.parametrize("text", ["padded", "packed"])
def test_a_batch_travels_as_stored_and_is_widened_where_it_arrives(grown: tuple[Any, Path, str], text: Any) -> None:
    _, root, dtype = grown
    store = LatentStore(root)
    for access in ("map", "pread"):
        opened = LatentStore(root, access=access)
        for batch in make_loader(opened, global_batch=4, text=text, prefetch=0):
            assert batch.text is not None
            assert batch.text.tokens is not None
            assert batch.captions is not None
            assert batch.caption_lengths is not None
            assert batch.text.tokens.dtype == getattr(torch, dtype)
            assert batch.captions.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
            assert (batch.text.scales is None) == (dtype != "int8")
            rows = batch.captions.float().numpy()
            if text == "packed":
                ends = batch.caption_lengths.cumsum(0).tolist()
                rows = [rows[end - n : end] for end, n in zip(ends, batch.caption_lengths.tolist(), strict=True)]
            for index, row, length in zip(batch.records, rows, batch.caption_lengths.tolist(), strict=True):
                record = store.record_at(int(index))
                own = [store.caption(record, which) for which in range(len(record.caption_ids))]
                assert any(np.array_equal(row[:length], one) for one in own)
                assert not np.any(row[length:])


def test_a_compacted_store_keeps_captions_and_quality(grown: tuple[Any, Path, str], tmp_path: Path) -> None:
    _, root, _ = grown
    before, opened = content(LatentStore(root)), LatentStore(root)
    null = opened.null_caption
    quality = {row["text"]: (row["min_cosine"], row["max_error"]) for row in opened.captions.to_pylist()}
    compact(root, tmp_path / "new", progress=no_progress)
    after = LatentStore(tmp_path / "new")
    assert content(after) == before
    np.testing.assert_array_equal(after.null_caption, null)
    assert {row["text"]: (row["min_cosine"], row["max_error"]) for row in after.captions.to_pylist()}.items() <= (
        quality.items()
    )
    assert verify_store(tmp_path / "new").findings == []


def test_a_deep_check_finds_all_captions_equal(grown: tuple[Any, Path, str]) -> None:
    images, root, _ = grown
    found = deep(root, images.root)
    assert found.findings == []
    assert found.num_captions == LatentStore(root).captions.num_rows
    assert found.num_exact == found.num_records + found.num_captions


def test_the_text_encoder_is_dropped_before_images_are_encoded(
    caption_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = caption_recipe()
    encoders, real, held = loaded_encoders(recipe.vae, recipe.text), ImageEncoder.encode, []
    encoders.captions[""].load()

    def watched(self: ImageEncoder, pixels: np.ndarray) -> np.ndarray:
        held.append(encoders.captions[""]._model is not None)
        return real(self, pixels)

    monkeypatch.setattr(ImageEncoder, "encode", watched)
    encode(recipe, caption_folder, tmp_path / "store")
    assert len(held) > 0
    assert not any(held)


def test_what_float16_cannot_hold_stops_the_run(
    caption_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CaptionEncoder.encode

    def huge(encoded: EncodedCaptions) -> EncodedCaptions:
        return EncodedCaptions(encoded.tokens * 1e6, None)

    monkeypatch.setattr(CaptionEncoder, "encode", lambda self, captions, **_: huge(real(self, captions)))
    with pytest.raises(EncoderError, match=r"text_dtype 'float16'.*cannot hold.*bfloat16"):
        encode(caption_recipe(), caption_folder, tmp_path / "store")
