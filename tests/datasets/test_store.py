"""The store: whole, it gives every record by every way; damaged, foreign or incomplete, it says so when opened."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from faults import flip, without_seal
from making import caption_recipe, cut, encode, make_caption_folder, set_json, tree_digest

from leandit.datasets.format.buckets import bucket_size
from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.store import LatentStore
from leandit.errors import (
    DamageError,
    FormatVersionError,
    LeanditError,
    StoreError,
    StoreIncomplete,
    StoreNotFound,
    StoreWarning,
    UnknownKey,
)

MOMENTS = "buckets/64x64/moments/c/0/0/0/0"
OWN = "revisions/000001/"
MANIFEST = OWN + "manifest.json"


def uncommit(path: Path) -> None:
    (path / OWN / "commits/buckets/64x64/000000.json").unlink()


Spoil = Callable[[Path], Any]
SAME_COMMAND = "same precompute command again"
REPAIR = "--repair"
SPOILED: list[tuple[str, Spoil, type[LeanditError], list[str]]] = [
    ("missing folder", shutil.rmtree, StoreNotFound, ["no such folder", "leandit precompute"]),
    ("empty folder", lambda p: shutil.rmtree(p) or p.mkdir(), StoreError, ["no 'zarr.json'", "not a leandit store"]),
    ("newer version", set_json(MANIFEST, format_version=2), FormatVersionError, ["version 2", "reads 1"]),
    ("no JSON", lambda p: cut(p / MANIFEST, 2), DamageError, [MANIFEST, "JSON", REPAIR]),
    ("other JSON", lambda p: (p / MANIFEST).write_text("[]"), DamageError, [MANIFEST, "not valid"]),
    ("spoiled spec", set_json(MANIFEST, spec={"latent": {}}), DamageError, [MANIFEST, "not valid", "spec."]),
    ("lost manifest", lambda p: (p / MANIFEST).unlink(), DamageError, [MANIFEST, "is missing", REPAIR, "second copy"]),
    ("missing shard", lambda p: (p / MOMENTS).unlink(), DamageError, [MOMENTS, "is missing", REPAIR]),
    ("cut shard", lambda p: cut(p / MOMENTS), DamageError, [MOMENTS, "bytes, the manifest says", REPAIR]),
    ("edited manifest", set_json(MANIFEST, num_stored=4), DamageError, [MANIFEST, "root hash", REPAIR]),
]


UNFINISHED: list[tuple[str, Spoil, type[LeanditError], list[str]]] = [
    ("incomplete", uncommit, StoreIncomplete, ["not complete", "1 of 5 shards", SAME_COMMAND]),
    ("not sealed", lambda _: None, StoreIncomplete, ["all shards exist, but the store is not sealed", SAME_COMMAND]),
    ("no plan", lambda p: (p / OWN / "plan/plan.json").unlink(), StoreIncomplete, ["plan is not finished"]),
    ("cut plan", lambda p: cut(p / OWN / "plan/records.parquet"), DamageError, ["missing or damaged", SAME_COMMAND]),
    ("edited plan", lambda p: flip(p / OWN / "plan/plan.json", 800), DamageError, ["plan"]),
]


CASES = [pytest.param("copied", *case, id=name) for name, *case in SPOILED]
CASES += [pytest.param("unfinished", *case, id=name) for name, *case in UNFINISHED]


@pytest.mark.parametrize(("which", "spoil", "error", "words"), CASES)
def test_a_store_that_is_not_whole_or_finished_is_refused_when_opened(
    which: str, spoil: Spoil, error: type[LeanditError], words: list[str], request: pytest.FixtureRequest
) -> None:
    spoil(path := request.getfixturevalue(which))
    with pytest.raises(LeanditError) as caught:
        LatentStore(path)
    assert type(caught.value) is error
    assert [word for word in [str(path), *words] if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_a_file_that_vanishes_before_its_first_read_is_damage_that_names_it(copied: Path) -> None:
    def read_all(store: LatentStore) -> None:
        for bucket in store.buckets:
            store.latents(bucket).read(0, 1)
        store.caption(0)
        _ = store.null_caption, store.records, store.captions

    read_all(LatentStore(copied))
    shards = [layout.shard_path(0) for layout in LatentStore(copied).layouts.values()]
    for name in [f"{OWN}records.parquet", f"{OWN}captions.parquet", *shards]:
        store = LatentStore(copied)
        (copied / name).rename(copied / "away")
        with pytest.raises(DamageError) as caught:
            read_all(store)
        assert [word for word in (str(copied), name, "is missing", REPAIR) if word not in str(caught.value)] == []
        (copied / "away").rename(copied / name)


def test_an_edited_table_is_refused_when_read(copied: Path) -> None:
    for name in ("records", "captions"):
        flip(copied / OWN / f"{name}.parquet", 8000)
        store = LatentStore(copied)  # its size is right
        with pytest.raises(DamageError, match=rf"'{OWN}{name}\.parquet' differs from the manifest.*{REPAIR}"):
            getattr(store, name)


def test_an_incomplete_store_lists_only_what_is_committed(caption_store: LatentStore, unfinished: Path) -> None:
    uncommit(unfinished)
    store = LatentStore(unfinished, allow_incomplete=True)
    assert (store.complete, store.root_hash) == (False, None)
    assert store.buckets == {"48x80": 5, "64x64": 0, "80x48": 4}
    assert len(store.index("64x64").rows) == 0
    whole = caption_store.records.to_pylist()
    for found, wanted in zip(store.records.to_pylist(), whole, strict=True):
        missing = wanted["bucket"] == "64x64"
        assert found == (
            wanted | {"status": "planned", "checksum": None, "source_checksum": None} if missing else wanted
        )
    assert store.captions.equals(caption_store.captions)


def test_the_sizes_of_a_batch_s_images_and_crops_are_found_by_its_records(caption_store: LatentStore) -> None:
    names = ("height_px", "width_px", "resized_height_px", "resized_width_px", "crop_top_px", "crop_left_px")
    assert caption_store.sizes.shape == (14, 6)
    assert caption_store.sizes.dtype == np.int32
    for bucket in caption_store.buckets:
        height_px, width_px = bucket_size(bucket)
        records = caption_store.index(bucket).records
        sizes = caption_store.sizes[records]
        table = caption_store.records.take(pa.array(records)).to_pylist()
        assert sizes.tolist() == [[row[name] for name in names] for row in table]
        # PixArt's crop: one side fits, half of what stands over is cut off at the other's start.
        assert ((sizes[:, 2] == height_px) | (sizes[:, 3] == width_px)).all()
        np.testing.assert_array_equal(sizes[:, 4], np.round((sizes[:, 2] - height_px) / 2))
        np.testing.assert_array_equal(sizes[:, 5], np.round((sizes[:, 3] - width_px) / 2))


def test_an_unknown_key_names_those_that_contain_it(caption_store: LatentStore) -> None:
    with pytest.raises(StoreError, match=r"'7\.png'.*images/7\.png") as caught:
        caption_store.record("7.png")
    assert "images/8.png" not in str(caught.value)
    with pytest.raises(StoreError, match="'nothing-like-it'") as caught:
        caption_store.record("nothing-like-it")
    assert "contain" not in str(caught.value)
    assert isinstance(caught.value, KeyError)
    with pytest.raises(UnknownKey, match=r"no record has the key 'image/4.png'\. The nearest keys: images/4.png, "):
        caption_store.record("image/4.png")


def test_an_unknown_bucket_names_those_that_are_there(caption_store: LatentStore) -> None:
    for read in (caption_store.latents, caption_store.index):
        with pytest.raises(StoreError, match=r"^store .*32x32.*48x80, 64x64, 80x48") as caught:
            read("32x32")
        assert isinstance(caught.value, KeyError)  # what one who knows mappings catches
    with pytest.raises(StoreError, match=r"no flipped latents.*vae\.flip"):
        caption_store.latents("64x64", flipped=True)


def test_captions_are_found_by_the_number_of_their_record_and_by_their_exact_text(caption_store: LatentStore) -> None:
    texts = caption_store.captions["text"].to_pylist()
    assert caption_store.find_captions(texts) == list(range(len(texts)))
    assert caption_store.find_captions(["A red square", "", texts[3]]) == [None, None, 3]
    for record in map(caption_store.record_at, range(caption_store.records.num_rows)):
        for which in range(len(record.caption_ids)):
            wanted = caption_store.caption(record, which)
            np.testing.assert_array_equal(caption_store.caption(record.index, which), wanted)
            np.testing.assert_array_equal(caption_store.caption(np.int64(record.index), which), wanted)  # of a batch
    last = caption_store.records.num_rows - 1
    for index, which in ((last + 1, 0), (-1, 0), (last, 99), (last, -1)):
        with pytest.raises(StoreError, match=r"record -?\d+ out of range: it has|caption -?\d+ of record") as caught:
            caption_store.caption(index, which)
        assert isinstance(caught.value, IndexError)
    with pytest.raises(StoreError, match="it has") as caught:
        caption_store.caption_embedding(10**6)
    assert isinstance(caught.value, IndexError)


def test_planned_is_stored_and_rejected_each_exactly_once(tmp_path: Path) -> None:
    source = make_caption_folder(tmp_path / "source", count=7)
    (source / "images/2.png").write_bytes(b"no image")
    content = (source / "images/3.png").read_bytes()
    (source / "images/3.png").write_bytes(content[: len(content) // 2])  # its header is whole: found when decoded
    (source / "images/5.png").unlink()
    manifest = encode(caption_recipe(), source, tmp_path / "store").manifest
    store = LatentStore(tmp_path / "store")
    assert (manifest.num_planned, manifest.num_stored, manifest.num_rejected) == (7, 4, 3)
    rows = store.records.to_pylist()
    assert [row["key"] for row in rows] == [f"images/{i}.png" for i in range(7)]
    assert [row["status"] == "rejected" for row in rows] == [i in (2, 3, 5) for i in range(7)]
    assert [rows[i]["stage"] for i in (2, 3, 5)] == ["scan", "decode", "scan"]
    assert all((row["reason"] is None) == (row["checksum"] is not None) for row in rows)
    assert sum(store.buckets.values()) == 4
    assert store.sizes[2].tolist() == [0] * 6  # nobody has seen it
    assert np.isnan(store.latents("64x64")[rows[3]["row"]]).all()  # the place of what failed after the plan
    loaded = [int(i) for batch in make_loader(store, global_batch=2) for i in batch.records]
    assert sorted(loaded) == [0, 1, 4, 6]


def test_a_store_can_be_moved_and_outlives_its_source(tmp_path: Path) -> None:
    source = make_caption_folder(tmp_path / "source", count=4)
    first, second = tmp_path / "first", tmp_path / "other/place"
    encode(caption_recipe(), source, first)
    wanted = list(make_loader(LatentStore(first), global_batch=2))
    digest = tree_digest(first)
    assert not [name for name, content in digest.items() if str(tmp_path).encode() in content]
    shutil.rmtree(source)
    second.parent.mkdir()
    first.rename(second)
    store = LatentStore(str(second))  # a plain text is a path, too
    assert store.record("images/3.png").bucket == "64x64"
    for found, batch in zip(make_loader(store, global_batch=2), wanted, strict=True):
        np.testing.assert_array_equal(found.latents, batch.latents)
        assert found.captions is not None
        assert batch.captions is not None
        np.testing.assert_array_equal(found.captions, batch.captions)
    assert tree_digest(second) == digest  # reading writes nothing


def test_a_newer_revision_that_is_not_finished_is_warned_of(tmp_path: Path) -> None:
    source, path = make_caption_folder(tmp_path / "source", count=4), tmp_path / "store"
    encode(caption_recipe(), source, path)
    shutil.rmtree(source)
    make_caption_folder(source, count=6)
    without_seal(lambda: encode(caption_recipe(), source, path))
    with pytest.warns(StoreWarning, match=r"revision 1 is opened\. Revision 2 was started but not finished"):
        assert LatentStore(path).unfinished_revision == 2
    with pytest.raises(StoreError, match=r"no complete revision 2\. Available: 1\. Revision 2 was started"):
        LatentStore(path, revision=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LatentStore(path, revision=1).unfinished_revision == 2
        shutil.copytree(path, tmp_path / "copy")
        encode(caption_recipe(), source, path)
        assert LatentStore(path).revision == 2
    shutil.rmtree(tmp_path / "copy/revisions/000002/plan")
    assert LatentStore(tmp_path / "copy").unfinished_revision is None  # only stray files are left
    assert {finding.cause for finding in verify_store(tmp_path / "copy").findings} == {"stray"}


def test_the_class_names_come_in_order_of_their_index(label_store: LatentStore, caption_store: LatentStore) -> None:
    assert label_store.spec.classes == ["n000", "n001", "n002"]
    assert (label_store.num_classes, caption_store.num_classes) == (3, 0)
    assert label_store.record("n001/3.png").label == 1
