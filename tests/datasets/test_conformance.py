"""One suite for every kind of store: whatever its codec, dtypes, history and place, it reads as FORMAT.md says."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import caption_recipe, encode, no_progress
from stores import Everything

from leandit import create_store, testing
from leandit.datasets.batches.batch import Batch
from leandit.datasets.loader import make_loader
from leandit.datasets.store import LatentStore
from leandit.errors import StoreError
from leandit.testing import PageReader
from leandit.tools.export.compact import compact

CAPTION_ARRAYS = ("embeddings", "scales", "pooled")
Make = Callable[[pytest.FixtureRequest, Path], Path]


def encoded(*overrides: str) -> Make:
    def make(request: pytest.FixtureRequest, path: Path) -> Path:
        encode(caption_recipe(*overrides), request.getfixturevalue("caption_folder"), path)
        return path

    return make


def given(store: str) -> Make:
    """The store of a fixture, as it is."""
    return lambda request, _path: request.getfixturevalue(store).path


def grown(request: pytest.FixtureRequest, path: Path) -> Path:
    return shutil.copytree(request.getfixturevalue("everything").grown, path)


def compacted(request: pytest.FixtureRequest, path: Path) -> Path:
    everything: Everything = request.getfixturevalue("everything")
    compact(everything.grown, path, progress=no_progress)
    return path


def published(request: pytest.FixtureRequest, path: Path) -> Path:
    """Without the second copies of the tables."""
    ignore = shutil.ignore_patterns("twin")
    return shutil.copytree(request.getfixturevalue("everything").added, path, ignore=ignore)


def written(_request: pytest.FixtureRequest, path: Path) -> Path:
    """By ``create_store``: two sizes, int8 tokens, a feature, a companion."""
    rng = np.random.default_rng(0)
    latent = {"channels": 4, "downscale": 8, "scale": 0.5, "flip": True, "kind": "sample"}
    text = {"null": rng.normal(size=(2, 6)), "max_tokens": 4, "dtype": "int8"}
    features = {"dino": {"width": 8, "dtype": "int8", "patch_px": 8}}
    with create_store(path, latent=latent, text=text, features=features, classes=3) as store:
        for i in range(9):
            height = 4 + 2 * (i % 2)
            store.add(
                f"key {i}",
                latent=rng.normal(size=(2, 4, height, 4)).tolist(),
                label=i % 3,
                caption=[f"caption {i // 2}", f"other {i}"],
                embeddings=[rng.normal(size=(3, 6)), rng.normal(size=(1, 6))],
                features={"dino": list(rng.normal(size=(2, height * 4, 8)))},
            )
    return path


STORES: dict[str, tuple[Make, dict[str, Any]]] = {
    "labels": (given("label_store"), {}),
    "captions": (given("caption_store"), {}),
    "pread": (given("caption_store"), {"access": "pread"}),
    "blosc, float32 latents": (encoded("store.codec=blosc", "vae.flip=true", "store.dtype=float32"), {}),
    "bfloat16 captions": (encoded("store.text_dtype=bfloat16"), {}),
    "grown, features, four text encoders": (grown, {}),
    "an earlier revision": (grown, {"revision": 2}),
    "compacted": (compacted, {}),
    "by create_store": (written, {}),
    "published": (published, {}),
    "at a URL": (grown, {"remote": {"capacity_gib": 1.0}}),
    "at a URL, little room": (grown, {"remote": {"capacity_gib": 0.0}, "access": "pread"}),
}


@pytest.fixture(scope="module", params=STORES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LatentStore, PageReader]:
    folder = tmp_path_factory.mktemp("conformance")
    make, arguments = STORES[request.param]
    root = make(request, folder / "store")
    if "remote" in arguments:
        largest = max(path.stat().st_size for path in root.glob("*/**/c/**/*") if path.is_file())
        remote = {
            "folder": folder / "local",
            "capacity_gib": arguments["remote"]["capacity_gib"] or 3 * largest / 2**30,
        }
        return LatentStore(f"file://{root}", **arguments | {"remote": remote}), PageReader(root)
    return LatentStore(root, **arguments), PageReader(root, arguments.get("revision", 0))


def equal(found: Any, wanted: Any) -> None:
    if getattr(found, "dtype", None) == torch.bfloat16:
        found = found.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(np.asarray(found), wanted, strict=True)


def stored_records(reader: PageReader) -> dict[int, dict[str, Any]]:
    return {i: record for i, record in enumerate(reader.records) if record["status"] == "stored"}


def test_every_record_has_the_rows_that_its_table_names(opened: tuple[LatentStore, PageReader]) -> None:
    store, reader = opened
    stored = stored_records(reader)
    assert len(store) == len(stored) > 4
    assert store.records.to_pylist() == reader.records
    assert store.buckets == reader.manifest["buckets"]
    rng = np.random.default_rng(0)
    for bucket in store.buckets:
        index = store.index(bucket)
        assert sorted(index.records.tolist()) == [i for i, one in stored.items() if one["bucket"] == bucket]
        order = rng.permutation(len(index))
        wanted = [reader.images(reader.records[index.records[place]]) for place in order]
        for path in wanted[0]:
            rows = index.rows[order]
            equal(store.array(path).take(rows), np.stack([one[path] for one in wanted]))
            equal(store.array(path)[int(rows[0])], wanted[0][path])
    assert store.features == list(reader.features)
    for i, record in stored.items():
        found, bucket = store.record(record["key"]), record["bucket"]
        assert (found.index, found.row) == (i, record["row"])
        assert (found.label, list(found.caption_ids)) == (record["label"], record["caption_ids"])
        latents, checksum = reader.latents(record)
        assert checksum == record["checksum"]
        for flipped, latent in enumerate(latents):
            equal(store.latents(bucket, flipped=bool(flipped))[found.row], latent)
        for name in store.features:
            tokens, checksum = reader.feature(name, record)
            assert checksum == record[f"checksum_{name}"]
            for output in store.feature(name, bucket).outputs:
                equal(store.feature(name, bucket).row(found.row, output).astype(np.float32), narrow(tokens[output]))
            if "patches" in tokens:
                assert not np.array_equal(tokens["patches"], tokens["patches_flip"])
                assert len(tokens["patches"]) == reader.num_patches(name, bucket)


def narrow(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32)


def test_every_caption_has_the_rows_that_its_table_names(opened: tuple[LatentStore, PageReader]) -> None:
    store, reader = opened
    assert store.texts == list(reader.texts)
    assert len(reader.captions) == reader.manifest["num_captions"] == store.captions.num_rows
    for name in store.texts:
        text, suffix = store.text(name), f"_{name}" if name != next(iter(reader.texts)) else ""
        for i, caption in enumerate(reader.captions):
            for found, wanted in zip(text.stored_rows(i), reader.caption_rows(name, i).values(), strict=True):
                equal(found, wanted)
            tokens, pooled, checksum = reader.caption(name, i)
            assert checksum == caption[f"checksum{suffix}"]
            if tokens is not None:
                equal(narrow(text[i]), narrow(tokens))
            if pooled is not None:
                equal(narrow(text.pooled_vector(i)), narrow(pooled))
        tokens, pooled = reader.null(name)
        assert (tokens is None, pooled is None) == (not text.spec.has_tokens, text.spec.output == "tokens")
        if tokens is not None:
            equal(narrow(text.null), narrow(tokens))
        if pooled is not None:
            equal(narrow(text.null_pooled), narrow(pooled))


def test_the_store_is_what_the_page_says(opened: tuple[LatentStore, PageReader]) -> None:
    store, reader = opened
    testing.check_store(reader.store, reader.revision)
    if store.remote:
        with pytest.raises(StoreError, match="zarr-python reads local stores"):
            _ = store.zarr
    else:
        assert store.zarr.read_only


def test_every_record_is_read_as_it_is_stored(opened: tuple[LatentStore, PageReader]) -> None:
    store, reader = opened
    testing.check_reader(reader.store, lambda _: read_records(store), reader.revision)


def read_records(store: LatentStore) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each stored record with its rows in every array, as ``testing.check_reader`` takes them."""
    for bucket in store.buckets:
        index = store.index(bucket)
        prefix = f"buckets/{bucket}/"
        for position, row in zip(index.records.tolist(), index.rows.tolist(), strict=True):
            record = store.record_at(position)
            paths = [path for path in store.layouts if path.startswith(prefix)]
            rows: dict[str, Any] = {path.removeprefix(prefix): store.array(path)[row] for path in paths}
            for name in store.texts:
                folder = f"captions/{name}" if name else "captions"
                arrays = [path for path in (f"{folder}/{array}" for array in CAPTION_ARRAYS) if path in store.layouts]
                for number in record.caption_ids:
                    for path, values in zip(arrays, store.text(name).stored_rows(number), strict=True):
                        rows.setdefault(path, []).append(values)
            yield record.key, rows


