"""FORMAT.md is the norm: it names all that the writer makes, and a reader written from it alone reads a store."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from making import CPU, caption_recipe, make_caption_folder, no_progress
from pydantic import BaseModel

from leandit.datasets.layout import OFFSETS
from leandit.datasets.schema import (
    FORMAT_VERSION,
    REJECT_REASONS,
    CommitRecord,
    EncoderIdentity,
    FileEntry,
    ImageSpec,
    LatentSpec,
    Manifest,
    Reject,
    StoreSpec,
    TextSpec,
)
from leandit.datasets.shards import CODECS
from leandit.datasets.store import LatentStore
from leandit.precompute.pipeline import precompute

TEXT = (resources.files("leandit.datasets") / "FORMAT.md").read_text()
_, *PARTS = re.split(r"^## (\d)\. .*$", TEXT, flags=re.MULTILINE)
SECTION = dict(zip(map(int, PARTS[::2]), PARTS[1::2], strict=True))
TREE = TEXT.split("```")[1]


def quoted(text: str) -> set[str]:
    """All words between backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def row_of(section: int, key: str) -> str:
    """The row of a section's table that begins with a key (or with a list that holds it)."""
    rows = [line for line in SECTION[section].splitlines() if line.startswith("|")]
    (row,) = [line for line in rows if key in quoted(line.split("|")[1])]
    return row


def paragraph_of(name: str) -> str:
    """The paragraph of section 5 that begins with "A/The **name**"."""
    (found,) = [p for p in SECTION[5].split("\n\n") if re.match(rf"\w+ \*\*{name}\*\*", p)]
    return found


