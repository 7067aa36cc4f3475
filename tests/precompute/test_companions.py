"""Companion images: control images, edit sources and masks from other columns of the table."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from faults import flip
from making import (
    COMPANIONS,
    CPU,
    SIZES,
    caption_recipe,
    encode,
    gray_mask,
    lasting_digest,
    make_class_folder,
    make_companion_folder,
    read_metadata,
    smooth_image,
    tree_digest,
    write_metadata,
)
from pydantic import ValidationError
from stores import checked, content, deep, small_shards
from tiny_models import make_dinov2

from leandit.datasets.batches.gather import Gatherer
from leandit.datasets.batches.latents import normalise
from leandit.datasets.batches.reader import BatchReader
from leandit.datasets.format.buckets import bucket_size
from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.order.batch_plan import BatchPlan
from leandit.datasets.order.mixture import Mixture
from leandit.datasets.store import LatentStore
from leandit.errors import FingerprintMismatch, RecipeError, SourceError, UnknownKey
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.encoders.loading import load_encoders
from leandit.precompute.images.pixels import decode_image
from leandit.precompute.sources.source import list_source
from leandit.tools.export.compact import compact
from leandit.tools.inspection.store_facts import StoreFacts
from leandit.tools.inspection.store_text import render

BASE = ("vae.flip=true", "vae.batch_size=4", "text.kind=none", "source.max_reject_share=1")
COUNT = 8


@pytest.fixture(scope="module", autouse=True)
def _several_shards() -> Iterator[None]:
    """Plans are laid out in small shards wherever they are read, too."""
    with small_shards():
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_companion_folder(tmp_path_factory.mktemp("source") / "images", count=COUNT)


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A copy of the source that a test may change; times are kept."""
    return Path(shutil.copytree(source, tmp_path / "images"))


def with_companions(*more: str) -> PrecomputeRecipe:
    return caption_recipe(*BASE, *COMPANIONS, *more)


