"""Latents in MosaicML's MDS shards, as micro_diffusion and mosaicml/diffusion write them.

The format is small and parsed here, because the ``streaming`` package requires the clients of every cloud. A shard:
uint32 samples, uint32 offsets (samples + 1), then the samples. A sample: a uint32 size for each variable-size column,
then the columns. Pickled columns are rejected.
"""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ....datasets.disk.spill import named_errors
from ....datasets.revisions.writer import row_checksum
from ....errors import RecipeError, RecordRejected, SourceError
from ...config import TextSection
from ...images.faults import open_regular
from ..recipe import ImportLayout, ImportRecipe
from ..source import (
    Entry,
    Features,
    FormatDefaults,
    Reader,
    RecordHeader,
    TextHeader,
    inner_path,
    without_batch,
)
from ..untrusted import MAX_ARRAY_BYTES

TEXT_ENCODER = TextSection(kind="t5", model="unknown")
INDEX = "index.json"
MAX_SHARD_BYTES = 1 << 32  # offsets are uint32
OPEN_SHARDS = 4
COPIED_BYTES = 4 << 20  # of a packed shard at once
VALUES = {16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32", 64: "uint64", 65: "int64"}
VALUES |= {8: "uint8", 9: "int8"}
INTEGERS = {"int": "int64"} | {name: name for name in VALUES.values() if "int" in name}
SIDES = ("<u1", "<u2", "<u4", "<u8")  # of a shape's numbers

Sample = dict[str, tuple[str, memoryview]]
"""Encoding and bytes of each column."""


class MdsShard(NamedTuple):
    """One shard in ``index.json``; columns have an encoding, and a size if it is fixed."""

    path: str
    num_bytes: int
    compressed: str
    samples: int
    columns: dict[str, tuple[str, int | None]]


class Mds(Reader):
    """A folder with ``index.json`` and its shards; latents of one size in a column.

    Raises: SourceError: a malformed index, or a required column is missing or pickled.
    """

    kind = "mds"
    defaults = FormatDefaults("sample", is_scaled=True, vae="unknown", downscale=8, one_size=False)

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        super().__init__(root, recipe)
        self._shards = self._index()
        self._latents = self._column("latents", "latents")
        self._captions = self._column("captions", "caption_latents", optional=True)
        self._text = self._column("text", "caption") if self._captions else ""
        self._label = self._column("label", "label", optional=True)
        self._mask = self._column("mask", "", optional=True)
        self.defaults = replace(self.defaults, texts={"": TEXT_ENCODER} if self._captions else {})
        self.has_labels = bool(self._label)
        self._check_plain_bytes()
        self._content = lru_cache(maxsize=OPEN_SHARDS)(self._read_shard)
        self._unpacked: dict[str, memoryview] = {}
        self._unpacking = threading.Lock()

    def _index(self) -> dict[str, MdsShard]:
        """The shards by path; raises SourceError."""
        index = self.json(INDEX, dict)
        with self.needing(INDEX):
            shards = [_shard(one) for one in index["shards"]]
        if not shards or any(shard.columns != shards[0].columns for shard in shards):
            raise SourceError(f"source '{self.root}': '{INDEX}' lists no shards, or shards with other columns.")
        return {shard.path: shard for shard in shards}

    def _column(self, key: str, usual: str, *, optional: bool = False) -> str:
        """The configured column, or the only one with the usual prefix; "" if optional. Raises SourceError."""
        configured: str = getattr(self.recipe.layout, key)
        columns = list(next(iter(self._shards.values())).columns)
        matching = [name for name in columns if name == (configured or usual)]
        if not configured and usual:
            matching = matching or [name for name in columns if name.startswith(usual)]
        if len(matching) == 1 or (optional and not configured and not matching):
            return "".join(matching)
        raise SourceError(
            f"source '{self.root}': layout.{key} '{configured}': {len(matching)} such columns of {', '.join(columns)}. "
            f"Name one with --set layout.{key}=COLUMN."
        )

    def _check_plain_bytes(self) -> None:
        """Raise RecipeError if a setting of arrays that are plain bytes is set, and there are none."""
        encodings = {name: encoding for name, (encoding, _) in next(iter(self._shards.values())).columns.items()}
        latents_are_plain = encodings[self._latents] == "bytes"
        captions_are_plain = encodings.get(self._captions) == "bytes"
        is_read = {
            "channels": latents_are_plain,
            "width": captions_are_plain,
            "dtype": latents_are_plain or captions_are_plain,
        }
        for key, is_used in is_read.items():
            default = ImportLayout.model_fields[key].default
            if getattr(self.recipe.layout, key) != default and not is_used:
                raise RecipeError(
                    f"import: layout.{key} has no effect: it needs a column of plain bytes, and the arrays of these "
                    "shards have their own dtype and shape. Leave it out."
                )

    def entries(self) -> Iterator[Entry]:
        """Samples in the order of the index."""
        for shard in self._shards.values():
            stem = shard.path.removesuffix(".mds")
            yield from (Entry(f"{stem}/{i}", shard.path, i, shard.num_bytes) for i in range(shard.samples))

    def _header(self, entry: Entry) -> RecordHeader:
        sample = self._sample(entry)
        latents = self._array(sample)  # read, because their shape may precede the values
        label = _integer(*sample[self._label]) if self._label else -1
        header = RecordHeader(latents.shape, latents.dtype.name, label=label)
        if not self._captions:
            return header
        padded, tokens = self._tokens(sample)
        text = bytes(sample[self._text][1]).decode()
        if not np.isfinite(tokens).all() or not len(tokens) or not text.strip():
            raise RecordRejected("scan", "no_caption", f"{entry.key}: no text, no valid token, or NaN")
        return header._replace(text=text, texts=(TextHeader(len(tokens), padded, tokens.shape[1], tokens.dtype.name),))

    def _values(self, entry: Entry) -> Features:
        array = self._array(self._sample(entry))
        return [array], row_checksum(array)

    def _caption(self, entry: Entry, name: str) -> np.ndarray:
        return self._tokens(self._sample(entry))[1]

    def _sample(self, entry: Entry) -> Sample:
        """Encoding and bytes of each column of a sample; raises OSError, ValueError."""
        shard, content = self._shards[entry.path], self._content(entry.path)
        begin, end = np.frombuffer(content, "<u4", 2, 4 + 4 * entry.offset).tolist()
        varying = sum(size is None for _, size in shard.columns.values())
        if not 4 * (shard.samples + 2) <= begin <= begin + 4 * varying <= end <= len(content):
            raise ValueError(f"sample from {begin} to {end} in a shard of {len(content)} bytes")
        sizes = iter(np.frombuffer(content, "<u4", varying, begin).tolist())
        at, sample = begin + 4 * varying, {}
        for name, (encoding, size) in shard.columns.items():
            length = next(sizes) if size is None else size
            if at + length > end:
                raise ValueError(f"column '{name}' goes beyond its sample")
            sample[name] = encoding, content[at : at + length]
            at += length
        return sample

    def _read_shard(self, path: str) -> memoryview:
        """The mapped content of a shard; a compressed one is decompressed once: captions come in order of length.

        Raises: OSError, ValueError: it does not match the index. ResourceError: no room to decompress it.
        """
        shard, file = self._shards[path], self.root / path
        if file.is_file():
            content = _mapped(file)
        elif shard.compressed:
            with self._unpacking:  # threads request the same shard at once
                content = self._unpacked.get(path) or _unpack(self.root / shard.compressed, shard.num_bytes + 1)
                self._unpacked[path] = content
        else:
            raise FileNotFoundError(path)
        if len(content) != shard.num_bytes or np.frombuffer(content, "<u4", 1)[0] != shard.samples:
            what = f"{shard.num_bytes} and {shard.samples} samples"
            raise ValueError(f"{path}: {len(content)} bytes, '{INDEX}' says {what}")
        return content

    def _array(self, sample: Sample) -> np.ndarray:
        """Latents, (C, H, W), square for a column of plain bytes; raises ValueError."""
        array, channels = self._numbers(sample[self._latents]), self.recipe.layout.channels
        if sample[self._latents][0] != "bytes":
            return array.reshape(without_batch(array.shape, 3))
        side = math.isqrt(len(array) // channels)
        if not side or len(array) != channels * side * side:
            numbers = f"{len(array)} numbers do not form a square of {channels} channels"
            raise ValueError(f"{numbers} (layout.channels, layout.dtype)")
        return array.reshape(channels, side, side)

    def _tokens(self, sample: Sample) -> tuple[int, np.ndarray]:
        """The padded length of a caption, and its valid tokens, (L, D); raises ValueError."""
        array, width = self._numbers(sample[self._captions]), self.recipe.layout.width
        is_plain = sample[self._captions][0] == "bytes"
        if is_plain and (not width or len(array) % width):
            raise ValueError(f"{len(array)} numbers of a caption; layout.width says how many a token has")
        rows = array.reshape(-1, width if is_plain else array.shape[-1])
        if not self._mask:
            return len(rows), rows
        encoding, data = sample[self._mask]
        mask = np.frombuffer(data, np.uint8) if encoding == "bytes" else _ndarray(encoding, data).reshape(-1)
        if len(mask) != len(rows):
            raise ValueError(f"a mask of {len(mask)} for {len(rows)} tokens")
        return len(rows), rows[mask != 0]

    def _numbers(self, column: tuple[str, memoryview]) -> np.ndarray:
        """Values of a column, flat for plain bytes; raises ValueError."""
        encoding, data = column
        return np.frombuffer(data, self.recipe.layout.dtype) if encoding == "bytes" else _ndarray(encoding, data)


def _unpack(path: Path, most: int) -> memoryview:
    """The first bytes of a compressed file, in a mapped, unlinked temporary file.

    Raises: OSError, ValueError: it cannot be decompressed. ResourceError: the temporary folder is full.
    """
    with (
        named_errors(f"source '{path}'"),
        open_regular(path) as packed,
        pa.input_stream(packed, compression="zstd") as stream,
        tempfile.NamedTemporaryFile(prefix="leandit-mds-") as file,
    ):
        while most and (some := stream.read(min(most, COPIED_BYTES))):
            file.write(some)
            most -= len(some)
        file.flush()
        return _mapped(file.name)


def _mapped(path: Path | str) -> memoryview:
    """Map a file by Arrow, whose maps hold no file descriptor; raises OSError."""
    with pa.memory_map(str(path)) as file:
        return memoryview(file.read_buffer())


def _shard(entry: Any) -> MdsShard:
    """A shard of the index; raises ValueError, TypeError, KeyError, RecordRejected."""
    if entry["format"] != "mds" or entry["version"] != 2:
        raise ValueError(f"format {entry['format']} version {entry['version']}; expected mds, 2")
    zipped, compression = entry["zip_data"], entry["compression"]
    if compression and str(compression).split(":")[0] != "zstd":
        raise ValueError(f"compression '{compression}'; expected zstd or none")
    if not all(isinstance(text, str) for text in (*entry["column_names"], *entry["column_encodings"])):
        raise ValueError("columns whose names and encodings are not text")
    sizes = [None if size is None else int(size) for size in entry["column_sizes"]]
    columns = dict(zip(entry["column_names"], zip(entry["column_encodings"], sizes, strict=True), strict=True))
    num_bytes, samples = int(entry["raw_data"]["bytes"]), int(entry["samples"])
    if not 0 < samples < num_bytes < MAX_SHARD_BYTES or any(size is not None and size < 0 for size in sizes):
        raise ValueError(f"{samples} samples in {num_bytes} bytes")
    compressed = inner_path(zipped["basename"]) if zipped else ""
    return MdsShard(inner_path(entry["raw_data"]["basename"]), num_bytes, compressed, samples, columns)


def _integer(encoding: str, data: memoryview) -> int:
    if encoding not in INTEGERS or len(data) != np.dtype(INTEGERS[encoding]).itemsize:
        raise ValueError(f"a label encoded as '{encoding}'; expected an integer")
    return int(np.frombuffer(data, INTEGERS[encoding])[0])


def _ndarray(encoding: str, data: memoryview) -> np.ndarray:
    """An array of an "ndarray" column, whose dtype and shape are in the encoding or precede the values.

    Raises: ValueError: another encoding (pickle is rejected), or the size does not match.
    """
    kind, *details = encoding.split(":")
    if kind != "ndarray" or len(details) > 2:
        raise ValueError(f"column encoded as '{encoding}'; expected bytes or ndarray (pickled ones are refused)")
    dtype, at = (details[0], 0) if details else (VALUES.get(data[0] if len(data) else 0, ""), 1)
    if dtype not in VALUES.values():
        raise ValueError(f"an array of dtype '{dtype}'")
    if len(details) == 2:
        shape = [int(side) for side in details[1].split(",")]
    else:
        ndim, sides = data[at] >> 2, SIDES[data[at] & 3]
        shape = np.frombuffer(data, sides, ndim, at + 1).tolist()
        at += 1 + ndim * np.dtype(sides).itemsize
    claimed = math.prod(shape) * np.dtype(dtype).itemsize
    if min(shape, default=0) < 1 or claimed != len(data) - at or claimed > MAX_ARRAY_BYTES:
        raise ValueError(f"an array of shape {shape} of {dtype} in {len(data) - at} bytes")
    return np.frombuffer(data, dtype, offset=at).reshape(shape)