def keys_of(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def general(path: str) -> str:
    """A path of a store with its bucket, part and shard number as FORMAT.md writes them."""
    path = re.sub(r"\b\d+x\d+\b", "HxW", path)
    return re.sub(r"commits/.*/\d{6}", "commits/PART/NNNNNN", path)


@pytest.fixture(scope="module")
def flipped_store(caption_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    path = tmp_path_factory.mktemp("flipped") / "store"
    precompute(
        caption_recipe("vae.flip=true"),
        source_path=caption_folder,
        store_path=path,
        device=CPU,
        progress=no_progress,
    )
    return LatentStore(path)


@pytest.mark.parametrize("name", ["label_store", "flipped_store"])
def test_every_path_that_the_writer_makes_is_in_the_tree(name: str, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue(name).path
    named = {line.split()[0] for line in TREE.splitlines() if line.startswith("  ")}
    plan = next(line for line in TREE.splitlines() if line.startswith("  plan/"))
    assert "plan.json, records.parquet, captions.parquet" in plan
    named |= {"plan/plan.json", "plan/records.parquet", "plan/captions.parquet"}
    made = {general(path.relative_to(root).as_posix()) for path in root.rglob("*") if path.is_file()}
    for path in made:
        array = re.sub(r"/(zarr\.json|c/.*)$", "", path)  # the metadata and the shards of an array
        assert path in named or array in named, path
    if name == "flipped_store":
        assert {"buckets/HxW/moments_flip/zarr.json", "captions/null/zarr.json"} <= made


def test_both_names_of_the_latents_are_in_the_table_of_arrays() -> None:
    assert {"moments", "latents", "_flip"} <= quoted(row_of(1, "moments"))
    for name in ("embeddings", "null", *OFFSETS.split("/")[1:], "lengths"):
        assert name in quoted(row_of(1, name))
    assert set(CODECS) - {"none"} <= {"zstd", "gzip", "blosc-lz4", "blosc-zstd"}
    assert {"zstd", "gzip", "blosc", "lz4"} <= quoted(SECTION[1])


def test_every_key_of_the_attribute_is_named() -> None:
    for key in keys_of(StoreSpec):
        assert key in quoted(row_of(2, key)), key


@pytest.mark.parametrize(
    ("key", "model"),
    [("images", ImageSpec), ("latent", LatentSpec), ("text", TextSpec), ("vae", EncoderIdentity)],
)
def test_every_nested_key_of_the_attribute_is_named_in_its_row(key: str, model: type[BaseModel]) -> None:
    assert keys_of(model) - quoted(row_of(2, key)) == set()
    assert row_of(2, "vae") == row_of(2, "text_encoder")


def test_the_store_has_the_keys_that_are_named(caption_store: LatentStore) -> None:
    found = json.loads((caption_store.path / "zarr.json").read_bytes())["attributes"]["leandit"]
    assert found.keys() == keys_of(StoreSpec)
    assert found["format_version"] == FORMAT_VERSION
    assert TEXT.startswith(f"# The store on disk, format version {FORMAT_VERSION}\n")
    for key, model in (
        ("images", ImageSpec),
        ("latent", LatentSpec),
        ("text", TextSpec),
        ("text_encoder", EncoderIdentity),
    ):
        assert found[key].keys() == keys_of(model)


def test_every_kind_of_latent_is_explained() -> None:
    kinds = LatentSpec.model_fields["kind"].annotation.__args__  # pyright: ignore
    assert all(kind in quoted(row_of(3, kind)) for kind in kinds)


def test_the_fingerprint_is_made_of_what_is_said(caption_store: LatentStore) -> None:
    (said,) = [p for p in SECTION[2].split("\n\n") if p.startswith("The fingerprint hashes")]
    assert quoted(said) - {"model", "revision"} == set(caption_store.spec.identity())
    assert caption_store.spec.with_fingerprint().fingerprint == caption_store.spec.fingerprint


ARROW_OF = {"string": pa.string(), "int64": pa.int64(), "int32": pa.int32(), "uint64": pa.uint64()}
ARROW_OF |= {"bool": pa.bool_(), "list of int32": pa.list_(pa.int32())}


def test_every_column_of_the_records_is_named_with_its_type(caption_store: LatentStore) -> None:
    for field in pq.read_schema(caption_store.path / "records.parquet"):
        _, names, types, *_ = row_of(4, field.name).split("|")
        kinds = [kind.strip() for kind in types.split(",")]
        kind = kinds[min(re.findall(r"`(\w+)`", names).index(field.name), len(kinds) - 1)]
        assert ARROW_OF[kind] == field.type, field.name


def test_every_column_of_the_captions_is_named_with_its_type(caption_store: LatentStore) -> None:
    (said,) = [p for p in SECTION[4].split("\n\n") if p.startswith("`captions.parquet`")]
    for field in pq.read_schema(caption_store.path / "captions.parquet"):
        kind = re.search(rf"`{field.name}` \((\w+)", said)
        assert kind, field.name
        assert ARROW_OF[kind[1]] == field.type


def test_the_reject_reasons_are_the_closed_list() -> None:
    (said,) = [p for p in SECTION[4].split("\n\n") if p.startswith("Reasons:")]
    assert quoted(said) == set(REJECT_REASONS)
    assert {"scan", "decode", "encode"} <= quoted(row_of(4, "stage"))
    assert {"stored", "rejected"} <= quoted(row_of(4, "status"))


def test_every_key_of_a_commit_record_and_of_the_manifest_is_named(caption_store: LatentStore) -> None:
    commit, manifest = quoted(paragraph_of("commit record")), quoted(paragraph_of("manifest"))
    assert keys_of(CommitRecord) | keys_of(FileEntry) | keys_of(Reject) <= commit
    assert keys_of(Manifest) <= manifest
    assert json.loads((caption_store.path / "manifest.json").read_bytes()).keys() == keys_of(Manifest)
    for path in (caption_store.path / "commits").rglob("*.json"):
        assert json.loads(path.read_bytes()).keys() == keys_of(CommitRecord)


def test_the_root_hash_and_the_files_are_made_as_said(caption_store: LatentStore) -> None:
    content = json.loads((caption_store.path / "manifest.json").read_bytes())
    root_hash = content.pop("root_hash")
    canonical = json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    assert hashlib.sha256(canonical.encode()).hexdigest() == root_hash == caption_store.root_hash
    listed = [entry["path"] for entry in content["files"]]
    there = {p.relative_to(caption_store.path).as_posix() for p in caption_store.path.rglob("*") if p.is_file()}
    outside = {path for path in there if path.startswith(("commits/", "plan/")) or path == "manifest.json"}
    assert listed == sorted(there - outside)
    assert content["num_planned"] == content["num_stored"] + content["num_rejected"]


# The reader below is written from FORMAT.md alone: no Zarr, no leandit. If it has to change, so must every reader that
# somebody wrote in another language: a FORMAT break.


def read_rows(store: Path, path: str) -> Iterator[np.ndarray]:
    """All rows of an array without a codec, as section 1 describes it."""
    meta = json.loads((store / path / "zarr.json").read_bytes())
    (sharding,) = [codec["configuration"] for codec in meta["codecs"]]
    assert [codec["name"] for codec in sharding["codecs"]] == ["bytes"]
    num_rows, *shape = meta["shape"]
    shard_rows, chunk_rows = meta["chunk_grid"]["configuration"]["chunk_shape"][0], sharding["chunk_shape"][0]
    dtype = np.dtype(meta["data_type"]).newbyteorder("<")
    row_bytes = int(np.prod(shape)) * dtype.itemsize
    chunks = shard_rows // chunk_rows
    for first in range(0, num_rows, shard_rows):
        name = "/".join(["c", str(first // shard_rows), *["0"] * len(shape)])
        data = (store / path / name).read_bytes()
        index = list(struct.iter_unpack("<QQ", data[-16 * chunks - 4 : -4]))
        for row in range(min(shard_rows, num_rows - first)):
            offset, length = index[row // chunk_rows]
            assert (offset, length) != (2**64 - 1, 2**64 - 1), "the chunk is absent"
            begin = offset + row % chunk_rows * row_bytes
            assert begin == row * row_bytes
            yield np.frombuffer(data, dtype, int(np.prod(shape)), begin).reshape(shape)


def test_a_reader_written_from_the_page_alone_reads_every_row(flipped_store: LatentStore) -> None:
    root = flipped_store.path
    attribute = json.loads((root / "zarr.json").read_bytes())["attributes"]["leandit"]
    manifest = json.loads((root / "manifest.json").read_bytes())
    assert manifest["buckets"] == dict(flipped_store.buckets)
    for bucket, count in manifest["buckets"].items():
        ours: dict[str, Any] = {"": flipped_store.latents(bucket), "_flip": flipped_store.flipped_latents(bucket)}
        for suffix, array in ours.items():
            rows = np.stack(list(read_rows(root, f"buckets/{bucket}/{attribute['latent']['array']}{suffix}")))
            assert len(rows) == count
            np.testing.assert_array_equal(rows, array.read(0, count))
    tokens = np.stack(list(read_rows(root, "captions/embeddings")))
    offsets, lengths = (np.stack(list(read_rows(root, f"captions/{name}"))) for name in ("offsets", "lengths"))
    for i, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        np.testing.assert_array_equal(tokens[offset : offset + length], flipped_store.caption_embedding(i))
    np.testing.assert_array_equal(np.stack(list(read_rows(root, "captions/null"))), flipped_store.null_caption)


def test_such_a_reader_reads_an_array_of_several_shards(
    encode: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leandit.datasets.layout.MAX_SHARD_ROWS", 2)
    encode(caption_recipe(), make_caption_folder(tmp_path / "source", count=13), tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    rows = np.stack(list(read_rows(store.path, "buckets/64x64/moments")))
    assert len(list((store.path / "buckets/64x64/moments/c").iterdir())) == 3
    np.testing.assert_array_equal(rows, store.latents("64x64").read(0, 5))