@pytest.fixture(scope="module")
def stores(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of the source: "plain" without companions, "whole" with them from the start, "added" with them added."""
    root = tmp_path_factory.mktemp("stores")
    encode(caption_recipe(*BASE), source, root / "plain")
    encode(with_companions(), source, root / "whole")
    shutil.copytree(root / "plain", root / "added")
    assert encode(with_companions(), source, root / "added").num_encoded == COUNT
    return root


@pytest.fixture
def whole(stores: Path, tmp_path: Path) -> Path:
    """A store with companions that a test may change."""
    return Path(shutil.copytree(stores / "whole", tmp_path / "store"))


def test_rows_are_those_of_the_crop_at_the_place_of_the_image(stores: Path, source: Path) -> None:
    store, encoder = LatentStore(stores / "whole"), load_encoders(caption_recipe(*BASE), CPU).image
    assert (len(store), store.companions, len(store.buckets)) == (COUNT, ["copy", "edit", "mask"], 3)
    for i in range(COUNT):
        record, size = store.record(f"images/{i}.png"), SIZES[i % 3]
        how = {"bucket": bucket_size(record.bucket), "crop": "bucket", "beside": size}
        edit, edit_size = decode_image((source / f"edits/{i}.png").read_bytes(), **how)
        mask, _ = decode_image((source / f"masks/{i}.png").read_bytes(), mask_px=store.spec.latent.downscale, **how)
        assert edit_size == (2 * size[0], 2 * size[1])
        for flipped in (False, True):
            rows = {n: store.companion(n, record.bucket, flipped=flipped)[record.row] for n in store.companions}
            np.testing.assert_array_equal(rows["copy"], store.latents(record.bucket, flipped=flipped)[record.row])
            np.testing.assert_array_equal(rows["mask"], mask[:, ::-1] if flipped else mask)
            wanted = encoder.encode((edit[:, ::-1] if flipped else edit)[None])[0]
            np.testing.assert_allclose(rows["edit"], wanted.astype(np.float16), rtol=2e-3, atol=2e-3)
    assert store.records["checksum_copy"].equals(store.records["checksum"])
    assert store.records["source_checksum_copy"].equals(store.records["source_checksum"])
    planned = pq.read_table(stores / "whole/revisions/000001/sources.parquet")
    assert planned["source_path_edit"].to_pylist() == [f"edits/{i}.png" for i in range(COUNT)]


def test_a_sample_is_stored_beside_the_mean_of_its_companion(source: Path, stores: Path, tmp_path: Path) -> None:
    encode(with_companions("vae.keep=sample", "vae.flip=false", "store.codec=blosc"), source, tmp_path / "store")
    store, moments = LatentStore(tmp_path / "store"), LatentStore(stores / "whole")
    for bucket in store.buckets:
        mean = moments.latents(bucket)[:][:, : store.spec.latent.channels]
        np.testing.assert_array_equal(store.companion("copy", bucket)[:], mean)
        assert not np.array_equal(store.latents(bucket)[:], mean)


def test_a_batch_has_the_mean_of_each_companion_as_the_model_sees_it(stores: Path) -> None:
    store = LatentStore(stores / "added")
    spec, seen, num_flipped = store.spec.latent, 0, 0
    for batch in make_loader(store, global_batch=2, device="cpu"):
        copy, edit, mask = (batch.companions[name] for name in ("copy", "edit", "mask"))
        assert (copy.dtype, edit.shape, mask.dtype) == (torch.float32, batch.latents.shape, torch.uint8)
        assert mask.shape == (len(batch), *batch.latents.shape[2:])
        torch.testing.assert_close(copy, normalise(batch.stored[:, : spec.channels].float(), spec), rtol=0, atol=0)
        for i, position in enumerate(batch.records.tolist()):
            row = store.record_at(position).row
            views = [store.companion("mask", batch.bucket, flipped=flipped)[row] for flipped in (False, True)]
            is_flipped = bool(np.array_equal(batch.stored[i].numpy(), store.latents(batch.bucket, flipped=True)[row]))
            np.testing.assert_array_equal(mask[i].numpy(), views[is_flipped])
            of_edit = torch.from_numpy(store.companion("edit", batch.bucket, flipped=is_flipped)[row][None].copy())
            torch.testing.assert_close(edit[i], normalise(of_edit[:, : spec.channels].float(), spec)[0])
            seen, num_flipped = seen + 1, num_flipped + is_flipped
    assert seen == len(store)
    assert 0 < num_flipped < seen
    only = next(iter(make_loader(store, global_batch=2, companions=["mask"])))
    assert list(only.companions) == ["mask"]
    assert next(iter(make_loader(store, global_batch=2, companions=()))).companions == {}
    with pytest.raises(RecipeError, match=r"no companion .depth.\. Available: copy, edit, mask"):
        make_loader(store, global_batch=2, companions=["depth"])
    with pytest.raises(UnknownKey, match=r"no companion 'depth'\. Available: copy, edit, mask"):
        store.companion("depth", "64x64")
    with pytest.raises(UnknownKey, match="32x32"):
        store.companion("mask", "32x32")


def test_what_is_added_is_what_the_store_would_have_had(stores: Path, source: Path) -> None:
    before, after = lasting_digest(stores / "plain"), lasting_digest(stores / "added")
    assert {path: content for path, content in after.items() if path in before} == before
    whole, added = LatentStore(stores / "whole"), LatentStore(stores / "added")
    assert LatentStore(stores / "added", revision=1).companions == []
    assert content(added) == content(whole)
    assert encode(with_companions(), source, stores / "added").num_encoded == 0


REJECTS = {
    0: ("scan", "missing_file", "companion 'edit': there is no 'edits/gone.png'"),
    1: ("scan", "bad_metadata", "companion 'mask': the row names no image; expected its path as text in UTF-8"),
    2: ("scan", "bad_metadata", "companion 'copy': the row names no image; expected its path as text in UTF-8"),
    3: ("decode", "not_an_image", "companion 'copy', 'copies/3.png': no known image format"),
    4: (
        "decode",
        "wrong_size",
        "companion 'mask', 'masks/4.png': 45x45 px, the record's image has 60x100 px; expected the same aspect ratio",
    ),
    5: ("scan", "bad_metadata", "companion 'edit': file_name leaves the source folder"),
}


def test_a_record_whose_companion_cannot_be_had_is_rejected_with_the_reason(folder: Path, tmp_path: Path) -> None:
    rows = read_metadata(folder)
    rows[0]["source image"] = "edits/gone.png"
    del rows[1]["mask"]
    rows[2]["copy"] = None
    (folder / "copies/3.png").write_text("no image")
    gray_mask(0, 45, 45).save(folder / "masks/4.png")
    rows[5]["source image"] = "../outside.png"
    write_metadata(folder, rows)
    encode(with_companions(), folder, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    found = {i: store.record(f"images/{i}.png") for i in range(COUNT)}
    assert {i: (one.stage, one.reason, one.detail) for i, one in found.items() if one.status == "rejected"} == REJECTS
    assert verify_store(tmp_path / "store").findings == []
    assert encode(with_companions(), folder, tmp_path / "store").num_encoded == 0
    shutil.copyfile(folder / "images/3.png", folder / "copies/3.png")
    assert encode(with_companions(), folder, tmp_path / "store").num_encoded == 1
    assert LatentStore(tmp_path / "store").record("images/3.png").status == "stored"


def test_a_changed_companion_makes_its_record_stale_and_one_that_is_gone_keeps_or_drops_it(
    folder: Path, whole: Path
) -> None:
    for path in (folder / "masks/5.png", folder / "edits/2.png"):  # other times, same bytes
        os.utime(path, ns=(1, 1))
    assert encode(with_companions(), folder, whole).num_encoded == 0
    gray_mask(99, 48, 48).save(folder / "masks/3.png")
    smooth_image(98, 120, 200).save(folder / "edits/4.png")
    (folder / "edits/6.png").unlink()
    assert {(one.cause, *one.records) for one in deep(whole, folder, num_records=COUNT).findings} == {
        ("source_changed", f"images/{i}.png") for i in (3, 4, 6)
    }
    report = encode(with_companions(), folder, whole)
    assert (report.num_encoded, report.changes and report.changes.num_changed) == (2, 2)
    store = LatentStore(whole)
    assert [store.record(f"images/{i}.png").revision for i in range(COUNT)] == [1, 1, 1, 2, 2, 1, 1, 1]
    assert store.record("images/6.png").status == "stored"
    encode(with_companions(), folder, whole, drop_gone=True)
    encode(with_companions(), folder, whole.parent / "fresh")
    store, fresh = LatentStore(whole), LatentStore(whole.parent / "fresh")
    assert store.record("images/6.png").reason == "missing_file"
    for key, name in itertools.product(("images/3.png", "images/4.png"), store.companions):
        record, other = store.record(key), fresh.record(key)
        ours, theirs = store.companion(name, record.bucket)[record.row], fresh.companion(name, record.bucket)[other.row]
        np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=2e-3, atol=2e-3)
    assert verify_store(whole).findings == []


def test_a_companion_that_changes_between_plan_and_encoding_is_a_reject(folder: Path, tmp_path: Path) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "scan":
            (folder / "masks/1.png").write_bytes((folder / "masks/1.png").read_bytes() + b"more")

    encode(with_companions(), folder, tmp_path / "store", progress=progress)
    record = LatentStore(tmp_path / "store").record("images/1.png")
    assert (record.stage, record.reason) == ("decode", "source_changed")
    assert (record.detail or "").startswith("companion 'mask', 'masks/1.png': 1.png has")


def test_what_cannot_be_added_is_rejected_without_a_trace(folder: Path, tmp_path: Path) -> None:
    root, allowed = tmp_path / "store", "source.max_reject_share=1"
    dino = [f"features.dino.model={make_dinov2(tmp_path / 'dinov2')}", "features.dino.output=cls"]
    encode(caption_recipe(*dino, allowed), folder, root)
    (folder / "edits/3.png").unlink()
    (folder / "masks/4.png").write_bytes(b"no image")
    before, recipe = tree_digest(root), caption_recipe(*dino, allowed, *COMPANIONS)
    with pytest.raises(SourceError, match=r"it lacks 1 record of store"):
        encode(recipe, folder, root)
    assert tree_digest(root) == before
    encode(recipe, folder, root, drop_gone=True)
    rows = {row["key"]: row for row in LatentStore(root).records.to_pylist()}
    for i, *why in ((3, "scan", "missing_file"), (4, "decode", "not_an_image")):
        row = rows[f"images/{i}.png"]
        assert [row["status"], row["stage"], row["reason"]] == ["rejected", *why]
        assert {value for name, value in row.items() if "checksum" in name or "_dino" in name} == {None}
    assert (len(LatentStore(root)), verify_store(root).findings) == (COUNT - 2, [])


def test_stores_whose_images_differ_are_not_read_together(stores: Path, source: Path, tmp_path: Path) -> None:
    recipe = caption_recipe(*BASE, "companions.copy.kind=image", "companions.mask.kind=image")
    encode(recipe, source, tmp_path / "store")
    pair = [LatentStore(stores / "whole"), LatentStore(tmp_path / "store")]
    order = Mixture([(BatchPlan(store.buckets, 2, seed=0), 1) for store in pair], seed=0)
    with pytest.raises(RecipeError, match=r"'mask' is of kind 'image', of 'mask' in"):
        Gatherer(pair, companions=["copy", "mask"])
    with pytest.raises(RecipeError, match=r"no companion 'edit'\. Available: copy, mask"):
        BatchReader(pair, order)
    reader = BatchReader(pair, order, gatherer=Gatherer(pair, companions=["copy"]))
    assert list(reader[0].companions) == ["copy"]


def test_a_store_grows_and_is_compacted_with_and_without_a_companion(
    stores: Path, folder: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(stores / "added", tmp_path / "store"))
    rows = read_metadata(folder)
    for kind, image in (
        ("images", smooth_image(77, 64, 64)),
        ("masks", gray_mask(78, 64, 64)),
        ("edits", smooth_image(79, 96, 96)),
    ):
        image.save(folder / f"{kind}/new.png")
    new = {"file_name": "images/new.png", "copy": "images/new.png", "source image": "edits/new.png"}
    write_metadata(folder, [*rows, new | {"mask": "masks/new.png"}])
    assert encode(with_companions(), folder, root).num_encoded == 1
    store = LatentStore(root)
    assert store.revision == 3
    assert verify_store(root).findings == []
    compact(root, tmp_path / "compact", progress=lambda *_: None)
    compact(root, tmp_path / "less", progress=lambda *_: None, without=["copy", "edit"])
    copied, less = LatentStore(tmp_path / "compact"), LatentStore(tmp_path / "less")
    assert (copied.companions, less.companions) == (store.companions, ["mask"])
    assert content(copied) == content(store)
    for bucket in store.buckets:
        rows = store.index(bucket).rows
        np.testing.assert_array_equal(store.companion("mask", bucket).take(rows), less.companion("mask", bucket)[:])
    for path, recipe in (("compact", with_companions()), ("less", caption_recipe(*BASE, "companions.mask.kind=mask"))):
        assert verify_store(tmp_path / path).findings == []
        assert encode(recipe, folder, tmp_path / path).num_encoded == 0
    with pytest.raises(RecipeError, match=r"--without 'depth': expected .*a companion .*: copy, edit, mask"):
        compact(root, tmp_path / "other", progress=lambda *_: None, without=["depth"])


def test_flipped_bits_are_found_and_mended(stores: Path, source: Path, tmp_path: Path) -> None:
    root, rng = Path(shutil.copytree(stores / "added", tmp_path / "store")), random.Random(3)
    files = tree_digest(root)
    assert deep(root, source, num_records=COUNT).findings == []
    shards = rng.sample(sorted(path for path in files if "/companions/" in path and "/c/" in path), 6)
    for path in shards:
        flip(root / path, rng.randrange(8 * len(files[path])))
    assert {finding.path for finding in verify_store(root).findings if finding.records} == {*shards}
    assert checked(root, source, repair=True)[0].findings == []
    assert tree_digest(root) == files


def test_images_in_the_rows_of_parquet_have_their_companions_there(source: Path, stores: Path, tmp_path: Path) -> None:
    columns = {"image": "images", "copy": "copies", "source image": "edits", "mask": "masks"}
    values = {
        name: [{"bytes": (source / f"{folder}/{i}.png").read_bytes(), "path": None} for i in range(COUNT)]
        for name, folder in columns.items()
    }
    values["mask"][2]["bytes"] = None
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table(values), tmp_path / "rows/train.parquet", row_group_size=3)
    encode(with_companions("vae.batch_size=1"), tmp_path / "rows", tmp_path / "store")
    store, other = LatentStore(tmp_path / "store"), LatentStore(stores / "whole")
    assert len(store) == COUNT - 1
    reject = store.record("train/2")
    assert (reject.stage, reject.reason) == ("decode", "unreadable")
    assert reject.detail == "companion 'mask', 'train.parquet': train.parquet, row 2 has no bytes of an image"
    for i in (0, 1, 3, 4):
        record, row = store.record(f"train/{i}"), other.record(f"images/{i}.png").row
        mask = other.companion("mask", record.bucket)[row]
        np.testing.assert_array_equal(store.companion("mask", record.bucket)[record.row], mask)
    assert encode(with_companions("vae.batch_size=1"), tmp_path / "rows", tmp_path / "store").num_encoded == 0


def test_a_source_without_such_a_column_is_refused(source: Path, tmp_path: Path) -> None:
    columns = {"depth": "depth"}
    with pytest.raises(SourceError, match=r"no column 'depth'\. Its columns: .*'mask'"):
        list_source(source, companions=columns)
    with pytest.raises(SourceError, match=r"\[companions\.depth\] needs a table .*; this is imagefolder"):
        list_source(make_class_folder(tmp_path / "classes", classes=1, per_class=1), companions=columns)
    coco = {"images": [{"id": 1, "file_name": "images/0.png"}], "annotations": [{"image_id": 1, "caption": "one"}]}
    (tmp_path / "captions.json").write_text(json.dumps(coco))
    with pytest.raises(SourceError, match=r"\[companions\.depth\] needs .*COCO's list of captions has none"):
        list_source(tmp_path / "captions.json", companions=columns)


def test_another_column_or_order_is_another_store(stores: Path, source: Path) -> None:
    with pytest.raises(FingerprintMismatch, match="companions"):
        encode(caption_recipe(*BASE, *COMPANIONS, "companions.edit.column=copy"), source, stores / "whole")
    with pytest.raises(FingerprintMismatch, match="companions"):
        encode(caption_recipe(*BASE), source, stores / "whole")
    with pytest.raises(ValidationError, match="have the name 'mask'; use two names"):
        PrecomputeRecipe.model_validate({"companions": {"mask": {}}, "features": {"mask": {"model": "x"}}})


def test_inspect_tells_of_each(stores: Path) -> None:
    facts = StoreFacts(LatentStore(stores / "whole"))
    summary, shown = facts.to_json(), render(facts)
    assert summary["companions"]["mask"]["row_shape"] == [6, 10]
    assert {"companion copy", "companion edit", "companion mask"} <= summary["bytes"].keys()
    assert "companion edit      column 'source image', encoded like the latents" in shown
    assert "companion mask      column 'mask', a mask, uint8, 6 x 10" in shown
