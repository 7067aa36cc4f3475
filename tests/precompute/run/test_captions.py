"""Stores whose captions are bfloat16, int8 or float32: read, trained on, resumed, grown, compacted, repaired."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import caption_recipe, encode, loaded_encoders, no_progress
from stores import content, deep, make_grown, small_shards

from leandit.datasets.format.layout import CaptionLayout
from leandit.datasets.format.token_dtypes import ON_DISK, narrow, widen
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.store import LatentStore
from leandit.errors import EncoderError
from leandit.precompute.encoders.text.encoder import CaptionEncoder, EncodedCaptions
from leandit.tools.export.compact import compact

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
    return encoder.encode([text]).tokens[0]


def test_a_caption_is_what_the_encoder_gave_narrowed_once_and_its_quality_is_that(grown: tuple[Any, Path, str]) -> None:
    images, root, dtype = grown
    store = LatentStore(root)
    assert (store.spec.text and store.spec.text.dtype) == dtype
    assert store.text().arrays[0].dtype == ON_DISK[dtype]
    assert store.captions.num_rows >= 5
    for i, row in enumerate(store.captions.to_pylist()):
        wanted, found = encoded(row["text"]), store.caption_embedding(i)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, widen(narrow(wanted, dtype), dtype), atol=2e-2 if dtype == "int8" else 1e-2)
        if dtype == "float32":
            assert (row["min_cosine"], row["max_error"]) == (None, None)
            continue
        before, after = torch.from_numpy(wanted), torch.from_numpy(found)
        width = before.shape[1]
        smallest = before.abs().argsort(dim=1)[:, : width - math.ceil(width / 100)]  # all but the largest 1 %
        ordinary = [rows.gather(1, smallest).double() for rows in (before, after)]
        cosine = torch.nn.functional.cosine_similarity(*ordinary).min()
        assert row["min_cosine"] == pytest.approx(float(cosine), abs=1e-6)
        assert row["max_error"] == pytest.approx(float((before - after).abs().max()), rel=1e-3, abs=1e-6)
        assert 0 < row["max_error"] < 0.1
    again = deep(root, images.root)
    assert (again.findings, again.num_exact) == ([], len(store) + store.captions.num_rows)


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


def test_what_float16_cannot_hold_stops_the_run(
    caption_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CaptionEncoder.encode

    def huge(encoded: EncodedCaptions) -> EncodedCaptions:
        return EncodedCaptions(encoded.tokens * 1e6, None)

    monkeypatch.setattr(CaptionEncoder, "encode", lambda self, captions, **_: huge(real(self, captions)))
    with pytest.raises(EncoderError, match=r"text_dtype 'float16'.*cannot hold.*bfloat16"):
        encode(caption_recipe(), caption_folder, tmp_path / "store")