@pytest.mark.parametrize("text", ["padded", "packed"])
def test_an_epoch_has_every_record_once_with_all_its_rows(opened: tuple[LatentStore, PageReader], text: Any) -> None:
    store, reader = opened
    batches = list(make_loader(store, global_batch=4, seed=3, text=text, check="always"))
    if store.remote and store.folder.access == "pread":
        assert store.remote.num_evicted > 0
    assert sorted(i for batch in batches for i in batch.records.tolist()) == sorted(stored_records(reader))
    for batch in batches:
        for place, i in enumerate(batch.records.tolist()):
            check_record(batch, place, reader, i)


def check_record(batch: Batch, place: int, reader: PageReader, i: int) -> None:
    record, images = reader.records[i], reader.images(reader.records[i])
    prefix, latents = f"buckets/{batch.bucket}/", reader.spec["latent"]["array"]
    assert (batch.bucket, int(batch.labels[place])) == (record["bucket"], record["label"])
    is_flipped = not np.array_equal(batch.stored[place], images[prefix + latents])
    flip = "_flip" if is_flipped else ""
    equal(batch.stored[place], images[f"{prefix}{latents}{flip}"])
    for name, feature in batch.features.items():
        values = {
            "patches": feature.stored_patches,
            "patch_scales": feature.patch_scales,
            "cls": feature.stored_cls,
            "cls_scales": feature.cls_scales,
        }
        for array, stored in values.items():
            if stored is not None:
                equal(stored[place], images[f"{prefix}features/{name}/{array}{flip}"])
    chosen = list(record["caption_ids"])
    for name, captions in batch.texts.items():
        ends = np.cumsum([0, *captions.lengths])
        part = slice(int(ends[place]), int(ends[place + 1]))
        stored = [captions.tokens[part], *([captions.scales[part]] if captions.scales is not None else [])]
        stored = stored if captions.has_tokens else []
        stored += [captions.pooled[place : place + 1]] if captions.pooled is not None else []
        assert len(stored) == len(reader.caption_rows(name, chosen[0]))
        chosen = [one for one in chosen if all(map(same, stored, reader.caption_rows(name, one).values()))]
        if captions.has_tokens and batch.pads:
            assert not captions.padded[place, captions.lengths[place] :].count_nonzero()
            assert torch.equal(captions.padded[place, : captions.lengths[place]], captions.embeddings[part])
    assert chosen or not batch.texts  # one caption of the record, the same of each text encoder


def same(found: Any, wanted: np.ndarray) -> bool:
    try:
        equal(found, wanted)
    except AssertionError:
        return False
    return True


def test_ranks_resumes_and_copies_read_the_same(opened: tuple[LatentStore, PageReader]) -> None:
    store, _ = opened
    whole = list(make_loader(store, global_batch=4, seed=5))
    ranks = [list(make_loader(store, global_batch=4, seed=5, rank=rank, world_size=2)) for rank in range(2)]
    for batch, parts in zip(whole, zip(*ranks, strict=True), strict=True):
        equal(batch.records, torch.cat([part.records for part in parts]).numpy())
        equal(batch.latents, torch.cat([part.latents for part in parts]).numpy())
    first = make_loader(store, global_batch=4, seed=5)
    _ = [next(iter(first)) for _ in range(2)]
    again = make_loader(pickle.loads(pickle.dumps(store)), global_batch=4, seed=5)
    again.load_state_dict(first.state_dict())
    for batch, wanted in zip(again, whole[2:], strict=True):
        equal(batch.latents, wanted.latents.numpy())
        assert batch.records.tolist() == wanted.records.tolist()
