"""Findings of a verification: file, cause, bucket, shard and records."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..arrays.shard_file import ShardFile
from ..disk.hashing import read_json, xxh3_file
from ..errors import DamageError, LeanditError
from ..format.layout import (
    CAPTION_PART,
    CAPTIONS,
    EMBEDDINGS,
    GROUP,
    NULL_EMBEDDING,
    NULL_PART,
    NULL_SCALES,
    RECORDS,
    REVISIONS,
    SCALES,
    place_captions,
    revision_prefix,
)
from ..format.schema import FileEntry, Manifest
from ..format.tables import read_table
from ..format.zarr_shard import ArrayLayout
from ..revisions.writer import row_checksum

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

CAUSES = {
    "missing": "the file is not there",
    "size": "the file has another size than it was written with",
    "content": "the bytes differ from those that were written",
    "unsealed": "all shards are committed, but there is no manifest: the seal is pending, or the file was lost",
    "link": "a symbolic link replaces a file that was written",
    "stray": "a file that belongs to no revision",
    "temporary": "left by a killed process, or still being written",
    "counts": "planned records are not stored plus rejected",
    "not_reproduced": "encoding the record again does not give what is stored",
    "source_changed": "the source no longer holds the picture that was encoded",
}
HARMLESS = frozenset(["temporary", "unsealed", "source_changed"])
MAX_KEYS = 20  # listed in a finding
SHARD = re.compile(r"(?P<array>(?:.*/)?(?:buckets/(?P<bucket>\d+x\d+)|captions)/\w+)/c/(?P<shard>\d+)(?:/0)*$")


@dataclass(frozen=True)
class Finding:
    """One problem of a file.

    Args:
      path: of the file, relative to the store.
      cause: a key of CAUSES.
      detail: the observation, and what was expected.
      revision: that wrote the file.
      bucket, shard: of a shard; ``bucket`` is None for captions and all other files.
      num_records: records (captions in a shard of captions) that are affected.
      records: keys of the first of them (texts of captions).
    """

    path: str
    cause: str
    detail: str
    revision: int
    bucket: str | None = None
    shard: int | None = None
    num_records: int = 0
    records: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The finding as one line for a person."""
        where = f"bucket '{self.bucket}', shard {self.shard}: " if self.bucket else ""
        where = where or (f"captions, shard {self.shard}: " if self.shard is not None else "")
        named = ", ".join(self.records[:3]) + (", ..." if self.num_records > 3 else "")
        affected = f" ({self.num_records} records: {named})" if self.num_records else ""
        return f"{where}file '{self.path}': {self.detail}{affected}"


def revision_of(path: str) -> int:
    """Revision that wrote a file."""
    parts = path.split("/")
    return int(parts[1]) if parts[0] == REVISIONS and len(parts) > 2 and parts[1].isdecimal() else 1


def shard_place(path: str) -> tuple[str, str | None, int] | None:
    """Array, bucket (None for captions) and number of a shard file; None for other files."""
    match = SHARD.fullmatch(path)
    if not match or match["array"].endswith(("captions/offsets", "captions/lengths")):
        return None
    return match["array"], match["bucket"], int(match["shard"])


def part_of(path: str) -> tuple[str, int] | None:
    """The task, (part, shard), that wrote a shard file."""
    place = shard_place(path)
    if place is None:
        return None
    array, bucket, shard = place
    if bucket:
        return f"buckets/{bucket}", shard
    return (NULL_PART if array.endswith((NULL_EMBEDDING, NULL_SCALES)) else CAPTION_PART), shard


def read_intact_table(root: Path, manifest: Manifest, name: str) -> pa.Table:
    """Read a table of a revision. Raises: DamageError: it differs from the manifest; OSError: missing."""
    path = revision_prefix(manifest.revision) + name
    if not any(entry.path == path and entry.xxh3_128 == xxh3_file(root / path) for entry in manifest.files):
        raise DamageError(f"'{path}' differs from the manifest")
    return read_table(root / path)


