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
from ..disk.cached import cached_property
from ..disk.hashing import read_json, xxh3_64, xxh3_file
from ..errors import DamageError, LeanditError
from ..format.caption_layout import EMBEDDINGS, LENGTHS, OFFSETS, POOLED, SCALES, CaptionLayout
from ..format.layout import CAPTIONS, GROUP, RECORDS, REVISIONS, revision_prefix, sharing_checksums
from ..format.schema import FileEntry, Manifest, StoreSpec
from ..format.table_schemas import suffixes
from ..format.tables import read_table
from ..format.zarr_shard import ArrayLayout
from ..revisions.catalog import read_spec

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
SHARD = re.compile(
    r"(?P<array>(?:.*/)?(?:buckets/(?P<bucket>\d+x\d+)(?:/(?:features|pictures)/\w+)?|captions(?:/\w+)?)/\w+)/c/(?P<shard>\d+)(?:/0)*$"
)


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
    if not match or (not match["bucket"] and match["array"].endswith((f"/{OFFSETS}", f"/{LENGTHS}"))):
        return None
    return match["array"], match["bucket"], int(match["shard"])


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

    @cached_property
    def _written_by(self) -> dict[str, int]:
        """The revision that wrote each file: a later one may add features to the folder of an earlier one."""
        newest_first = sorted(self._manifests.items(), reverse=True)
        return {entry.path: revision for revision, manifest in newest_first for entry in manifest.files}

    def finding(self, entry: FileEntry, cause: str, detail: str) -> Finding:
        """A finding with its bucket, shard and records."""
        revision, place = revision_of(entry.path), shard_place(entry.path)
        if place is None:
            return Finding(entry.path, cause, detail, revision)
        array, bucket, shard = place
        try:
            layout = ArrayLayout.from_metadata(array, read_json(self._root / array / GROUP))
            owner = self._written_by.get(entry.path, revision)
            spec, inside = read_spec(self._root, owner), array.removeprefix(revision_prefix(revision))
            table = (
                self._records(owner, revision, inside, layout.rows_of(shard))
                if bucket
                else self._captions(owner, revision, spec, inside, shard)
            )
        except (LeanditError, OSError, KeyError):
            return Finding(entry.path, cause, detail, revision, bucket, shard)
        names = table[0].to_pylist() if table.num_columns else []
        if cause == "content" and names:
            twins = [array.removesuffix(inside) + path for path in sharing_checksums(spec, inside)]
            names = self._differing(twins, shard, table)
            detail = detail if names else f"{detail}: the index or the space between the records"
        return Finding(entry.path, cause, detail, revision, bucket, shard, len(names), names[:MAX_KEYS])

    def _read_table(self, revision: int, name: str) -> pa.Table:
        """A table of a revision; empty if it is damaged itself."""
        try:
            return read_intact_table(self._root, self._manifests[revision], name)
        except (LeanditError, OSError, KeyError):
            return pa.table({})

    def _records(self, owner: int, revision: int, array: str, rows: range) -> pa.Table:
        """Key, first row, number of rows and checksum of the records in some rows of a revision's bucket.

        Args:
          owner: the revision whose table has the checksums.
          array: within the revision.
        """
        records, (_, bucket, *inside, _) = self._table(owner, RECORDS), array.split("/")
        if not records.num_columns:
            return records
        is_inside = pc.and_(pc.equal(records["bucket"], bucket), pc.equal(records["revision"], revision))
        is_inside = pc.and_(is_inside, pc.greater_equal(records["row"], rows.start))
        is_inside = pc.and_(is_inside, pc.less(records["row"], rows.stop))
        found = records.filter(pc.fill_null(is_inside, False))
        checksums = found[f"checksum_{inside[1]}" if inside else "checksum"]
        ones = pa.array(np.ones(len(found), np.int64))
        return pa.table({"key": found["key"], "row": found["row"], "checksum": checksums, "num_rows": ones})

    def _captions(self, owner: int, revision: int, spec: StoreSpec, array: str, shard: int) -> pa.Table:
        """As ``_records``, of the captions in a shard, by their text; empty for the null caption."""
        captions, (_, *inside, name) = self._table(owner, CAPTIONS), array.split("/")
        if name not in (EMBEDDINGS, SCALES, POOLED) or not captions.num_columns:
            return pa.table({})
        captions = captions.filter(pc.equal(captions["revision"], revision))
        encoder = spec.text_encoder_of(inside[0] if inside else "")
        suffix = suffixes(spec)[encoder.name]
        counts = captions[f"num_tokens{suffix}"].to_numpy()
        counts = np.full(len(counts), encoder.spec.max_tokens) if encoder.spec.full_length else counts
        layout = CaptionLayout("", encoder.name, encoder.spec, counts, spec.shard_mib, spec.codec)
        here = layout.captions_of(shard)
        found = captions.slice(here.start, len(here))
        starts = layout.offsets[here.start : here.stop] if encoder.spec.has_tokens else np.zeros(len(here), np.int64)
        columns = {"text": found["text"], "row": starts, "checksum": found[f"checksum{suffix}"]}
        return pa.table(columns | {"num_rows": counts[here.start : here.stop]})

    def _differing(self, twins: list[str], shard: int, table: pa.Table) -> list[str]:
        """Names of the records or captions that do not match their checksum; all names if a file cannot be opened.

        Args:
          twins: arrays whose rows have one checksum.
        """
        try:
            layouts = [ArrayLayout.from_metadata(path, read_json(self._root / path / GROUP)) for path in twins]
            maps = [self._map(array, shard) for array in layouts]
        except (DamageError, OSError, ValueError):
            return table[0].to_pylist()
        differing, start = [], layouts[0].rows_of(shard).start
        columns = (column.to_pylist() for column in table.columns)
        for i, (name, row, checksum, num_rows) in enumerate(zip(*columns, strict=True)):
            rows = range(row - start, row - start + num_rows)
            places = [range(i, i + 1) if path.endswith(f"/{POOLED}") else rows for path in twins]
            if checksum is not None and _checksum_of(maps, places) != checksum:
                differing.append(name)
        return differing

    def _map(self, layout: ArrayLayout, shard: int) -> ShardFile:
        return ShardFile(self._root / layout.shard_path(shard), layout, len(layout.rows_of(shard)))


def _checksum_of(maps: list[ShardFile], places: list[range]) -> int | None:
    """Checksum of some rows of each shard; None if one cannot be read."""
    try:
        return xxh3_64(*(mapped.read(place.start, place.stop) for mapped, place in zip(maps, places, strict=True)))
    except DamageError:
        return None
