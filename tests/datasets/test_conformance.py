"""One suite for every kind of store: whatever its codec, dtypes, history and place, it is read as by zarr-python."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from making import caption_recipe, encode, no_progress
from stores import Everything

from leandit.datasets.batches.batch import Batch
from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.compact import compact
from leandit.datasets.store import LatentStore

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


STORES: dict[str, tuple[Make, dict[str, Any]]] = {
    "labels": (given("label_store"), {}),
    "captions": (given("caption_store"), {}),
    "pread": (given("caption_store"), {"access": "pread"}),
    "zstd, float32 latents": (encoded("store.codec=zstd", "vae.flip=true", "store.dtype=float32"), {}),
    "bfloat16 captions": (encoded("store.text_dtype=bfloat16"), {}),
    "grown, features, four text encoders": (grown, {}),
    "compacted": (compacted, {}),
    "published": (published, {}),
    "at a URL": (grown, {"remote": {"capacity_gib": 1.0}}),
    "at a URL, little room": (grown, {"remote": {"capacity_gib": 0.0}, "access": "pread"}),
}


class Reference:
    """A store as zarr-python and pyarrow read it."""

    def __init__(self, root: Path) -> None:
        folder = max(root.glob("revisions/0*"))
        self.spec = json.loads((folder / "manifest.json").read_bytes())["spec"]
        self.records, self.captions = (
            pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("records", "captions")
        )
        self.stored = {i: record for i, record in enumerate(self.records) if record["status"] == "stored"}
        self.arrays = {}
        for path in root.rglob("zarr.json"):
            if json.loads(path.read_bytes())["node_type"] == "array":
                self.arrays[path.parent.relative_to(root).as_posix()] = np.asarray(zarr.open_array(path.parent)[:])

    def images(self, i: int) -> dict[str, np.ndarray]:
        """Rows of a record, by the path of each array of its bucket."""
        prefix, row = f"buckets/{self.records[i]['bucket']}/", self.records[i]["row"]
        return {path: rows[row] for path, rows in self.arrays.items() if path.startswith(prefix)}

    @cached_property
    def texts(self) -> dict[str, dict[str, Any]]:
        unnamed = {"": self.spec["text"]} if self.spec["text"] else {}
        return unnamed | {one["name"]: one["spec"] for one in self.spec.get("texts", [])}

    def caption(self, name: str, i: int) -> list[np.ndarray]:
        """Rows of a caption of a text encoder: tokens, scales, pooled vector."""
        spec, folder = self.texts[name], f"captions/{name}".rstrip("/")
        suffix, row = f"_{name}" if name != next(iter(self.texts)) else "", self.captions[i]
        start = row[f"start{suffix}"]
        count = spec["max_tokens"] if spec.get("full_length") else row[f"num_tokens{suffix}"]
        parts = [self.arrays.get(f"{folder}/{array}") for array in ("embeddings", "scales")]
        rows = [part[start : start + count] for part in parts if part is not None]
        pooled, has_tokens = self.arrays.get(f"{folder}/pooled"), parts[0] is not None
        if pooled is not None:
            at = start // spec["max_tokens"] if has_tokens else start
            rows.append(pooled[at : at + 1])
        return rows


@pytest.fixture(scope="module", params=STORES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LatentStore, Reference]:
    folder = tmp_path_factory.mktemp("conformance")
    make, arguments = STORES[request.param]
    root = make(request, folder / "store")
    if "remote" in arguments:
        largest = max(path.stat().st_size for path in root.glob("*/**/c/**/*") if path.is_file())
        remote = {
            "folder": folder / "local",
            "capacity_gib": arguments["remote"]["capacity_gib"] or 3 * largest / 2**30,
        }
        return LatentStore(f"file://{root}", **arguments | {"remote": remote}), Reference(root)
    return LatentStore(root, **arguments), Reference(root)


def equal(found: Any, wanted: Any) -> None:
    if getattr(found, "dtype", None) == torch.bfloat16:
        found = found.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(np.asarray(found), wanted, strict=True)


def test_every_record_has_the_rows_that_its_table_names(opened: tuple[LatentStore, Reference]) -> None:
    store, reference = opened
    assert len(store) == len(reference.stored) > 4
    assert store.records.to_pylist() == reference.records
    rng = np.random.default_rng(0)
    for bucket in store.buckets:
        index = store.index(bucket)
        assert index.records.tolist() == [i for i, one in reference.stored.items() if one["bucket"] == bucket] or (
            np.all(np.diff(index.rows) > 0)
        )
        order = rng.permutation(len(index))
        wanted = [reference.images(int(index.records[place])) for place in order]
        for path in wanted[0]:
            rows = index.rows[order]
            equal(store.array(path).take(rows), np.stack([one[path] for one in wanted]))
            equal(store.array(path)[int(rows[0])], wanted[0][path])
    for i, record in reference.stored.items():
        found = store.record(record["key"])
        assert (found.index, found.label, list(found.caption_ids)) == (i, record["label"], record["caption_ids"])


def test_every_caption_has_the_rows_that_its_table_names(opened: tuple[LatentStore, Reference]) -> None:
    store, reference = opened
    assert store.texts == list(reference.texts)
    for name in store.texts:
        tokens = store.text(name)
        for i in range(len(reference.captions)):
            for found, wanted in zip(tokens.stored_rows(i), reference.caption(name, i), strict=True):
                equal(found, wanted)
        for found, path in zip(tokens.stored_null_rows, ("null", "null_scales", "null_pooled"), strict=False):
            folder = f"captions/{name}".rstrip("/")
            if f"{folder}/{path}" in reference.arrays:
                equal(found, reference.arrays[f"{folder}/{path}"])


@pytest.mark.parametrize("text", ["padded", "packed"])
def test_an_epoch_has_every_record_once_with_all_its_rows(opened: tuple[LatentStore, Reference], text: Any) -> None:
    store, reference = opened
    batches = list(make_loader(store, global_batch=4, seed=3, text=text, check="always"))
    if store.remote and store.folder.access == "pread":
        assert store.remote.num_evicted > 0
    assert sorted(i for batch in batches for i in batch.records.tolist()) == sorted(reference.stored)
    for batch in batches:
        for place, i in enumerate(batch.records.tolist()):
            check_record(batch, place, reference, i)


def check_record(batch: Batch, place: int, reference: Reference, i: int) -> None:
    record, images = reference.records[i], reference.images(i)
    prefix, latents = f"buckets/{batch.bucket}/", reference.spec["latent"]["array"]
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
        assert len(stored) == len(reference.caption(name, chosen[0]))
        chosen = [one for one in chosen if all(map(same, stored, reference.caption(name, one)))]
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


def test_ranks_resumes_and_copies_read_the_same(opened: tuple[LatentStore, Reference]) -> None:
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
