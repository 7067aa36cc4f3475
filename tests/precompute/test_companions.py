"""Companion images: control images, edit sources and masks from other columns of the table."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from faults import flip
from making import (
    COMPANIONS,
    CPU,
    SIZES,
    caption_recipe,
    encode,
    gray_mask,
    lasting_digest,
    make_caption_folder,
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

from leandit.datasets.batches.latents import normalise
from leandit.datasets.batches.reader import BatchReader
from leandit.datasets.errors import FingerprintMismatch, RecipeError, SourceError, StoreError, UnknownKey
from leandit.datasets.format.buckets import bucket_size
from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.compact import compact
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.order.batch_plan import BatchPlan
from leandit.datasets.order.mixture import Mixture
from leandit.datasets.store import LatentStore
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.encoders.loading import load_encoders
from leandit.precompute.images.pixels import decode_image
from leandit.precompute.sources.source import list_source
from leandit.tools.inspection.store_facts import StoreFacts
from leandit.tools.inspection.store_text import render
from leandit.tools.plan.dry_run import describe_precompute

BASE = ("vae.flip=true", "vae.batch_size=4", "text.kind=none", "source.max_reject_share=1")
COUNT = 8


@pytest.fixture(autouse=True)
def several_shards() -> Iterator[None]:
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


class Stores(NamedTuple):
    """The same source: without companions, with them from the start, with them added."""

    plain: Path
    whole: Path
    added: Path


@pytest.fixture(scope="module")
def stores(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Stores:
    root = tmp_path_factory.mktemp("stores")
    with small_shards():
        encode(caption_recipe(*BASE), source, root / "plain")
        encode(with_companions(), source, root / "whole")
        shutil.copytree(root / "plain", root / "added")
        report = encode(with_companions(), source, root / "added")
    assert report.manifest is not None
    assert (report.manifest.revision, report.num_encoded) == (2, COUNT)
    return Stores(root / "plain", root / "whole", root / "added")


@pytest.fixture
def whole(stores: Stores, tmp_path: Path) -> Path:
    """A store with companions that a test may change."""
    return Path(shutil.copytree(stores.whole, tmp_path / "store"))


def row_of(store: LatentStore, name: str, key: str) -> np.ndarray:
    record = store.record(key)
    assert record.bucket
    return store.companion(name, record.bucket)[record.row]


def test_a_companion_with_the_bytes_of_the_image_has_its_bits(stores: Stores) -> None:
    store = LatentStore(stores.whole)
    assert (len(store), store.companions, len(store.buckets)) == (COUNT, ["copy", "edit", "mask"], 3)
    for bucket in store.buckets:
        np.testing.assert_array_equal(store.companion("copy", bucket)[:], store.latents(bucket)[:])
        flipped = store.companion("copy", bucket, flipped=True)[:]
        np.testing.assert_array_equal(flipped, store.flipped_latents(bucket)[:])
        edit = store.companion("edit", bucket)
        assert (edit.row_shape, edit.dtype) == (store.latents(bucket).row_shape, store.latents(bucket).dtype)
        assert not np.array_equal(edit[:], store.latents(bucket)[:])
    assert store.records["checksum_copy"].equals(store.records["checksum"])
    assert store.records["source_checksum_copy"].equals(store.records["source_checksum"])
    assert store.records["checksum_mask"].null_count == 0


def test_a_companion_is_encoded_from_its_crop_at_the_place_of_the_image(stores: Stores, source: Path) -> None:
    store, encoder = LatentStore(stores.whole), load_encoders(caption_recipe(*BASE), CPU).image
    for i in (1, 2, 3):
        record = store.record(f"images/{i}.png")
        assert record.bucket is not None
        pixels, size = decode_image(
            (source / f"edits/{i}.png").read_bytes(),
            bucket=bucket_size(record.bucket),
            crop="bucket",
            beside=SIZES[i % 3],
        )
        assert size == (2 * SIZES[i % 3][0], 2 * SIZES[i % 3][1])
        for flipped, view in ((False, pixels), (True, pixels[:, ::-1])):
            expected = encoder.encode(view[None])[0]
            found = store.companion("edit", record.bucket, flipped=flipped)[record.row]
            np.testing.assert_allclose(found, expected.astype(np.float16), rtol=2e-3, atol=2e-3)


def test_a_mask_is_stored_at_the_size_of_the_latents_and_flipped_with_them(stores: Stores, source: Path) -> None:
    store = LatentStore(stores.whole)
    for i in range(COUNT):
        record = store.record(f"images/{i}.png")
        assert record.bucket is not None
        downscale, bucket = store.spec.latent.downscale, bucket_size(record.bucket)
        expected, _ = decode_image(
            (source / f"masks/{i}.png").read_bytes(),
            bucket=bucket,
            crop="bucket",
            beside=SIZES[i % 3],
            mask_px=downscale,
        )
        assert expected.shape == (bucket[0] // downscale, bucket[1] // downscale)
        np.testing.assert_array_equal(store.companion("mask", record.bucket)[record.row], expected)
        np.testing.assert_array_equal(
            store.companion("mask", record.bucket, flipped=True)[record.row], expected[:, ::-1]
        )


def test_a_batch_has_the_mean_of_each_companion_as_the_model_sees_it(stores: Stores) -> None:
    store = LatentStore(stores.added)
    spec, seen, num_flipped = store.spec.latent, 0, 0
    for batch in make_loader(store, global_batch=2, device="cpu"):
        copy, edit, mask = (batch.companions[name] for name in ("copy", "edit", "mask"))
        assert (copy.dtype, edit.shape, mask.dtype) == (torch.float32, batch.latents.shape, torch.uint8)
        assert mask.shape == (len(batch), *batch.latents.shape[2:])
        torch.testing.assert_close(copy, normalise(batch.stored[:, : spec.channels].float(), spec), rtol=0, atol=0)
        for i, position in enumerate(batch.records.tolist()):
            row = store.record_at(position).row
            views = [store.companion("mask", batch.bucket, flipped=flipped)[row] for flipped in (False, True)]
            is_flipped = bool(np.array_equal(batch.stored[i].numpy(), store.flipped_latents(batch.bucket)[row]))
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


def test_zarr_and_parquet_read_all_of_it(stores: Stores) -> None:
    store, group = LatentStore(stores.whole), zarr.open_group(stores.whole, mode="r")
    for name, array in (("edit", "moments"), ("mask", "mask"), ("mask", "mask_flip")):
        found = group[f"buckets/64x64/companions/{name}/{array}"]
        np.testing.assert_array_equal(found[:], store.companion(name, "64x64", flipped=array.endswith("flip"))[:])  # pyright: ignore
    assert pq.read_schema(stores.whole / "revisions/000001/records.parquet").names[-2:] == [
        "checksum_mask",
        "source_checksum_mask",
    ]
    planned = pq.read_table(stores.whole / "revisions/000001/sources.parquet")
    assert planned["source_path_edit"].to_pylist() == [f"edits/{i}.png" for i in range(COUNT)]


def test_a_sample_is_stored_beside_the_mean_of_its_companion(source: Path, stores: Stores, tmp_path: Path) -> None:
    encode(with_companions("vae.keep=sample", "vae.flip=false", "store.codec=zstd"), source, tmp_path / "store")
    store, moments = LatentStore(tmp_path / "store"), LatentStore(stores.whole)
    for bucket in store.buckets:
        mean = moments.latents(bucket)[:][:, : store.spec.latent.channels]
        np.testing.assert_array_equal(store.companion("copy", bucket)[:], mean)
        np.testing.assert_array_equal(store.companion("mask", bucket)[:], moments.companion("mask", bucket)[:])
        assert not np.array_equal(store.latents(bucket)[:], mean)
        with pytest.raises(StoreError, match="no flipped latents"):
            store.companion("copy", bucket, flipped=True)


def test_what_is_added_is_what_the_store_would_have_had(stores: Stores, source: Path) -> None:
    before, after = lasting_digest(stores.plain), lasting_digest(stores.added)
    assert {path: content for path, content in after.items() if path in before} == before
    whole, added = LatentStore(stores.whole), LatentStore(stores.added)
    assert LatentStore(stores.added, revision=1).companions == []
    assert content(added) == content(whole)
    assert encode(with_companions(), source, stores.added).num_encoded == 0


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


@pytest.mark.parametrize("check", ["stat", "content"])
def test_a_changed_companion_makes_its_record_stale(check: str, folder: Path, whole: Path) -> None:
    recipe = with_companions(f"source.check={check}")
    assert encode(recipe, folder, whole).num_encoded == 0
    for path in (folder / "masks/5.png", folder / "edits/2.png"):  # other times, same bytes
        os.utime(path, ns=(1, 1))
    assert encode(recipe, folder, whole).num_encoded == 0
    assert LatentStore(whole).revision == 1
    gray_mask(99, 48, 48).save(folder / "masks/3.png")
    smooth_image(98, 120, 200).save(folder / "edits/4.png")
    report = encode(recipe, folder, whole)
    assert (report.num_encoded, report.changes and report.changes.num_changed) == (2, 2)
    store = LatentStore(whole)
    assert {store.record(f"images/{i}.png").revision for i in (3, 4)} == {2}
    assert {store.record(f"images/{i}.png").revision for i in range(COUNT) if i not in (3, 4)} == {1}
    encode(recipe, folder, whole.parent / "fresh")
    fresh = LatentStore(whole.parent / "fresh")
    for key, name in itertools.product(store.records["key"].to_pylist(), store.companions):
        ours, theirs = (row_of(one, name, key).astype(np.float32) for one in (store, fresh))
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-3)
    assert verify_store(whole).findings == []


def test_same_bytes_and_another_size_of_file_are_told_apart_while_encoding(folder: Path, tmp_path: Path) -> None:
    """A companion that changes between plan and encoding is a reject, as an image is."""
    recipe = with_companions()

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "scan":
            (folder / "masks/1.png").write_bytes((folder / "masks/1.png").read_bytes() + b"more")

    encode(recipe, folder, tmp_path / "store", progress=progress)
    record = LatentStore(tmp_path / "store").record("images/1.png")
    assert (record.stage, record.reason) == ("decode", "source_changed")
    assert (record.detail or "").startswith("companion 'mask', 'masks/1.png': 1.png has")


def test_a_companion_that_is_gone_keeps_its_record_or_drops_it(folder: Path, whole: Path) -> None:
    (folder / "edits/3.png").unlink()
    assert encode(with_companions(), folder, whole).num_encoded == 0
    assert LatentStore(whole).record("images/3.png").status == "stored"
    encode(with_companions(), folder, whole, drop_gone=True)
    record = LatentStore(whole).record("images/3.png")
    assert (record.status, record.reason) == ("rejected", "missing_file")
    assert verify_store(whole).findings == []


def test_a_record_that_an_addition_rejects_has_no_results_left(folder: Path, tmp_path: Path) -> None:
    root, allowed = tmp_path / "store", "source.max_reject_share=1"
    dino = [f"features.dino.model={make_dinov2(tmp_path / 'dinov2')}", "features.dino.output=cls"]
    encode(caption_recipe(*dino, allowed), folder, root)
    (folder / "masks/1.png").write_bytes(b"no image")
    encode(caption_recipe(*dino, "companions.mask.kind=mask", allowed), folder, root)
    table = LatentStore(root).records
    row = next(one for one in table.to_pylist() if one["key"] == "images/1.png")
    assert (row["revision"], row["status"], row["reason"]) == (1, "rejected", "not_an_image")
    assert {name: value for name, value in row.items() if "checksum" in name or "_dino" in name} == dict.fromkeys(
        name for name in table.column_names if "checksum" in name or "_dino" in name
    )
    assert table["checksum_dino"].null_count == 1
    assert verify_store(root).findings == []


def test_a_companion_that_is_missing_cannot_be_added(stores: Stores, folder: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(stores.plain, tmp_path / "store"))
    (folder / "edits/3.png").unlink()
    (folder / "masks/4.png").write_text("no image")
    before = tree_digest(root)
    with pytest.raises(SourceError, match=r"it lacks 1 record of store"):
        encode(with_companions(), folder, root)
    assert tree_digest(root) == before
    encode(with_companions(), folder, root, drop_gone=True)
    store = LatentStore(root)
    found = {i: store.record(f"images/{i}.png") for i in (3, 4)}
    assert [(one.stage, one.reason) for one in found.values()] == [("scan", "missing_file"), ("decode", "not_an_image")]
    assert (len(store), verify_store(root).findings) == (COUNT - 2, [])
    for bucket in store.buckets:
        rows = store.index(bucket).rows
        np.testing.assert_array_equal(store.companion("copy", bucket).take(rows), store.latents(bucket).take(rows))


def test_stores_whose_images_differ_are_not_read_together(stores: Stores, source: Path, tmp_path: Path) -> None:
    recipe = caption_recipe(*BASE, "companions.copy.kind=image", "companions.mask.kind=image")
    encode(recipe, source, tmp_path / "store")
    pair = [LatentStore(stores.whole), LatentStore(tmp_path / "store")]
    order = Mixture([(BatchPlan(store.buckets, 2, seed=0), 1) for store in pair], seed=0)
    with pytest.raises(RecipeError, match=r"'mask' is of kind 'image', of 'mask' in"):
        BatchReader(pair, order, companions=["copy", "mask"])
    with pytest.raises(RecipeError, match=r"no companion 'edit'\. Available: copy, mask"):
        BatchReader(pair, order)
    assert list(BatchReader(pair, order, companions=["copy"])[0].companions) == ["copy"]


def test_a_note_says_where_companions_are_found(folder: Path) -> None:
    rows = read_metadata(folder)
    for i in range(COUNT):
        (folder / f"masks/{i}.png").rename(folder / f"masks/grey{i}.png")
    write_metadata(folder, [row | {"mask": f"grey{i}.png"} for i, row in enumerate(rows)])
    source = list_source(folder, companions={"mask": "mask"})
    assert [record.companions[0][0] for record in source.records] == [f"masks/grey{i}.png" for i in range(COUNT)]
    assert "companion 'mask': images: in 'masks'" in source.notes


def test_a_store_grows_and_is_compacted_with_and_without_a_companion(
    stores: Stores, folder: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(stores.added, tmp_path / "store"))
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
    for key in store.records["key"].to_pylist():
        np.testing.assert_array_equal(row_of(store, "mask", key), row_of(less, "mask", key))
    for path, recipe in (("compact", with_companions()), ("less", caption_recipe(*BASE, "companions.mask.kind=mask"))):
        assert verify_store(tmp_path / path).findings == []
        assert encode(recipe, folder, tmp_path / path).num_encoded == 0
    with pytest.raises(
        RecipeError, match=r"--without 'depth': expected .*a companion .*of the store: copy, edit, mask"
    ):
        compact(root, tmp_path / "other", progress=lambda *_: None, without=["depth"])


def test_companions_in_any_order_are_encoded_again_and_repaired(source: Path, tmp_path: Path) -> None:
    mask_first, root = ("companions.mask.kind=mask", "companions.copy.column=copy"), tmp_path / "store"
    encode(caption_recipe(*BASE, *mask_first), source, root)
    assert LatentStore(root).companions == ["mask", "copy"]
    encode(caption_recipe(*BASE, *mask_first, 'companions.a.column="source image"'), source, root)
    assert LatentStore(root).companions == ["mask", "copy", "a"]
    report = deep(root, source, num_records=COUNT)
    assert (report.findings, report.num_close) == ([], 0)
    files = tree_digest(root)
    shard = next(path for path in files if "/companions/copy/" in path and "/c/" in path)
    flip(root / shard, 99)
    left, _ = checked(root, source, repair=True)
    assert (left.findings, tree_digest(root)) == ([], files)


def test_every_flipped_bit_is_found_and_mended(stores: Stores, source: Path, tmp_path: Path) -> None:
    root, rng = Path(shutil.copytree(stores.added, tmp_path / "store")), random.Random(3)
    files = tree_digest(root)
    shards = sorted(path for path in files if "/companions/" in path and "/c/" in path)
    assert len(shards) > 12
    for path in shards:
        flip(root / path, rng.randrange(8 * len(files[path])))
        found = {finding.path: finding for finding in verify_store(root).findings}
        assert found[path].bucket in path
        assert found[path].records
        (root / path).write_bytes(files[path])
    assert deep(root, source, num_records=COUNT).findings == []
    for path in rng.sample(shards, 6):
        flip(root / path, rng.randrange(8 * len(files[path])))
    (root / rng.choice(sorted(path for path in files if path.endswith("records.parquet")))).unlink()
    assert checked(root, source, repair=True)[0].findings == []
    assert tree_digest(root) == files


def test_a_deep_check_tells_of_a_companion_that_is_another_now(folder: Path, whole: Path) -> None:
    gray_mask(99, 48, 48).save(folder / "masks/3.png")
    assert [(one.cause, one.records) for one in deep(whole, folder, num_records=COUNT).findings] == [
        ("source_changed", ["images/3.png"])
    ]


def test_images_in_the_rows_of_parquet_have_their_companions_there(
    source: Path, stores: Stores, tmp_path: Path
) -> None:
    columns = {"image": "images", "copy": "copies", "source image": "edits", "mask": "masks"}
    values = {
        name: [{"bytes": (source / f"{folder}/{i}.png").read_bytes(), "path": None} for i in range(COUNT)]
        for name, folder in columns.items()
    }
    values["mask"][2]["bytes"] = None  # pyright: ignore
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table(values), tmp_path / "rows/train.parquet", row_group_size=3)
    encode(with_companions("vae.batch_size=1"), tmp_path / "rows", tmp_path / "store")
    store, other = LatentStore(tmp_path / "store"), LatentStore(stores.whole)
    assert len(store) == COUNT - 1
    reject = store.record("train/2")
    assert (reject.stage, reject.reason) == ("decode", "unreadable")
    assert reject.detail == "companion 'mask', 'train.parquet': train.parquet, row 2 has no bytes of an image"
    for i in (0, 1, 3, 4):
        np.testing.assert_array_equal(row_of(store, "mask", f"train/{i}"), row_of(other, "mask", f"images/{i}.png"))
    for bucket in store.buckets:
        rows = store.index(bucket).rows
        np.testing.assert_array_equal(store.companion("copy", bucket).take(rows), store.latents(bucket).take(rows))
    assert encode(with_companions("vae.batch_size=1"), tmp_path / "rows", tmp_path / "store").num_encoded == 0


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_other_tables_list_the_same_companions(kind: str, folder: Path) -> None:
    columns = with_companions().companion_columns
    expected = [record.companions for record in list_source(folder, companions=columns).records]
    assert [path for path, *_ in expected[3]] == ["copies/3.png", "edits/3.png", "masks/3.png"]
    rows = [{name: value for name, value in row.items() if name != "captions"} for row in read_metadata(folder)]
    rows[1]["mask"] = ""
    (folder / "metadata.jsonl").unlink()
    if kind == "csv":
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    else:
        rows[1]["mask"] = None
        pq.write_table(pa.Table.from_pylist(rows), folder / "metadata.parquet")
    records = list(list_source(folder, companions=columns).records)
    assert records[1].problem == (
        "bad_metadata",
        "companion 'mask': the row names no image; expected its path as text in UTF-8",
    )
    assert [one.companions for i, one in enumerate(records) if i != 1] == [*expected[:1], *expected[2:]]


def test_rows_of_one_image_with_other_companions_are_not_merged(folder: Path) -> None:
    rows = read_metadata(folder)[:2]
    write_metadata(folder, [rows[0], rows[0] | {"captions": ["more"]}, rows[1], rows[1] | {"mask": "masks/5.png"}])
    first, second, third = list_source(folder, companions={"mask": "mask"}).records
    assert (first.problem, first.captions[-1], second.problem) == (None, "more", None)
    assert third.problem == ("duplicate_key", "record 2 of the source has the same key")
    assert len(list_source(folder).records) == 2


def test_the_listing_changes_with_a_companion_and_not_without_one(folder: Path) -> None:
    def hashes() -> list[str]:
        columns = with_companions().companion_columns
        return [list_source(folder, companions=one).listing_hash() for one in ({}, columns, {"mask": "mask"})]

    before = hashes()
    os.utime(folder / "edits/1.png", ns=(1, 1))
    assert [one == other for one, other in zip(before, hashes(), strict=True)] == [True, False, True]


def test_several_sources_each_have_companions(folder: Path, tmp_path: Path) -> None:
    other = make_companion_folder(tmp_path / "other", count=3)
    gray_mask(99, 48, 48).save(other / "masks/0.png")
    encode(with_companions(), [folder, other], tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert len(store) == COUNT + 3
    assert not np.array_equal(row_of(store, "mask", "images/0.png"), row_of(store, "mask", "other/images/0.png"))
    for bucket in store.buckets:
        np.testing.assert_array_equal(store.companion("copy", bucket)[:], store.latents(bucket)[:])
    assert encode(with_companions(), [folder, other], tmp_path / "store").num_encoded == 0


def test_a_source_without_such_a_column_is_refused(source: Path, tmp_path: Path) -> None:
    columns = {"depth": "depth"}
    with pytest.raises(SourceError, match=r"no column 'depth'\. Its columns: .*'mask'"):
        list_source(source, companions=columns)
    with pytest.raises(SourceError, match=r"\[companions\.depth\] needs a table .*; this is imagefolder"):
        list_source(make_class_folder(tmp_path / "classes", classes=1, per_class=1), companions=columns)
    make_caption_folder(tmp_path / "coco", count=1)
    coco = {"images": [{"id": 1, "file_name": "images/0.png"}], "annotations": [{"image_id": 1, "caption": "one"}]}
    (tmp_path / "coco/captions.json").write_text(json.dumps(coco))
    with pytest.raises(SourceError, match=r"\[companions\.depth\] needs .*COCO's list of captions has none"):
        list_source(tmp_path / "coco/captions.json", companions=columns)


def test_another_column_or_order_is_another_store(stores: Stores, source: Path) -> None:
    with pytest.raises(FingerprintMismatch, match="companions"):
        encode(caption_recipe(*BASE, *COMPANIONS, "companions.edit.column=copy"), source, stores.whole)
    with pytest.raises(FingerprintMismatch, match="companions"):
        encode(caption_recipe(*BASE), source, stores.whole)
    with pytest.raises(ValidationError, match="have the name 'mask'; use two names"):
        PrecomputeRecipe.model_validate({"companions": {"mask": {}}, "features": {"mask": {"model": "x"}}})


def test_inspect_and_dry_run_tell_of_each(stores: Stores, source: Path) -> None:
    facts = StoreFacts(LatentStore(stores.whole))
    summary = facts.to_json()
    assert summary["companions"]["mask"]["row_shape"] == [6, 10]
    assert {"companion copy", "companion edit", "companion mask"} <= summary["bytes"].keys()
    shown = render(facts)
    assert "companion edit      column 'source image', encoded like the latents" in shown
    assert "companion mask      column 'mask', a mask, uint8, 6 x 10" in shown
    dry = describe_precompute(with_companions(), source, CPU)
    assert dry.new_bytes is not None
    beside = {name: size for name, size in dry.new_bytes.items() if name.startswith("companion ")}
    assert list(beside) == ["companion copy", "companion edit", "companion mask"]
    assert beside["companion copy"] == dry.new_bytes["latents"]
    for name, size in beside.items():
        folders = [path for path in stores.whole.rglob("*") if f"/companions/{name.split()[1]}/" in path.as_posix()]
        arrays = {path for path in folders if path.is_file() and path.parent.parent.name != "companions"}
        assert sum(path.stat().st_size for path in arrays) == size
