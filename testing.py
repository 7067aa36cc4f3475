"""Checks of stores and of readers, for those who write their own: FORMAT.md as code, without the rest of leandit.

``check_store`` tells whether a store is what FORMAT.md says, whoever wrote it; ``check_reader`` whether a reader
returns the rows that a store holds. ``PageReader`` reads a store from that page alone, slowly: if it has to change, so
must readers in other languages.
"""

from __future__ import annotations

import hashlib
import json
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs.blosc
import numpy as np
import pyarrow.parquet as pq
import xxhash
import zarr

KEY_SEED = 0x686F6C64  # of the hashes of keys in the index (section 5)
ReadRecords = Callable[[Path], Iterable[tuple[str, Mapping[str, Any]]]]
"""Yields for each stored record its key, and its rows by the name of their array, as ``rows_of_record`` names them."""


def check_store(path: str | Path, revision: int = 0) -> None:
    """Check that a store is what FORMAT.md says: manifest, files, arrays, tables, every checksum, the index, Zarr.

    Args:
      path: a local store.
      revision: 0 for the newest.
    Raises: AssertionError: it names what does not fit.
    """
    reader = PageReader(Path(path), revision)
    reader.check_hashes()
    check_tables(reader)
    check_index(reader)
    check_zarr(reader)


def check_reader(path: str | Path, read: ReadRecords, revision: int = 0) -> None:
    """Check that a reader returns every stored record once, with the rows that the store holds, bit for bit.

    Args:
      path: a local store.
      read: the reader; called with the path. A record has at least its latents, and may have any further array.
      revision: that it reads; 0 for the newest.
    Raises: AssertionError: it names the record and the array.
    """
    reader = PageReader(Path(path), revision)
    stored = {record["key"]: record for record in reader.stored}
    latents = reader.spec["latent"]["array"]
    seen = set[str]()
    for key, arrays in read(Path(path)):
        _require(key in stored, f"the reader returns the key {key!r}, which is not stored")
        _require(key not in seen, f"the reader returns the key {key!r} twice")
        seen.add(key)
        rows = reader.rows_of_record(stored[key])
        _require(latents in arrays, f"the reader returns no '{latents}' for {key!r}")
        for name, values in arrays.items():
            _require(name in rows, f"the reader returns '{name}' for {key!r}; the store has {', '.join(rows)}")
            _check_equal(f"'{name}' of {key!r}", values, rows[name])
    missing = sorted(stored.keys() - seen)
    _require(not missing, f"the reader returns {len(seen)} of {len(stored)} records; missing: {', '.join(missing[:3])}")


def _require(is_right: bool, problem: str) -> None:
    if not is_right:
        raise AssertionError(problem)


def _check_equal(where: str, values: Any, expected: Any) -> None:
    """Compare an array, or a list of arrays, with what the store has."""
    if isinstance(expected, list):
        _require(len(values) == len(expected), f"{where}: {len(values)} arrays, expected {len(expected)}")
        for value, expected_value in zip(values, expected, strict=True):
            _check_equal(where, value, expected_value)
        return
    array = np.asarray(values)
    _require(array.dtype == expected.dtype, f"{where} has dtype {array.dtype}, expected {expected.dtype}")
    _require(array.shape == expected.shape, f"{where} has shape {array.shape}, expected {expected.shape}")
    _require(array.tobytes() == expected.tobytes(), f"{where} has other numbers than the store")


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


def _is_checked(content: bytes, checksum_bytes: bytes) -> bool:
    """Whether bytes match their CRC32C."""
    return google_crc32c.value(content) == struct.unpack("<I", checksum_bytes)[0]


