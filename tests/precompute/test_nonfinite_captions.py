"""A caption whose embedding is not finite in float32 either: its records are rejected, the rest is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import break_word, flip
from making import add_image, caption_recipe, encode, make_caption_folder, no_progress, smooth_image, tree_digest
from stores import checked, content, copy_of, deep, small_shards

from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.store import LatentStore
from leandit.errors import LeanditError
from leandit.tools.export.compact import compact

BROKEN = "triangle"  # four of the fourteen records of the folder have it in both captions


@pytest.fixture(scope="module", autouse=True)
def _several_shards() -> Iterator[None]:
    with small_shards():
        yield


@pytest.fixture(scope="module")
def broken_t5(tmp_path_factory: pytest.TempPathFactory) -> str:
    return break_word(tmp_path_factory.mktemp("t5") / "t5", BROKEN)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_caption_folder(tmp_path_factory.mktemp("source") / "images")


@pytest.fixture(scope="module")
def rejected(source: Path, broken_t5: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("rejected") / "store"
    encode(caption_recipe(broken_t5), source, store)
    return store


def test_its_records_are_rejected_and_the_others_are_as_without_it(
    rejected: Path, source: Path, tmp_path: Path
) -> None:
    encode(caption_recipe(), source, tmp_path / "good")
    store, good = LatentStore(rejected), content(LatentStore(tmp_path / "good"))
    refused = {key: row for key, (row, *_) in content(store).items() if row["status"] == "rejected"}
    assert (len(refused), len(store), store.records.num_rows) == (4, 10, 14)
    for row in refused.values():
        assert (row["stage"], row["reason"], row["checksum"]) == ("encode", "nonfinite_caption", None)
        assert "T5EncoderModel in float32 produced NaN" in row["detail"]
        assert BROKEN in row["detail"]
    assert {key: found for key, found in content(store).items() if key not in refused} == {
        key: wanted for key, wanted in good.items() if key not in refused
    }
    ids = [i for i, text in enumerate(store.captions["text"].to_pylist()) if BROKEN in text]
    assert ids
    assert all(np.isnan(store.caption_embedding(i)).all() for i in ids)  # never zeros
    assert store.find_captions([f"a red {BROKEN}", "a red circle"])[0] is None
    for batch in make_loader(store, global_batch=2, seed=0):
        assert torch.isfinite(batch.latents).all()
        assert torch.isfinite(batch.captions).all()


def test_verify_deep_and_repair_know_it(rejected: Path, source: Path, tmp_path: Path) -> None:
    store, before = copy_of(rejected, tmp_path / "store"), tree_digest(rejected)
    assert deep(store, source).findings == []
    for path in [*store.glob("captions/embeddings/c/*/0"), *store.glob("buckets/*/moments/c/*/0/0/0")]:
        flip(path, path.stat().st_size // 3)
    assert len(verify_store(store).findings) > 2
    assert checked(store, source, repair=True)[0].findings == []
    assert tree_digest(store) == before


def test_later_records_with_the_caption_are_rejected_and_a_compact_store_is_whole(
    rejected: Path, source: Path, broken_t5: str, tmp_path: Path
) -> None:
    root, more = copy_of(rejected, tmp_path / "store"), copy_of(source, tmp_path / "more")
    for name, caption in (("new", f"a red {BROKEN}"), ("fine", "a red circle")):
        add_image(more, f"images/{name}.png", smooth_image(77), captions=[caption])
    encode(caption_recipe(broken_t5), more, root)
    compact(root, tmp_path / "compacted", progress=no_progress)
    for path in (root, tmp_path / "compacted"):
        store = LatentStore(path)
        assert store.record("images/new.png").reason == "nonfinite_caption"
        assert store.record("images/fine.png").status == "stored"
        assert (len(store), store.records.num_rows, verify_store(path).findings) == (11, 16, [])


def test_an_added_text_encoder_rejects_records_that_were_stored(source: Path, broken_t5: str, tmp_path: Path) -> None:
    encode(caption_recipe(), source, tmp_path / "store")
    second = [f"text.second.{one}" for one in ("kind=t5", broken_t5.removeprefix("text."), "max_tokens=16")]
    encode(caption_recipe(*second), source, tmp_path / "store")
    reasons = LatentStore(tmp_path / "store").records["reason"].to_pylist()
    assert (reasons.count("nonfinite_caption"), reasons.count(None)) == (4, 10)
    assert verify_store(tmp_path / "store").findings == []


@pytest.mark.parametrize(
    ("word", "setting", "message"),
    [
        (BROKEN, "source.max_rejects_in_a_row=1", "1 records or captions in a row are rejected.*nonfinite_caption"),
        ("red", "source.max_rejects_in_a_row=100", "of 14 records are rejected.*nonfinite_caption"),
        ("", "source.max_reject_share=1", "T5EncoderModel in float32 produced NaN or infinity for the caption ''"),
    ],
)
def test_too_many_of_them_and_the_null_caption_stop_the_run(
    word: str, setting: str, message: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(LeanditError, match=message) as caught:
        encode(caption_recipe(break_word(tmp_path / "t5", word), setting), source, tmp_path / "store")
    assert caught.value.exit_code == 3
    assert not list(tmp_path.glob("store/revisions/*/manifest.json"))
