"""Several crops of an image (``images.variants``): further arrays of the same rows, of which each epoch draws one."""

from __future__ import annotations

import math
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from faults import flip
from making import (
    caption_recipe,
    encode,
    label_recipe,
    make_class_folder,
    no_progress,
    read_metadata,
    smooth_image,
    store_digest,
    tree_digest,
    write_metadata,
)
from noise_store import make_store
from stores import ImageSource, checked, content

from leandit.datasets.batches.batch import Batch
from leandit.datasets.batches.reader import BatchReader
from leandit.datasets.format.buckets import centre_crop
from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.order.batch_plan import BatchPlan
from leandit.datasets.order.mixture import Mixture
from leandit.datasets.store import LatentStore
from leandit.errors import FingerprintMismatch, StoreError
from leandit.precompute.images.pixels import crop_image, variant_draws
from leandit.tools.export.compact import compact

THREE, FLIPPED = "images.variants=3", "vae.flip=true"
SUFFIXES = ["", "_flip", "_v1", "_v1_flip", "_v2", "_v2_flip"]


def encoded(source: Path, store: Path, *overrides: str) -> LatentStore:
    encode(label_recipe(*overrides), source, store)
    return LatentStore(store)


@pytest.fixture(scope="module")
def of_three(class_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    return encoded(class_folder, tmp_path_factory.mktemp("variants") / "store", THREE, FLIPPED)


def views_of(store: LatentStore) -> list[np.ndarray]:
    (bucket,) = store.buckets
    pairs = [(variant, flipped) for variant in range(3) for flipped in (False, True)]
    return [store.latents(bucket, variant=variant, flipped=flipped)[:] for variant, flipped in pairs]


@pytest.mark.parametrize("crop", ["adm", "bucket"])
def test_a_variant_is_a_part_of_the_enlarged_image_and_its_draw_depends_on_the_key_alone(crop: str) -> None:
    draws = variant_draws("a/b.png", 16, 1.25)
    assert draws[:3] == variant_draws("a/b.png", 4, 1.25)
    assert len({*draws, *variant_draws("a/c.png", 16, 1.25)}) == 30
    assert all(1 <= zoom < 1.25 and 0 <= top < 1 and 0 <= left < 1 for zoom, top, left in draws)
    image = smooth_image(1, 40, 56)
    assert {crop_image(image, (32, 32), crop, variant=draw).shape for draw in draws} == {(32, 32, 3)}
    only_place = [crop_image(image, (40, 40), crop, variant=draw) for draw in variant_draws("a", 16, 1.0)]
    for pixels in only_place:  # one side is the image's own, so a crop is some of its columns
        columns = [np.array_equal(pixels, np.asarray(image)[:, left : left + 40]) for left in range(17)]
        assert sum(columns) == 1


def test_the_planned_crop_comes_first_and_the_others_are_those_of_its_key(
    class_folder: Path, of_three: LatentStore, tmp_path: Path
) -> None:
    plain = encoded(class_folder, tmp_path / "plain", FLIPPED)
    (bucket,) = plain.buckets
    views = views_of(of_three)
    np.testing.assert_array_equal(views[0], plain.latents(bucket)[:])
    np.testing.assert_array_equal(views[1], plain.latents(bucket, flipped=True)[:])
    paths = [path.rpartition("/")[2] for path in of_three.layouts if path.startswith("buckets/")]
    assert paths == sorted(f"moments{suffix}" for suffix in SUFFIXES)
    for one in range(6):
        for other in range(one):
            assert (views[one] != views[other]).any(axis=(1, 2, 3)).all()
    with pytest.raises(StoreError, match=r"variant 3, expected 0 to 2.*images\.variants"):
        of_three.latents(bucket, variant=3)
    with pytest.raises(FingerprintMismatch, match=r"images\.variants"):
        encoded(class_folder, tmp_path / "plain", THREE, FLIPPED)
    again = encoded(class_folder, tmp_path / "again", THREE, FLIPPED)
    assert store_digest(again.path) == store_digest(of_three.path)
    assert verify_store(again.path).findings == []
    compact(of_three.path, tmp_path / "compact", progress=no_progress)
    assert content(LatentStore(tmp_path / "compact")) == content(of_three)
    assert of_three.manifest.statistics.count == views[0][:, 0].size * 6  # of all views


def test_an_epoch_has_each_image_once_in_a_view_that_is_drawn_evenly(
    class_folder: Path, of_three: LatentStore, tmp_path: Path
) -> None:
    (bucket,) = of_three.buckets
    views = views_of(of_three)
    plain = encoded(class_folder, tmp_path / "plain")
    loaders = [make_loader(store, global_batch=5, seed=3) for store in (plain, of_three)]
    one, other = ([batch.records.tolist() for batch in loader] for loader in loaders)
    assert one == other  # the order does not know of variants
    rows = dict(zip(of_three.index(bucket).records.tolist(), of_three.index(bucket).rows.tolist(), strict=True))
    drawn, loader = np.zeros(6, int), make_loader(of_three, global_batch=5, seed=3)
    for _ in range(40):
        seen: list[int] = []
        for batch in loader:
            seen += batch.records.tolist()
            for record, stored in zip(batch.records.tolist(), batch.stored.numpy(), strict=True):
                (view,) = [i for i, view in enumerate(views) if np.array_equal(view[rows[record]], stored)]
                drawn[view] += 1
        assert sorted(seen) == list(range(15))
    assert drawn.sum() == 600
    assert ((drawn > 70) & (drawn < 130)).all()  # of 100 each


def test_a_store_with_variants_grows_by_the_new_image_alone_and_is_repaired_to_the_byte(tmp_path: Path) -> None:
    source, store = make_class_folder(tmp_path / "source"), tmp_path / "store"
    encoded(source, store, THREE, FLIPPED)
    smooth_image(77).save(source / "n001/new.png")
    report = encode(label_recipe(THREE, FLIPPED), source, store)
    assert report.num_encoded == 1
    whole = tree_digest(store)
    for shard in [path for path in (store / "buckets/32x32/moments_v2_flip/c").rglob("0") if path.is_file()]:
        flip(shard, 800)
    found, _ = checked(store)
    assert {finding.path.split("/")[2] for finding in found.findings} == {"moments_v2_flip"}
    left, _ = checked(store, source, repair=True)
    assert (left.findings, tree_digest(store)) == ([], whole)


def test_a_companion_and_a_mask_are_cropped_with_the_image(caption_folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(caption_folder, tmp_path / "source")
    write_metadata(
        source, [row | {"copy": row["file_name"], "mask": row["file_name"]} for row in read_metadata(source)]
    )
    recipe = caption_recipe(THREE, FLIPPED, "companions.copy.column=copy", "companions.mask.kind=mask")
    encode(recipe, source, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    for bucket in store.buckets:
        masks = []
        for variant in range(3):
            for flipped in (False, True):
                view = {"variant": variant, "flipped": flipped}
                copies = store.companion("copy", bucket, **view)[:]
                np.testing.assert_array_equal(copies, store.latents(bucket, **view)[:])
                masks.append(store.companion("mask", bucket, **view)[:])
            np.testing.assert_array_equal(masks[-1], masks[-2][:, :, ::-1])
        assert all((masks[0] != mask).any() for mask in masks[2::2])
    for batch in make_loader(store, global_batch=2, seed=0, companions=["copy"]):  # the same view of both
        assert batch.companions["copy"].shape == batch.latents.shape


# --- Micro-conditioning -----------------------------------------------------------------------------------------------


def assert_sizes_are_of_the_views_that_were_drawn(
    batch: Batch, store: LatentStore, seen: set[tuple[int, bool]]
) -> None:
    """Each view is found by its latents, its crop is computed as FORMAT.md says."""
    rows, flips = store.records.to_pylist(), (False, True) if store.spec.latent.flip else (False,)
    assert (batch.sizes.shape, batch.sizes.dtype) == ((len(batch), 6), torch.int64)
    height, width = map(int, batch.bucket.split("x"))
    for record, stored, sizes in zip(batch.records.tolist(), batch.stored.numpy(), batch.sizes.tolist(), strict=True):
        row = rows[record]
        views = [(variant, flipped) for variant in range(store.spec.images.variants) for flipped in flips]
        read = [store.latents(batch.bucket, variant=v, flipped=f)[row["row"]] for v, f in views]
        ((variant, flipped),) = [view for view, array in zip(views, read, strict=True) if np.array_equal(array, stored)]
        seen.add((variant, flipped))
        source = row["height_px"], row["width_px"]
        resized_width, top, left = row["resized_width_px"], row["crop_top_px"], row["crop_left_px"]
        if variant:
            bits = xxhash.xxh3_128_intdigest(row["key"].encode(), seed=variant)
            a, b, c = ((bits >> 32 * i & 0xFFFFFFFF) / 2**32 for i in range(3))
            zoom = 1 + (store.spec.images.variant_zoom - 1) * a
            (*_, (resized_height, resized_width)), _, _ = centre_crop(
                *source, (round(zoom * height), round(zoom * width)), store.spec.images.crop
            )
            top, left = math.floor(b * (resized_height - height + 1)), math.floor(c * (resized_width - width + 1))
        if flipped:
            left = resized_width - width - left
        assert sizes == [*source, top, left, height, width]


@pytest.mark.parametrize(
    "overrides", [(), (FLIPPED,), (THREE,), (THREE, FLIPPED)], ids=["one", "flipped", "three", "three flipped"]
)
def test_sizes_of_a_batch_are_of_the_views_that_were_drawn(overrides: tuple[str, ...], tmp_path: Path) -> None:
    images = ImageSource(tmp_path / "source", 6, sizes=[(96, 80), (60, 100), (133, 61)])
    encode(caption_recipe(*overrides), images.root, tmp_path / "store")
    images.put(1, seed=50)
    images.put(20)
    images.write()
    encode(caption_recipe(*overrides), images.root, tmp_path / "store")
    store, seen = LatentStore(tmp_path / "store"), set[tuple[int, bool]]()
    assert store.revision == 2
    loader = make_loader(store, global_batch=4, seed=2)
    for _ in range(4):
        for batch in loader:
            assert_sizes_are_of_the_views_that_were_drawn(batch, store, seen)
    assert len(seen) == store.spec.images.variants * (2 if store.spec.latent.flip else 1)
    assert_sizes_are_of_the_views_that_were_drawn(pickle.loads(pickle.dumps(batch)), store, seen)  # of a worker


def test_sizes_of_a_mixture_are_of_the_store_of_the_batch(
    class_folder: Path, of_three: LatentStore, tmp_path: Path
) -> None:
    plain = encoded(class_folder, tmp_path / "plain")
    stores = [of_three, plain]
    order = Mixture([(BatchPlan(store.buckets, 4, seed=i), 1) for i, store in enumerate(stores)], seed=0)
    reader = BatchReader(stores, order)
    read = set()
    for number in range(8):
        batch = reader[number]
        read.add(batch.store)
        assert_sizes_are_of_the_views_that_were_drawn(batch, stores[batch.store], set())
    assert read == {0, 1}


def test_the_sizes_of_images_that_nobody_has_seen_are_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "noise", {"32x32": 4}, num_classes=3)
    (batch,) = make_loader(LatentStore(tmp_path / "noise"), global_batch=4)
    with pytest.raises(StoreError, match=r"the size of the image of record 'noise/\d+.jpg' is not known"):
        _ = batch.sizes
