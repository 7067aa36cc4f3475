"""A reader of stores from FORMAT.md alone: if it has to change, so must readers in other languages (FORMAT break)."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash


def canonical_hash(value: Any) -> str:
    """As section 5 says."""
    canonical = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    return hashlib.sha256(canonical.encode()).hexdigest()


def folder_of(store: Path, revision: int) -> Path:
    """Folder of a revision."""
    return store / "revisions" / f"{revision:06d}"


def shard_numbers(array: dict[str, Any]) -> list[int]:
    """Of the shards that the ranges of an array imply."""
    size = array["shard_rows"]
    return [n for _, first, end in array["ranges"] for n in range(first // size, -(-end // size))]


def checksum(rows: Iterable[np.ndarray]) -> int:
    """Of some rows, one after the other."""
    return xxhash.xxh3_64_intdigest(b"".join(row.tobytes() for row in rows))


def numbers(rows: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
    """Stored tokens as the numbers that they are (section 1), with the factors of int8 tokens."""
    if rows.dtype == np.int8:
        assert scales is not None
        return rows * scales[..., None]
    if rows.dtype != np.uint16:
        return rows
    wide = [struct.unpack("<f", b"\0\0" + number.tobytes())[0] for number in rows.ravel()]
    return np.array(wide, np.float32).reshape(rows.shape)


class PageReader:
    """A revision of a store, the newest one unless another is given: its manifest, tables, and numbers.

    Opening it makes the checks of section 5; an AssertionError is a store that does not fit.
    """

    def __init__(self, store: Path, revision: int = 0) -> None:
        self.store, self._arrays = store, dict[str, np.ndarray]()
        self.revision = revision or max(int(path.parent.name) for path in store.glob("revisions/*/manifest.json"))
        folder = folder_of(store, self.revision)
        self.manifest = json.loads((folder / "manifest.json").read_bytes())
        said = dict(self.manifest)
        assert said.pop("root_hash") == canonical_hash(said)
        assert (self.manifest["format_version"], self.manifest["revision"]) == (1, self.revision)
        self.spec, self.layouts = self.manifest["spec"], {one["path"]: one for one in self.manifest["arrays"]}
        self._files = {entry["path"]: entry for entry in self.manifest["files"]}
        assert not any(path.startswith("/") or ".." in path.split("/") for path in self._files)
        shards = {self._shard(array, n) for array in self.manifest["arrays"] for n in shard_numbers(array)}
        assert shards == {path for path in self._files if "/c/" in path}
        for path, entry in self._files.items():
            assert (store / path).stat().st_size == entry["bytes"]
        self.records, self.captions = self._table("records"), self._table("captions")

    def _shard(self, array: dict[str, Any], number: int) -> str:
        return "/".join([array["path"], "c", str(number), *["0"] * (len(array["shape"]) - 1)])

    def _table(self, name: str) -> list[dict[str, Any]]:
        path = f"revisions/{self.revision:06d}/{name}.parquet"
        assert xxhash.xxh3_128_hexdigest((self.store / path).read_bytes()) == self._files[path]["xxh3_128"]
        return pq.read_table(self.store / path).to_pylist()

    def index(self, name: str, count: int) -> np.ndarray:
        """The numbers of a file of the index; ``count``: how many they should be."""
        path = f"revisions/{self.revision:06d}/index/{name}.bin"
        data = (self.store / path).read_bytes()
        assert xxhash.xxh3_128_hexdigest(data) == self._files[path]["xxh3_128"]
        is_wide = len(data) == 8 * count
        found = np.frombuffer(data, "<u8" if name == "keys" or "checksum" in name else "<i8" if is_wide else "<i4")
        assert len(found) == count
        return found

    @property
    def index_names(self) -> set[str]:
        """Of the files of the index."""
        return {path.stem for path in folder_of(self.store, self.revision).glob("index/*")}

    @property
    def stored(self) -> list[dict[str, Any]]:
        """Rows of the records table that are stored."""
        return [record for record in self.records if record["status"] == "stored"]

    def array(self, path: str) -> np.ndarray:
        """An array as stored; rows that do not exist are 99."""
        if path not in self._arrays:
            layout = self.layouts[path]
            found = np.full(layout["shape"], 99, np.dtype(layout["dtype"]).newbyteorder("<"))
            for _, first, end in layout["ranges"]:
                assert first % layout["shard_rows"] == 0
                for row in range(first, end, layout["shard_rows"]):
                    part = found[row : min(end, row + layout["shard_rows"])]
                    part[:] = self._rows(layout, row // layout["shard_rows"], part)
            self._arrays[path] = found
        return self._arrays[path]

    def _rows(self, layout: dict[str, Any], number: int, like: np.ndarray) -> np.ndarray:
        """Rows of a shard, of the shape and dtype of ``like``."""
        data = (self.store / self._shard(layout, number)).read_bytes()
        index = data[-16 * (layout["shard_rows"] // layout["chunk_rows"]) - 4 : -4]
        assert google_crc32c.value(index) == struct.unpack("<I", data[-4:])[0]
        chunk_bytes, num_chunks = like[:1].nbytes * layout["chunk_rows"], -(-len(like) // layout["chunk_rows"])
        places = list(struct.iter_unpack("<QQ", index))
        assert set(places[num_chunks:]) <= {(2**64 - 1, 2**64 - 1)}
        if layout["codec"] == "zstd":
            chunks = [data[offset : offset + length] for offset, length in places[:num_chunks]]
            assert all(google_crc32c.value(one[:-4]) == struct.unpack("<I", one[-4:])[0] for one in chunks)
            data = b"".join(pa.decompress(one[:-4], chunk_bytes, "zstd", asbytes=True) for one in chunks)
        else:
            assert places[:num_chunks] == [(i * chunk_bytes, chunk_bytes) for i in range(num_chunks)]
        return np.frombuffer(data, like.dtype, like.size).reshape(like.shape)

    def images(self, record: dict[str, Any]) -> dict[str, np.ndarray]:
        """Rows of a record in all arrays of its bucket, by path, as stored."""
        prefix = f"buckets/{record['bucket']}/"
        return {path: self.array(path)[record["row"]] for path in self.layouts if path.startswith(prefix)}

    def latents(self, record: dict[str, Any]) -> tuple[list[np.ndarray], int]:
        """Latents of a record, those of the flipped image too; and their checksum."""
        path = f"buckets/{record['bucket']}/{self.spec['latent']['array']}"
        rows = [self.array(path + flip)[record["row"]] for flip in self._flips]
        return rows, checksum(rows)

    @property
    def _flips(self) -> tuple[str, ...]:
        return ("", "_flip")[: 1 + self.spec["latent"]["flip"]]

    @cached_property
    def texts(self) -> dict[str, dict[str, Any]]:
        """The specs of the text encoders by name, "" for that of ``text``, in order."""
        found = {"": self.spec["text"]} if self.spec["text"] else {}
        return found | {one["name"]: one["spec"] for one in self.spec.get("texts", [])}

    def caption_rows(self, name: str, i: int) -> dict[str, np.ndarray]:
        """Rows of a caption as stored, by array: tokens, scales, pooled vector."""
        spec, folder, row = self.texts[name], f"captions/{name}".rstrip("/"), self.captions[i]
        suffix = "" if name == next(iter(self.texts)) else f"_{name}"  # the columns of the first one have none
        start, count, found = row[f"start{suffix}"], row[f"num_tokens{suffix}"], {}
        output = spec.get("output", "tokens")
        if output != "pooled":
            rows = slice(start, start + (spec["max_tokens"] if spec.get("full_length") else count))
            arrays = ["embeddings"] + ["scales"] * (spec["dtype"] == "int8")
            found = {array: self.array(f"{folder}/{array}")[rows] for array in arrays}
            start //= spec["max_tokens"]
        if output != "tokens":
            found["pooled"] = self.array(f"{folder}/pooled")[start : start + 1]
        return found

    def caption(self, name: str, i: int) -> tuple[np.ndarray | None, np.ndarray | None, int]:
        """Tokens and pooled vector of a caption as numbers, and the checksum of its rows."""
        rows = self.caption_rows(name, i)
        tokens = numbers(rows["embeddings"], rows.get("scales")) if "embeddings" in rows else None
        return tokens, numbers(rows["pooled"])[0] if "pooled" in rows else None, checksum(rows.values())

    def null(self, name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Tokens and pooled vector of the empty caption as numbers."""
        found = [self._null(name, array) for array in ("null", "null_scales", "null_pooled")]
        tokens, scales, pooled = found
        return None if tokens is None else numbers(tokens, scales), None if pooled is None else numbers(pooled)[0]

    def _null(self, name: str, array: str) -> np.ndarray | None:
        path = f"captions/{name}".rstrip("/") + f"/{array}"
        return self.array(path) if path in self.layouts else None

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """The specs of the features by name, in order."""
        return {one["name"]: one["spec"] for one in self.spec.get("features", [])}

    def feature(self, name: str, record: dict[str, Any]) -> tuple[dict[str, np.ndarray], int]:
        """Patches and class token of a record as numbers, those of the flipped image too; and their checksum."""
        spec, found, stored = self.features[name], {}, []
        folder = f"buckets/{record['bucket']}/features/{name}"
        for flip in self._flips:
            for output, scales in (("patches", "patch_scales"), ("cls", "cls_scales")):
                if spec["output"] not in (output, "both"):
                    continue
                paths = [f"{folder}/{output}{flip}", f"{folder}/{scales}{flip}"][: 1 + (spec["dtype"] == "int8")]
                rows = [self.array(path)[record["row"]] for path in paths]
                found[output + flip], stored = numbers(*rows), [*stored, *rows]
        return found, checksum(stored)

    def num_patches(self, name: str, bucket: str) -> int:
        """Tokens of an image in a bucket, by the formula of section 1; halves round up."""
        spec, count = self.features[name], 1
        for side_px in map(int, bucket.split("x")):
            count *= max(1, int(side_px * spec["resolution_px"] / (spec["images_px"] * spec["patch_px"]) + 0.5))
        return count
