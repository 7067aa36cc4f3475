"""A store of several text encoders and features, some of them added, as others read it: by FORMAT.md alone, by Zarr."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr
from everything import Everything
from making import no_progress
from page_reader import PageReader, folder_of

from leandit.datasets.format.layout import revision_prefix
from leandit.datasets.maintenance.compact import compact
from leandit.datasets.store import LatentStore

STORES = pytest.mark.parametrize("name", ["added", "grown", "compacted"])


@pytest.fixture(scope="module")
def compacted(everything: Everything, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compact") / "compacted"
    compact(everything.grown, path, progress=no_progress)
    return path


@pytest.fixture
def root(name: str, everything: Everything, request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue("compacted") if name == "compacted" else getattr(everything, name)


def equal(found: np.ndarray | None, wanted: np.ndarray) -> None:
    assert found is not None
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


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
def test_such_a_reader_reads_the_features_of_every_record(root: Path) -> None:
    store, reader = LatentStore(root), PageReader(root)
    assert list(reader.features) == store.features == ["dino", "grid", "token"]
    outputs = {"dino": {"patches", "cls"}, "grid": {"patches"}, "token": {"cls"}}
    stored = [record for record in reader.records if record["status"] == "stored"]
    assert len(stored) == len(store) >= 8
    assert len({record["revision"] for record in stored}) == {"added": 2, "grown": 3}.get(root.name, 1)
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
def test_zarr_opens_the_root_group_and_lists_every_array(root: Path) -> None:
    reader, found = PageReader(root), zarr_arrays(root)
    listed = {entry["path"].removesuffix("/zarr.json") for entry in reader.manifest["files"]}
    listed = {path for path in listed if (root / path / "zarr.json").is_file()}
    arrays = {path for path in listed if json.loads((root / path / "zarr.json").read_bytes())["node_type"] == "array"}
    assert found.keys() == arrays
    inside = {path.removeprefix(revision_prefix(n)) for n in reader.manifest["stack"] for path in arrays}
    assert {"captions/pair/pooled", "captions/vector/null_pooled", "captions/llm/scales"} <= inside
    assert {"buckets/64x64/features/grid/patches_flip", "buckets/64x64/features/token/cls_scales"} <= inside
    for path, array in found.items():  # no shard is missing, and the numbers are those of the page
        revision = next(n for n in reversed(reader.manifest["stack"]) if path.startswith(revision_prefix(n)))
        within = path.removeprefix(revision_prefix(revision))
        np.testing.assert_array_equal(array[:], reader.array(revision, within))
    group = zarr.open_group(root, mode="r")
    said = json.loads((root / "zarr.json").read_bytes())["attributes"]
    assert group.attrs.asdict() == said
    names = [one["name"] for one in said["leandit"].get("features", [])]
    assert names == (["dino", "grid", "token"] if root.name == "compacted" else ["dino"])  # the first revision's


@STORES
def test_the_tables_have_the_columns_that_the_page_names_for_each_encoder(root: Path) -> None:
    reader = PageReader(root)
    folder = folder_of(root, reader.manifest["revision"])
    names, results = pq.read_schema(folder / "records.parquet").names, ("checksum", "min_cosine", "max_error")
    of_features = [f"{result}_{name}" for name in ("dino", "grid", "token") for result in results]
    assert names[-9:] == of_features
    names = pq.read_schema(folder / "captions.parquet").names
    of_texts = ("num_tokens", "truncated", *results)
    assert names[-15:] == [f"{column}_{name}" for name in ("pair", "vector", "llm") for column in of_texts]
