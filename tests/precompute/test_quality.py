"""The quality of narrowed captions is measured where massive activations hide it, and acted on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from making import CPU, add_image, caption_recipe, encode, make_caption_folder, no_progress, smooth_image
from stores import copy_of

from leandit import LatentStore
from leandit.datasets.maintenance.verify import verify_store
from leandit.errors import EncoderError, FingerprintMismatch, RecipeError
from leandit.precompute.config import load
from leandit.precompute.encoders.text.encoder import CaptionEncoder, EncodedCaptions
from leandit.precompute.pipeline import precompute
from leandit.tools.export.compact import compact
from leandit.tools.inspection.store_facts import StoreFacts

INT8 = "store.text_dtype=int8"
REJECT = "store.on_low_quality=reject"
FLOAT16 = "store.on_low_quality=float16"
MASSIVE = "triangle"  # four of the twelve records of the folder have it in both captions, of which three are distinct


@pytest.fixture(autouse=True)
def _massive_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last number of each token of some captions is 300 times as large as the others, which int8 then loses."""
    forward = CaptionEncoder.encode

    def encode(self: CaptionEncoder, captions: Sequence[str], *, must_be_finite: bool = True) -> EncodedCaptions:
        encoded = forward(self, captions, must_be_finite=must_be_finite)
        assert encoded.tokens is not None
        for tokens, caption in zip(encoded.tokens, captions, strict=True):
            if MASSIVE in caption:
                tokens[:, -1] = 300 * np.abs(tokens[:, :-1]).max()
        return encoded

    monkeypatch.setattr(CaptionEncoder, "encode", encode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_caption_folder(tmp_path_factory.mktemp("source") / "images", count=12)


@pytest.fixture(scope="module")
def rejected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes the store whose massive captions are rejected, once."""
    root = tmp_path_factory.mktemp("rejected") / "store"

    def make() -> Path:
        if not root.exists():
            encode(caption_recipe(INT8, REJECT), folder, root)
        return root

    return make


def test_a_store_of_low_quality_says_so_before_and_while_it_is_written(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notes = list[str]()
    with caplog.at_level(logging.WARNING):
        report = precompute(
            caption_recipe(INT8),
            source_path=folder,
            store_path=tmp_path / "store",
            device=CPU,
            progress=no_progress,
            say=notes.append,
        )
    store = LatentStore(tmp_path / "store")
    table = store.captions.to_pylist()
    low = [row for row in table if row["min_cosine"] < 0.99]
    assert {MASSIVE in row["text"] for row in low} == {True}
    assert len(low) == report.num_low_quality == sum(MASSIVE in row["text"] for row in table) == 3
    assert len(store) == 12  # they are stored
    assert [note for note in notes if note.startswith("warning: quality: captions: below store.min_text_cosine = 0.99")]
    (logged,) = [record.getMessage() for record in caplog.records if "store.min_text_cosine" in record.getMessage()]
    assert MASSIVE in logged
    (layer,) = StoreFacts(store).quality
    width = store.spec.text_encoders[0].spec.width
    assert (layer["group"], layer["layer"]) == ("captions", 0)
    assert layer["min_cosine"] == pytest.approx(min(row["min_cosine"] for row in table), abs=1e-6)
    assert layer["num_tokens"] == sum(row["num_tokens"] for row in table)  # all are in the sample
    assert layer["median_cosine"] > 0.999
    assert layer["worst_channel"] != width - 1  # the massive one loses nothing
    assert layer["max_channel_error"] > 0.3 > 0.01 > 0
    assert StoreFacts(store).caption_quality(store.spec.text_encoders[0])["num_low_quality"] == 3


def test_the_bound_is_a_setting(folder: Path, tmp_path: Path) -> None:
    report = encode(caption_recipe(INT8, "store.min_text_cosine=0"), folder, tmp_path / "store")
    assert report.num_low_quality == 0


def test_rejected_captions_are_named_with_their_cosine_and_so_are_their_records(
    rejected: Callable[[], Path], folder: Path, tmp_path: Path
) -> None:
    root = rejected()
    store = LatentStore(root)
    assert (len(store), store.manifest and store.manifest.num_rejected) == (8, 4)
    for record in store.records.to_pylist():
        if record["status"] == "rejected":
            assert (record["stage"], record["reason"]) == ("encode", "low_quality")
            assert MASSIVE in record["detail"]
    for caption in store.captions.to_pylist():
        assert (caption["checksum"] is None) == (caption["min_cosine"] < 0.99) == (MASSIVE in caption["text"])
    assert verify_store(root).findings == []
    compact(root, tmp_path / "compacted", progress=no_progress)
    compacted = LatentStore(tmp_path / "compacted").records.to_pylist()
    names = ("key", "status", "reason", "detail")
    assert [[row[name] for name in names] for row in compacted] == [
        [row[name] for name in names] for row in store.records.to_pylist()
    ]


def test_a_grown_store_rejects_further_records_of_a_rejected_caption(
    rejected: Callable[[], Path], folder: Path, tmp_path: Path
) -> None:
    root = copy_of(rejected(), tmp_path / "store")
    images = copy_of(folder, tmp_path / "images")
    add_image(images, "images/new.png", smooth_image(99, 64, 64), captions=["a red triangle"])
    add_image(images, "images/other.png", smooth_image(98, 64, 64), captions=["a green triangle"])
    encode(caption_recipe(INT8, REJECT), images, root)
    store = LatentStore(root)
    assert store.revision == 2
    assert store.record("images/new.png").reason == store.record("images/other.png").reason == "low_quality"
    assert verify_store(root).findings == []


def test_an_encoder_whose_sample_is_of_low_quality_is_stored_as_float16_for_good(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    recipe = caption_recipe(INT8, FLOAT16, "store.shard_mib=1")
    encode(recipe, folder, root)
    store = LatentStore(root)
    assert store.spec.text
    assert store.spec.text.dtype == "float16"
    assert store.text().arrays[0].dtype == np.float16
    assert min(store.captions["min_cosine"].to_pylist()) > 0.999
    assert StoreFacts(store).quality == []
    assert encode(recipe, folder, root).num_encoded == 0
    images = copy_of(folder, tmp_path / "images")
    add_image(images, "images/new.png", smooth_image(99, 64, 64), captions=["a red circle in rain"])
    encode(recipe, images, root)
    assert (LatentStore(root).revision, len(LatentStore(root))) == (2, 13)
    with pytest.raises(FingerprintMismatch, match=r"text\.dtype is 'float16' in the store, 'int8' now"):
        encode(caption_recipe(INT8), images, root)


def test_an_encoder_whose_sample_is_good_stays_in_int8(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "MASSIVE", "a word of no caption")
    encode(caption_recipe(INT8, FLOAT16), folder, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert store.spec.text
    assert store.spec.text.dtype == "int8"
    assert len(StoreFacts(store).quality) == 1


def test_layers_beside_each_other_are_rounded_and_measured_apart(folder: Path, tmp_path: Path) -> None:
    encode(caption_recipe(INT8, "text.layers=[0,1]"), folder, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    first, second = StoreFacts(store).quality
    assert (first["layer"], second["layer"]) == (0, 1)
    assert first["min_cosine"] > 0.999  # the massive number is the last of the second layer
    assert second["min_cosine"] < 0.9
    assert store.text().arrays[1].row_shape[0] == 2


def test_a_null_caption_cannot_be_rejected(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CaptionEncoder.encode_null

    def encode_null(self: CaptionEncoder) -> EncodedCaptions:
        encoded = forward(self)
        assert encoded.tokens is not None
        encoded.tokens[..., -1] = 1e4
        return encoded

    monkeypatch.setattr(CaptionEncoder, "encode_null", encode_null)
    with pytest.raises(EncoderError, match=r"null caption.*store\.text_dtype"):
        encode(caption_recipe(INT8, REJECT), folder, tmp_path / "store")


@pytest.mark.parametrize(
    "settings",
    [
        ("store.text_dtype=float32", REJECT),
        ("store.text_dtype=float32", "store.min_text_cosine=0.5"),
        ("store.text_dtype=bfloat16", FLOAT16),
        (INT8, REJECT, "store.min_text_cosine=0"),
        ("text.kind=none", REJECT),
    ],
)
def test_settings_without_effect_are_refused(settings: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError, match=r"store\.\w+ has no effect"):
        load("demo", list(settings))