def numbers(rows: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
    """Stored tokens as the numbers that they are (section 1).

    Args:
      rows: (..., D) as stored.
      scales: of int8 tokens, (..., layers, groups).
    """
    if rows.dtype == np.int8:
        assert scales is not None, "int8 tokens have scales"
        layer_width = rows.shape[-1] // scales.shape[-2]
        groups = np.arange(layer_width) // 64
        factors = scales[..., groups].reshape(rows.shape)
        return rows.astype(np.float32) * factors.astype(np.float32)
    if rows.dtype != np.uint16:
        return rows
    wide = [struct.unpack("<f", b"\0\0" + number.tobytes())[0] for number in rows.ravel()]
    return np.array(wide, np.float32).reshape(rows.shape)


class PageReader:
    """A revision of a store: its manifest, tables, and numbers. Opening it makes the checks of section 5.

    Args:
      store: a local store.
      revision: 0 for the newest.
    Raises: AssertionError: the store does not fit.
    """

    def __init__(self, store: Path, revision: int = 0) -> None:
        self.store = store
        self._arrays = dict[str, np.ndarray]()
        revisions = [int(path.parent.name) for path in store.glob("revisions/*/manifest.json")]
        _require(bool(revisions), f"'{store}' has no revisions/*/manifest.json")
        self.revision = revision or max(revisions)
        self.manifest = json.loads((folder_of(store, self.revision) / "manifest.json").read_bytes())
        hashed = {name: value for name, value in self.manifest.items() if name != "root_hash"}
        _require(self.manifest["root_hash"] == canonical_hash(hashed), "manifest.json does not match its root_hash")
        version = self.manifest["format_version"]
        _require(version == 1, f"format_version {version}, expected 1")
        _require(self.manifest["revision"] == self.revision, f"manifest.json is of {self.manifest['revision']}")
        self.spec = self.manifest["spec"]
        self.layouts = {layout["path"]: layout for layout in self.manifest["arrays"]}
        self._files = {entry["path"]: entry for entry in self.manifest["files"]}
        self._check_files()
        self.records = self._table("records")
        self.captions = self._table("captions")

    def _check_files(self) -> None:
        """Check that the files of the manifest are the shards that its arrays imply, and have their sizes."""
        shards = {self._shard(layout, n) for layout in self.layouts.values() for n in shard_numbers(layout)}
        named = {path for path in self._files if "/c/" in path}
        _require(shards == named, f"arrays and files of the manifest differ: {sorted(shards ^ named)[:3]}")
        for path, entry in self._files.items():
            is_inside = not path.startswith("/") and ".." not in path.split("/")
            _require(is_inside, f"the manifest names '{path}', which leaves the store")
            size = (self.store / path).stat().st_size
            _require(size == entry["bytes"], f"'{path}' has {size} bytes, the manifest says {entry['bytes']}")

    def check_hashes(self) -> None:
        """Check every file of the manifest against its hash."""
        for path, entry in self._files.items():
            digest = xxhash.xxh3_128_hexdigest((self.store / path).read_bytes())
            _require(digest == entry["xxh3_128"], f"'{path}' differs from the manifest")

    def _shard(self, array: dict[str, Any], number: int) -> str:
        return "/".join([array["path"], "c", str(number), *["0"] * (len(array["shape"]) - 1)])

    def _table(self, name: str) -> list[dict[str, Any]]:
        path = f"revisions/{self.revision:06d}/{name}.parquet"
        digest = xxhash.xxh3_128_hexdigest((self.store / path).read_bytes())
        _require(digest == self._files[path]["xxh3_128"], f"'{path}' differs from the manifest")
        return pq.read_table(self.store / path).to_pylist()

    def index(self, name: str, count: int) -> np.ndarray:
        """The numbers of a file of the index.

        Args:
          count: how many they should be.
        """
        path = f"revisions/{self.revision:06d}/index/{name}.bin"
        data = (self.store / path).read_bytes()
        digest = xxhash.xxh3_128_hexdigest(data)
        _require(digest == self._files[path]["xxh3_128"], f"'{path}' differs from the manifest")
        dtype = "<i8" if len(data) == 8 * count else "<i4"
        if name == "keys" or "checksum" in name:
            dtype = "<u8"
        numbers = np.frombuffer(data, dtype)
        _require(len(numbers) == count, f"'{path}' has {len(numbers)} numbers, expected {count}")
        return numbers

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
            rows = np.full(layout["shape"], 99, np.dtype(layout["dtype"]).newbyteorder("<"))
            for _, first, end in layout["ranges"]:
                _require(first % layout["shard_rows"] == 0, f"'{path}': a range begins at row {first}, within a shard")
                for row in range(first, end, layout["shard_rows"]):
                    part = rows[row : min(end, row + layout["shard_rows"])]
                    part[:] = self._rows(layout, row // layout["shard_rows"], part)
            self._arrays[path] = rows
        return self._arrays[path]

    def _rows(self, layout: dict[str, Any], number: int, like: np.ndarray) -> np.ndarray:
        """Rows of a shard, of the shape and dtype of ``like``."""
        path = self._shard(layout, number)
        data = (self.store / path).read_bytes()
        index = data[-16 * (layout["shard_rows"] // layout["chunk_rows"]) - 4 : -4]
        _require(_is_checked(index, data[-4:]), f"'{path}': its index differs from its checksum")
        chunk_bytes = like[:1].nbytes * layout["chunk_rows"]
        num_chunks = -(-len(like) // layout["chunk_rows"])
        entries = list(struct.iter_unpack("<QQ", index))
        _require(set(entries[num_chunks:]) <= {(2**64 - 1, 2**64 - 1)}, f"'{path}': it has more chunks than rows")
        if layout["codec"] == "blosc":
            chunks = [data[offset : offset + length] for offset, length in entries[:num_chunks]]
            is_intact = all(_is_checked(chunk[:-4], chunk[-4:]) for chunk in chunks)
            _require(is_intact, f"'{path}': a chunk differs from its checksum")
            data = b"".join(numcodecs.blosc.decompress(chunk[:-4]) for chunk in chunks)
        else:
            consecutive = [(i * chunk_bytes, chunk_bytes) for i in range(num_chunks)]
            _require(entries[:num_chunks] == consecutive, f"'{path}': its rows do not follow one another")
        return np.frombuffer(data, like.dtype, like.size).reshape(like.shape)

    def rows_of_record(self, record: dict[str, Any]) -> dict[str, Any]:
        """Rows of a record as stored, by their array within the bucket; those of its captions as lists."""
        prefix = f"buckets/{record['bucket']}/"
        rows: dict[str, Any] = {path.removeprefix(prefix): values for path, values in self.images(record).items()}
        for name in self.texts:
            for number in record["caption_ids"]:
                for array, values in self.caption_rows(name, number).items():
                    rows.setdefault(f"captions/{name}/{array}" if name else f"captions/{array}", []).append(values)
        return rows

    def images(self, record: dict[str, Any]) -> dict[str, np.ndarray]:
        """Rows of a record in all arrays of its bucket, by path, as stored."""
        prefix = f"buckets/{record['bucket']}/"
        return {path: self.array(path)[record["row"]] for path in self.layouts if path.startswith(prefix)}

    def latents(self, record: dict[str, Any]) -> tuple[list[np.ndarray], int]:
        """Latents of a record in every view, and their checksum."""
        path = f"buckets/{record['bucket']}/{self.spec['latent']['array']}"
        rows = [self.array(path + view)[record["row"]] for view in self.views]
        return rows, checksum(rows)

    def companion(self, name: str, kind: str, record: dict[str, Any]) -> tuple[list[np.ndarray], int]:
        """A companion of a record in every view, and the checksum."""
        array = "mask" if kind == "mask" else self.spec["latent"]["array"]
        path = f"buckets/{record['bucket']}/companions/{name}/{array}"
        rows = [self.array(path + view)[record["row"]] for view in self.views]
        return rows, checksum(rows)

    @property
    def views(self) -> list[str]:
        """Suffixes of the arrays of each view: every crop, and its mirror image if that is stored."""
        crops = ["", *(f"_v{number}" for number in range(1, self.spec["images"].get("variants", 1)))]
        flips = ["", "_flip"] if self.spec["latent"]["flip"] else [""]
        return [f"{crop}{flip}" for crop in crops for flip in flips]

    @cached_property
    def texts(self) -> dict[str, dict[str, Any]]:
        """The specs of the text encoders by name, "" for that of ``text``, in order."""
        unnamed = {"": self.spec["text"]} if self.spec["text"] else {}
        return unnamed | {encoder["name"]: encoder["spec"] for encoder in self.spec.get("texts", [])}

    def suffix_of(self, name: str) -> str:
        """Suffix of the columns of a text encoder in the captions table; those of the first one have none."""
        return "" if name == next(iter(self.texts)) else f"_{name}"

    def caption_rows(self, name: str, i: int) -> dict[str, np.ndarray]:
        """Rows of a caption as stored, by array: tokens, scales, pooled vector."""
        spec = self.texts[name]
        folder = f"captions/{name}".rstrip("/")
        suffix = self.suffix_of(name)
        start = self.captions[i][f"start{suffix}"]
        rows = {}
        output = spec.get("output", "tokens")
        if output != "pooled":
            count = spec["max_tokens"] if spec.get("full_length") else self.captions[i][f"num_tokens{suffix}"]
            arrays = ["embeddings", "scales"] if spec["dtype"] == "int8" else ["embeddings"]
            rows = {array: self.array(f"{folder}/{array}")[start : start + count] for array in arrays}
            start //= spec["max_tokens"]
        if output != "tokens":
            rows["pooled"] = self.array(f"{folder}/pooled")[start : start + 1]
        return rows

    def caption(self, name: str, i: int) -> tuple[np.ndarray | None, np.ndarray | None, int]:
        """Tokens and pooled vector of a caption as numbers, and the checksum of its rows."""
        rows = self.caption_rows(name, i)
        tokens = numbers(rows["embeddings"], rows.get("scales")) if "embeddings" in rows else None
        return tokens, numbers(rows["pooled"])[0] if "pooled" in rows else None, checksum(rows.values())

    def null(self, name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Tokens and pooled vector of the empty caption as numbers."""
        tokens = self._null(name, "null")
        scales = self._null(name, "null_scales")
        pooled = self._null(name, "null_pooled")
        return None if tokens is None else numbers(tokens, scales), None if pooled is None else numbers(pooled)[0]

    def _null(self, name: str, array: str) -> np.ndarray | None:
        path = f"captions/{name}".rstrip("/") + f"/{array}"
        return self.array(path) if path in self.layouts else None

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """The specs of the features by name, in order."""
        return {feature["name"]: feature["spec"] for feature in self.spec.get("features", [])}

    @property
    def companions(self) -> dict[str, str]:
        """The kinds of the companions by name, in order."""
        return {companion["name"]: companion["kind"] for companion in self.spec.get("companions", [])}

    def feature(self, name: str, record: dict[str, Any]) -> tuple[dict[str, np.ndarray], int]:
        """Patches and class token of a record as numbers, in every view; and their checksum."""
        spec = self.features[name]
        tokens = {}
        stored = []
        folder = f"buckets/{record['bucket']}/features/{name}"
        for view in self.views:
            for output, scales in (("patches", "patch_scales"), ("cls", "cls_scales")):
                if spec["output"] not in (output, "both"):
                    continue
                arrays = [output, scales] if spec["dtype"] == "int8" else [output]
                rows = [self.array(f"{folder}/{array}{view}")[record["row"]] for array in arrays]
                tokens[output + view] = numbers(*rows)
                stored += rows
        return tokens, checksum(stored)

    def num_patches(self, name: str, bucket: str) -> int:
        """Tokens of an image in a bucket, by the formula of section 1; halves round up."""
        spec = self.features[name]
        count = 1
        for side_px in map(int, bucket.split("x")):
            count *= max(1, int(side_px * spec["resolution_px"] / (spec["images_px"] * spec["patch_px"]) + 0.5))
        return count


def check_tables(reader: PageReader) -> None:
    """Check that the tables add up, and every row of every record and caption against its checksum."""
    manifest = reader.manifest
    statuses = [record["status"] for record in reader.records]
    counts = (len(statuses), statuses.count("stored"), statuses.count("rejected"))
    claimed = (manifest["num_planned"], manifest["num_stored"], manifest["num_rejected"])
    _require(counts == claimed, f"(planned, stored, rejected) are {counts}, the manifest says {claimed}")
    _require(counts[0] == counts[1] + counts[2], f"planned {counts[0]} are not stored {counts[1]} plus rejected")
    keys = {record["key"] for record in reader.stored}
    _require(len(keys) == counts[1], f"{counts[1]} stored records have {len(keys)} different keys")
    rows = {(record["bucket"], record["row"]) for record in reader.stored}
    _require(len(rows) == counts[1], f"{counts[1]} stored records have {len(rows)} different rows")
    of_bucket = dict.fromkeys(manifest["buckets"], 0)
    for record in reader.stored:
        of_bucket[record["bucket"]] = of_bucket.get(record["bucket"], 0) + 1
        _check_record(reader, record)
    _require(of_bucket == manifest["buckets"], f"the buckets have {of_bucket}, the manifest {manifest['buckets']}")
    for record in reader.records:
        has_reason = record["status"] != "rejected" or (record["stage"] and record["reason"])
        _require(bool(has_reason), f"record {record['key']!r} is rejected without a reason")
    _require(len(reader.captions) == manifest["num_captions"], "the manifest counts other captions")
    for name in reader.texts:
        for number in range(len(reader.captions)):
            _check_caption(reader, name, number)


def _check_record(reader: PageReader, record: dict[str, Any]) -> None:
    key = record["key"]
    num_classes = len(reader.spec["classes"] or ())
    _require(-1 <= record["label"] < num_classes, f"record {key!r} has label {record['label']} of {num_classes}")
    for number in record["caption_ids"]:
        _require(0 <= number < len(reader.captions), f"record {key!r} names caption {number}, which does not exist")
    _require(bool(record["caption_ids"]) or not reader.texts, f"record {key!r} has no caption")
    checksums = {"checksum": reader.latents(record)[1]}
    for name in reader.features:
        checksums[f"checksum_{name}"] = reader.feature(name, record)[1]
    for name, kind in reader.companions.items():
        checksums[f"checksum_{name}"] = reader.companion(name, kind, record)[1]
    for column, value in checksums.items():
        _require(record[column] == value, f"the rows of record {key!r} do not match its {column}")


def _check_caption(reader: PageReader, name: str, number: int) -> None:
    """Check the rows of a caption, unless its embedding was not finite."""
    suffix = reader.suffix_of(name)
    caption = reader.captions[number]
    if caption[f"checksum{suffix}"] is None:
        return
    where = f"caption {caption['text'][:80]!r}"
    max_tokens = reader.texts[name]["max_tokens"]
    num_tokens = caption[f"num_tokens{suffix}"]
    _require(1 <= num_tokens <= max_tokens, f"{where} has {num_tokens} tokens, expected 1 to {max_tokens}")
    value = reader.caption(name, number)[2]
    _require(value == caption[f"checksum{suffix}"], f"the rows of {where} do not match its checksum{suffix}")


def check_index(reader: PageReader) -> None:
    """Check that the index has the numbers of the tables (section 5)."""
    expected = expected_index(reader)
    names = reader.index_names
    _require(names == expected.keys(), f"the index has other files than its tables imply: {names ^ expected.keys()}")
    for name, values in expected.items():
        is_equal = reader.index(name, len(values)).tolist() == list(values)
        _require(is_equal, f"index/{name}.bin has other numbers than the tables")


def expected_index(reader: PageReader) -> dict[str, Sequence[int]]:
    """The numbers of each file of the index, from the tables."""

    def position_of(item: tuple[int, dict[str, Any]]) -> tuple[int, ...]:
        return (*map(int, item[1]["bucket"].split("x")), item[1]["row"])

    stored = [(i, record) for i, record in enumerate(reader.records) if record["status"] == "stored"]
    stored.sort(key=position_of)
    counts: dict[str, list[int]] = {}
    for _, record in stored:
        counts.setdefault(record["bucket"], []).append(len(record["caption_ids"]))
    expected: dict[str, Sequence[int]] = {
        "rows": [record["row"] for _, record in stored],
        "records": [i for i, _ in stored],
        "labels": [record["label"] for _, record in stored],
        "caption_ids": [number for _, record in stored for number in record["caption_ids"]],
        "caption_starts": [start for of_bucket in counts.values() for start in (0, *accumulate(of_bucket))],
        "keys": [xxhash.xxh3_64_intdigest(record["key"].encode(), seed=KEY_SEED) for record in reader.records],
    }
    for column in ("checksum", *(f"checksum_{name}" for name in (*reader.features, *reader.companions))):
        expected[column] = [record[column] or 0 for record in reader.records]
    for name, spec in reader.texts.items():
        suffix = reader.suffix_of(name)
        lengths = [caption[f"num_tokens{suffix}"] for caption in reader.captions]
        if spec.get("full_length"):
            lengths = [spec["max_tokens"]] * len(lengths)
        expected[f"caption_start{suffix}"] = [caption[f"start{suffix}"] for caption in reader.captions]
        expected[f"caption_length{suffix}"] = lengths
        expected[f"caption_checksum{suffix}"] = [caption[f"checksum{suffix}"] or 0 for caption in reader.captions]
    return expected


def check_zarr(reader: PageReader) -> None:
    """Check that zarr-python opens the root group, and reads in every array the rows of the manifest.

    An earlier revision has fewer rows and arrays than the Zarr files, which are those of the newest one.
    """
    is_newest = reader.revision == PageReader(reader.store).revision
    arrays = dict(_zarr_arrays(reader.store))
    if is_newest:
        _require(
            arrays.keys() == reader.layouts.keys(), f"Zarr arrays: {sorted(arrays.keys() ^ reader.layouts.keys())}"
        )
        attributes = zarr.open_group(reader.store, mode="r").attrs.asdict()
        _require(attributes == {"leandit": reader.spec}, "zarr.json has another spec than the manifest")
    for path, layout in reader.layouts.items():
        array = arrays[path]
        _require(list(array.shape) == layout["shape"] or not is_newest, f"'{path}': Zarr has shape {array.shape}")
        _require(array.dtype == layout["dtype"], f"'{path}': Zarr has dtype {array.dtype}")
        attributes = {"bits_of": "bfloat16"} if layout["dtype"] == "uint16" else {}
        _require(array.attrs.asdict() == attributes, f"'{path}': Zarr attributes {array.attrs.asdict()}")
        for _, first, end in layout["ranges"]:
            rows = np.asarray(array[first:end])
            _require(rows.tobytes() == reader.array(path)[first:end].tobytes(), f"'{path}': Zarr reads other rows")


def _zarr_arrays(store: Path) -> Iterator[tuple[str, zarr.Array]]:
    with warnings.catch_warnings():  # files of tables and revisions are no Zarr
        warnings.simplefilter("ignore")
        for path, member in zarr.open_group(store, mode="r").members(max_depth=None):
            if isinstance(member, zarr.Array):
                yield path, member
