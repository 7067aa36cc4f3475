"""A reader of stores written from FORMAT.md alone: no Zarr, no leandit.

If it has to change, so must every reader that somebody wrote in another language: a FORMAT break.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import xxhash


def canonical_hash(value: Any) -> str:
    """As section 5 says."""
    canonical = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    return hashlib.sha256(canonical.encode()).hexdigest()


def read_rows(store: Path, path: str) -> Iterator[np.ndarray]:
    """All rows of an array without a codec, as section 1 describes it; those that do not exist hold the fill value."""
    meta = json.loads((store / path / "zarr.json").read_bytes())
    (sharding,) = [codec["configuration"] for codec in meta["codecs"]]
    assert [codec["name"] for codec in sharding["codecs"]] == ["bytes"]
    num_rows, *shape = meta["shape"]
    shard_rows, chunk_rows = meta["chunk_grid"]["configuration"]["chunk_shape"][0], sharding["chunk_shape"][0]
    dtype = np.dtype(meta["data_type"]).newbyteorder("<")
    fill = np.full(shape, float(meta["fill_value"]), dtype)
    row_bytes = int(np.prod(shape)) * dtype.itemsize
    chunks = shard_rows // chunk_rows
    for first in range(0, num_rows, shard_rows):
        name = "/".join(["c", str(first // shard_rows), *["0"] * len(shape)])
        data = (store / path / name).read_bytes()
        index = list(struct.iter_unpack("<QQ", data[-16 * chunks - 4 : -4]))
        for row in range(min(shard_rows, num_rows - first)):
            offset, length = index[row // chunk_rows]
            if (offset, length) == (2**64 - 1, 2**64 - 1):
                yield fill
                continue
            begin = offset + row % chunk_rows * row_bytes
            assert begin == row * row_bytes
            yield np.frombuffer(data, dtype, int(np.prod(shape)), begin).reshape(shape)


def folder_of(store: Path, revision: int) -> Path:
    """Folder of a revision."""
    return store / "revisions" / f"{revision:06d}"


def open_by_the_page(store: Path) -> tuple[int, dict[str, Any]]:
    """The newest complete revision and its manifest, checked as section 5 asks."""
    revision = max(int(path.parent.name) for path in store.glob("revisions/[0-9]*/manifest.json"))
    folder = folder_of(store, revision)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    said = dict(manifest)
    assert said.pop("root_hash") == canonical_hash(said)
    assert (manifest["format_version"], manifest["revision"]) == (1, revision)
    shards = set[str]()
    for array in manifest["arrays"]:
        zeros = "/0" * (len(array["shape"]) - 1)
        for _, first, end in array["ranges"]:
            assert first % array["shard_rows"] == 0
            numbers = range(first // array["shard_rows"], -(-end // array["shard_rows"]))
            shards |= {f"{array['path']}/c/{number}{zeros}" for number in numbers}
        assert array["shape"][0] == array["ranges"][-1][-1]
    tables = {f"revisions/{revision:06d}/{name}.parquet" for name in ("records", "captions")}
    assert {entry["path"] for entry in manifest["files"]} == shards | tables
    for entry in manifest["files"]:
        assert not entry["path"].startswith("/")
        assert ".." not in entry["path"].split("/")
        data = (store / entry["path"]).read_bytes()
        assert len(data) == entry["bytes"]
        if entry["path"].endswith(".parquet"):
            assert xxhash.xxh3_128_hexdigest(data) == entry["xxh3_128"]
    for path in folder.glob("*.*"):
        assert (folder / "twin" / path.name).read_bytes() == path.read_bytes()
    return revision, manifest


class PageReader:
    """The newest revision of a store: its tables, and numbers of its features and captions."""

    def __init__(self, store: Path) -> None:
        self._store = store
        revision, self.manifest = open_by_the_page(store)
        folder = folder_of(store, revision)
        self.about = self.manifest["spec"]
        assert json.loads((store / "zarr.json").read_bytes())["attributes"] == {"leandit": self.about}
        self.records = pq.read_table(folder / "records.parquet").to_pylist()
        self.captions = pq.read_table(folder / "captions.parquet").to_pylist()
        self._arrays: dict[str, np.ndarray] = {}

    def array(self, path: str) -> np.ndarray:
        """An array as stored."""
        if path not in self._arrays:
            self._arrays[path] = np.stack(list(read_rows(self._store, path)))
        return self._arrays[path]

    def numbers(self, path: str, scales: str) -> np.ndarray:
        """An array of tokens as the numbers that they are (section 1).

        Args:
          scales: the array of the factors of int8 tokens.
        """
        rows = self.array(path)
        if rows.dtype == np.int8:
            return rows * self.array(scales)[..., None]
        if rows.dtype != np.uint16:
            return rows
        metadata = json.loads((self._store / path / "zarr.json").read_bytes())
        assert metadata["attributes"] == {"bits_of": "bfloat16"}
        wide = [struct.unpack("<f", b"\0\0" + number.tobytes())[0] for number in rows.ravel()]
        return np.array(wide, np.float32).reshape(rows.shape)

    @cached_property
    def texts(self) -> dict[str, dict[str, Any]]:
        """The specs of the text encoders by name, "" for that of ``text``, in order."""
        found = {"": self.about["text"]} if self.about["text"] else {}
        return found | {one["name"]: one["spec"] for one in self.about.get("texts", [])}

    def caption(self, name: str, i: int) -> tuple[np.ndarray | None, np.ndarray | None, int]:
        """Tokens and pooled vector of a caption as numbers, and the checksum of its rows."""
        spec, folder = self.texts[name], f"captions/{name}".rstrip("/")
        suffix = f"_{name}" if name else ""
        start, count = (self.captions[i][f"{column}{suffix}"] for column in ("start", "num_tokens"))
        output, digest, tokens, pooled = spec.get("output", "tokens"), xxhash.xxh3_64(), None, None
        if output != "pooled":
            rows = slice(start, start + (spec["max_tokens"] if spec.get("full_length") else count))
            tokens = self.numbers(f"{folder}/embeddings", f"{folder}/scales")[rows]
            for array in ["embeddings"] + ["scales"] * (spec["dtype"] == "int8"):
                digest.update(self.array(f"{folder}/{array}")[rows].tobytes())
        if output != "tokens":
            row = start // spec["max_tokens"] if output == "both" else start
            pooled = self.numbers(f"{folder}/pooled", "")[row]
            digest.update(self.array(f"{folder}/pooled")[row].tobytes())
        return tokens, pooled, digest.intdigest()

    def null(self, name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Tokens and pooled vector of the empty caption as numbers."""
        output, folder = self.texts[name].get("output", "tokens"), f"captions/{name}".rstrip("/")
        tokens = None if output == "pooled" else self.numbers(f"{folder}/null", f"{folder}/null_scales")
        pooled = None if output == "tokens" else self.numbers(f"{folder}/null_pooled", "")[0]
        return tokens, pooled

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """The specs of the features by name, in order."""
        return {one["name"]: one["spec"] for one in self.about.get("features", [])}

    def feature(self, name: str, record: dict[str, Any]) -> tuple[dict[str, np.ndarray], int]:
        """Patches and class token of a record as numbers, those of the flipped picture too; and their checksum."""
        spec, found, digest = self.features[name], {}, xxhash.xxh3_64()
        folder = f"buckets/{record['bucket']}/features/{name}"
        row = record["row"]
        for suffix in ("", "_flip")[: 1 + self.about["latent"]["flip"]]:
            for output, scales in (("patches", "patch_scales"), ("cls", "cls_scales")):
                if spec["output"] not in (output, "both"):
                    continue
                paths = [f"{folder}/{output}{suffix}", f"{folder}/{scales}{suffix}"]
                found[output + suffix] = self.numbers(*paths)[row]
                for path in paths[: 1 + (spec["dtype"] == "int8")]:
                    digest.update(self.array(path)[row].tobytes())
        return found, digest.intdigest()

    def num_patches(self, name: str, bucket: str) -> int:
        """Tokens of a picture in a bucket, by the formula of section 1; halves round up."""
        spec, count = self.features[name], 1
        for side_px in map(int, bucket.split("x")):
            count *= max(1, int(side_px * spec["resolution_px"] / (spec["images_px"] * spec["patch_px"]) + 0.5))
        return count