class Locator:
    """Finds the bucket, shard and records of a damaged file; reads tables only when there is one.

    Args:
      manifests: intact ones, by revision.
    """

    def __init__(self, root: Path, manifests: dict[int, Manifest]) -> None:
        self._root, self._manifests = root, manifests
        self._table = cache(self._read_table)  # a damaged folder causes many findings

    def finding(self, entry: FileEntry, cause: str, detail: str) -> Finding:
        """A finding with its bucket, shard and records."""
        revision, place = revision_of(entry.path), shard_place(entry.path)
        if place is None:
            return Finding(entry.path, cause, detail, revision)
        array, bucket, shard = place
        try:
            layout = ArrayLayout.from_metadata(array, read_json(self._root / array / GROUP))
            table = self._records(revision, bucket, layout.rows_of(shard)) if bucket else self._captions(layout, shard)
        except (LeanditError, OSError):
            return Finding(entry.path, cause, detail, revision, bucket, shard)
        names = table[0].to_pylist() if table.num_columns else []
        if cause == "content" and names:
            names = self._differing(layout, shard, table)
            detail = detail if names else f"{detail}: the index or the space between the records"
        return Finding(entry.path, cause, detail, revision, bucket, shard, len(names), names[:MAX_KEYS])

    def _read_table(self, revision: int, name: str) -> pa.Table:
        """A table of a revision; empty if it is damaged itself."""
        try:
            return read_intact_table(self._root, self._manifests[revision], name)
        except (LeanditError, OSError, KeyError):
            return pa.table({})

    def _records(self, revision: int, bucket: str, rows: range) -> pa.Table:
        """Key, first row, number of rows and checksum of the records in some rows of a revision's bucket."""
        records = self._table(revision, RECORDS)
        if not records.num_columns:
            return records
        is_inside = pc.and_(pc.equal(records["bucket"], bucket), pc.equal(records["revision"], revision))
        is_inside = pc.and_(is_inside, pc.greater_equal(records["row"], rows.start))
        is_inside = pc.and_(is_inside, pc.less(records["row"], rows.stop))
        inside = records.filter(pc.fill_null(is_inside, False)).select(["key", "row", "checksum"])
        return inside.append_column("num_rows", pa.array(np.ones(len(inside), np.int64)))

    def _captions(self, layout: ArrayLayout, shard: int) -> pa.Table:
        """As ``_records``, of the captions in a shard of embeddings, by their text; empty for the null caption."""
        revision, rows = revision_of(layout.path), layout.rows_of(shard)
        captions = self._table(revision, CAPTIONS)
        if not layout.path.endswith((EMBEDDINGS, SCALES)) or not captions.num_columns:
            return pa.table({})
        captions = captions.filter(pc.equal(captions["revision"], revision))
        offsets = place_captions(captions["num_tokens"].to_numpy(), layout.shard_rows)
        positions = np.flatnonzero((offsets >= rows.start) & (offsets < rows.stop))
        inside = captions.take(pa.array(positions))
        columns = {"text": inside["text"], "row": offsets[positions], "checksum": inside["checksum"]}
        return pa.table(columns | {"num_rows": inside["num_tokens"]})

    def _differing(self, layout: ArrayLayout, shard: int, table: pa.Table) -> list[str]:
        """Names of the records or captions that do not match their checksum; all names if a file cannot be opened.

        A checksum covers the rows of two arrays: pictures and flipped pictures, or tokens and their scales.
        """
        first = layout.path.removesuffix("_flip")
        if "/buckets/" not in f"/{first}":
            first = first.removesuffix(EMBEDDINGS).removesuffix(SCALES) + EMBEDDINGS
        second = first.removesuffix(EMBEDDINGS) + SCALES if first.endswith(EMBEDDINGS) else f"{first}_flip"
        try:
            metadata = {path: self._root / path / GROUP for path in (first, second)}
            layouts = [ArrayLayout.from_metadata(p, read_json(file)) for p, file in metadata.items() if file.is_file()]
            maps = [self._map(array, shard) for array in layouts]
        except (DamageError, OSError, ValueError):
            return table[0].to_pylist()
        differing, start = [], layout.rows_of(shard).start
        for name, row, checksum, num_rows in zip(*(column.to_pylist() for column in table.columns), strict=True):
            rows = range(row - start, row - start + num_rows)
            if checksum is not None and _checksum_of(maps, rows) != checksum:
                differing.append(name)
        return differing

    def _map(self, layout: ArrayLayout, shard: int) -> ShardFile:
        return ShardFile(self._root / layout.shard_path(shard), layout, len(layout.rows_of(shard)))


def _checksum_of(maps: list[ShardFile], rows: range) -> int | None:
    try:
        return int(row_checksum(*(mapped.read(rows.start, rows.stop) for mapped in maps)), 16)
    except DamageError:
        return None
