"""A store of several text encoders and features, some of them added, as others read it: by FORMAT.md alone, by Zarr."""

from __future__ import annotations

import warnings
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
import zarr
from making import no_progress
from page_reader import PageReader, folder_of
from stores import Everything

from leandit.datasets.maintenance.compact import compact
from leandit.datasets.store import LatentStore

STORES = pytest.mark.parametrize("name", ["grown", "compacted"])


@pytest.fixture(scope="module")
def compacted(everything: Everything, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compact") / "compacted"
    compact(everything.grown, path, progress=no_progress)
    return path


@pytest.fixture
def root(name: str, everything: Everything, request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue("compacted") if name == "compacted" else everything.grown


def equal(found: np.ndarray | None, wanted: np.ndarray) -> None:
    assert found is not None
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


@STORES
def test_a_reader_written_from_the_page_alone_reads_the_latents_of_every_record(root: Path) -> None:
    store, reader = LatentStore(root), PageReader(root)
    counts = dict.fromkeys(reader.manifest["buckets"], 0)
    for record in reader.stored:
        bucket, row = record["bucket"], record["row"]
        counts[bucket] += 1
        (latents, flipped), checksum = reader.latents(record)
        assert checksum == record["checksum"]
        assert store.record(record["key"]).row == row
        equal(latents, store.latents(bucket)[row])
        equal(flipped, store.flipped_latents(bucket)[row])
    assert counts == reader.manifest["buckets"] == store.buckets


@STORES
def test_a_reader_written_from_the_page_alone_reads_the_captions_of_every_encoder(root: Path) -> None:
    store, reader = LatentStore(root), PageReader(root)
    assert list(reader.texts) == store.texts == ["", "pair", "vector", "llm"]
    assert len(reader.captions) == reader.manifest["num_captions"] == store.captions.num_rows > 4
    for name in reader.texts:
        suffix, ours = f"_{name}" if name else "", store.text(name)
        for i, caption in enumerate(reader.captions):
            tokens, pooled, checksum = reader.caption(name, i)
            assert checksum == caption[f"checksum{suffix}"]
            if name == "vector":
                assert tokens is None
            else:
                equal(tokens, ours[i])
                assert len(ours[i]) == (60 if name == "pair" else caption[f"num_tokens{suffix}"])
            if name in ("pair", "vector"):
                equal(pooled, ours.pooled_vector(i))
            else:
                assert pooled is None
        tokens, pooled = reader.null(name)
        if tokens is not None:
            equal(tokens, ours.null)
        if pooled is not None:
            equal(pooled, ours.null_pooled)
        assert (tokens is None, pooled is None) == (name == "vector", name in ("", "llm"))


@STORES
def test_the_index_has_the_numbers_of_the_tables(root: Path) -> None:
    reader, size_px = PageReader(root), lambda name: [int(side) for side in name.split("x")]
    places = sorted(
        (size_px(record["bucket"]), record["row"], position)
        for position, record in enumerate(reader.records)
        if record["status"] == "stored"
    )
    stored = [reader.records[position] for *_, position in places]
    ids, of_bucket = [record["caption_ids"] for record in stored], dict[str, list[int]]()
    for record in stored:
        of_bucket.setdefault(record["bucket"], []).append(len(record["caption_ids"]))
    wanted = {
        "rows": [row for _, row, _ in places],
        "records": [position for *_, position in places],
        "labels": [record["label"] for record in stored],
        "caption_ids": [one for some in ids for one in some],
        "caption_starts": [start for some in of_bucket.values() for start in (0, *accumulate(some))],
        "keys": [xxhash.xxh3_64_intdigest(record["key"].encode(), seed=0x686F6C64) for record in reader.records],
    }
    for name in ("checksum", *(f"checksum_{name}" for name in reader.features)):
        wanted[name] = [record[name] or 0 for record in reader.records]
    for name, spec in reader.texts.items():
        suffix = f"_{name}" if name != next(iter(reader.texts)) else ""
        starts, tokens, sums = (
            [one[f"{what}{suffix}"] for one in reader.captions] for what in ("start", "num_tokens", "checksum")
        )
        wanted[f"caption_start{suffix}"] = starts
        wanted[f"caption_length{suffix}"] = [spec["max_tokens"]] * len(tokens) if spec.get("full_length") else tokens
        wanted[f"caption_checksum{suffix}"] = [one or 0 for one in sums]
    assert {path.stem for path in folder_of(root, reader.revision).glob("index/*")} == wanted.keys()
    for name, numbers in wanted.items():
        assert reader.index(name, len(numbers)).tolist() == numbers, name


@STORES
def test_such_a_reader_reads_the_features_of_every_record(root: Path) -> None:
    store, reader = LatentStore(root), PageReader(root)
    assert list(reader.features) == store.features == ["dino", "grid", "token"]
    outputs = {"dino": {"patches", "cls"}, "grid": {"patches"}, "token": {"cls"}}
    stored = [record for record in reader.records if record["status"] == "stored"]
    assert len(stored) == len(store) >= 8
    assert len({record["revision"] for record in stored}) == {"grown": 3}.get(root.name, 1)
    for name, of_feature in outputs.items():
        for record in stored:
            found, checksum = reader.feature(name, record)
            assert found.keys() == of_feature | {f"{output}_flip" for output in of_feature}
            assert checksum == record[f"checksum_{name}"]
            ours, row = store.feature(name, record["bucket"]), store.record(record["key"]).row
            for output in of_feature:
                equal(found[output], ours.row(row, output))
                assert not np.array_equal(found[output], found[f"{output}_flip"])
            if "patches" in of_feature:
                assert len(found["patches"]) == reader.num_patches(name, record["bucket"])


def zarr_arrays(root: Path) -> dict[str, Any]:
    """All arrays below a root group by their path, as zarr-python lists them."""
    with warnings.catch_warnings():  # it wonders about tables, commit records and plans
        warnings.simplefilter("ignore")
        members = dict(zarr.open_group(root, mode="r").members(max_depth=None))
    return {path: member for path, member in members.items() if isinstance(member, zarr.Array)}


@STORES
def test_zarr_opens_the_root_group_and_lists_every_array_and_the_tables_have_their_columns(root: Path) -> None:
    reader, found = PageReader(root), zarr_arrays(root)
    assert found.keys() == reader.layouts.keys()
    assert {"captions/pair/pooled", "captions/vector/null_pooled", "captions/llm/scales"} <= found.keys()
    assert {"buckets/64x64/features/grid/patches_flip", "buckets/64x64/features/token/cls_scales"} <= found.keys()
    for path, array in found.items():  # the numbers of all rows that exist are those of the page
        layout = reader.layouts[path]
        assert (list(array.shape), array.dtype) == (layout["shape"], layout["dtype"])
        assert array.attrs.asdict() == ({"bits_of": "bfloat16"} if layout["dtype"] == "uint16" else {})
        for _, first, end in layout["ranges"]:
            np.testing.assert_array_equal(array[first:end], reader.array(path)[first:end])
    group = LatentStore(root).zarr
    assert group.read_only
    assert group.attrs.asdict() == {"leandit": reader.spec}
    folder, results = folder_of(root, reader.revision), ("checksum", "min_cosine", "max_error")
    of_features = [f"{result}_{name}" for name in ("dino", "grid", "token") for result in results]
    assert pq.read_schema(folder / "records.parquet").names[-9:] == of_features
    names, of_texts = pq.read_schema(folder / "captions.parquet").names, ("num_tokens", "truncated", "start", *results)
    assert names[:2] == ["text", "revision"]
    assert names[-18:] == [f"{column}_{name}" for name in ("pair", "vector", "llm") for column in of_texts]


def test_added_arrays_have_the_rows_of_all_revisions(everything: Everything) -> None:
    before, reader = PageReader(everything.before), PageReader(everything.grown)
    (layout, late) = (reader.layouts[f"buckets/64x64/{name}"] for name in ("moments", "features/grid/patches"))
    assert [first for first, *_ in layout["ranges"]] == [1, 2, 4]
    assert [first for first, *_ in late["ranges"]] == [3, 3, 4]
    assert [rows for _, *rows in layout["ranges"]] == [rows for _, *rows in late["ranges"]]
    for path, array in before.layouts.items():  # what an earlier revision wrote stays as it was
        ranges = reader.layouts[path]["ranges"]
        assert ranges[: len(array["ranges"])] == array["ranges"]
        assert all(first >= array["shape"][0] for _, first, _ in ranges[len(array["ranges"]) :])
    for entry in before.manifest["files"]:
        assert (everything.grown / entry["path"]).read_bytes() == (everything.before / entry["path"]).read_bytes()


@pytest.mark.parametrize("revision", [1, 2, 3])
def test_an_earlier_revision_is_read_as_it_was(revision: int, everything: Everything) -> None:
    kept = {1: everything.before, 2: everything.before, 3: everything.added}[revision]
    for open_it in (PageReader, LatentStore):
        open_it(kept, revision=revision)
    then, now = (PageReader(root, revision=revision) for root in (kept, everything.grown))
    assert now.manifest == then.manifest
    store = LatentStore(everything.grown, revision=revision)
    assert (store.root_hash, len(store)) == (then.manifest["root_hash"], len(then.stored))
    for record in then.stored:
        (row, *_), checksum = now.latents(record)
        assert checksum == record["checksum"]
        equal(row, store.latents(record["bucket"])[record["row"]])
    for name in then.texts:
        for i in range(len(then.captions)):
            if then.texts[name].get("output") != "pooled":
                equal(now.caption(name, i)[0], store.text(name)[i])
            assert now.caption(name, i)[2] == then.caption(name, i)[2]
    assert store.features == list(then.features) == (["dino"] if revision < 3 else ["dino", "grid", "token"])
