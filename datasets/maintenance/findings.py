"""Findings of a verification: file, cause, bucket, shard and records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...errors import DamageError, LeanditError
from ...units import plural
from ..arrays.shard_file import ShardFile
from ..disk.cached import cached_property
from ..disk.hashing import xxh3_64, xxh3_file
from ..format.layout import CAPTIONS, RECORDS, TWIN, revision_of, revision_prefix
from ..format.row_layout import EMBEDDINGS, POOLED, SCALES, array_groups, buckets_of, num_stored_tokens, pooled_rows
from ..format.schema import FileEntry, Manifest
from ..format.table_schemas import CAPTION_START, suffixes
from ..format.tables import map_parquet
from ..format.zarr_shard import ArrayLayout

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

CAUSES = {
    "missing": "the file is missing",
    "size": "the file size differs from what was written",
    "content": "the bytes differ from those that were written",
    "unsealed": "all shards are committed, but there is no manifest: the seal is pending",
    "link": "a symbolic link replaces a file that was written",
    "stray": "a file that belongs to no revision",
    "abandoned": "no revision names this shard or array, so nothing reads it: 'leandit verify --repair' removes it",
    "single": "there is only one copy of its files, as in a published store: 'leandit verify --repair' adds the others",
    "temporary": "left by a killed process, or still being written",
    "chain": "the revision was not built on the one before it",
    "counts": "planned records do not equal stored plus rejected",
    "not_reproduced": "re-encoding the record does not give what is stored",
    "source_changed": "the source no longer holds the image that was encoded",
}
HARMLESS = frozenset(["single", "temporary", "abandoned", "unsealed", "source_changed"])
MAX_KEYS = 20  # listed in a finding
SHARD = re.compile(
    r"(?P<array>(?:buckets/(?P<bucket>\d+x\d+)(?:/(?:features|companions)/\w+)?|captions(?:/\w+)?)/\w+)/c/(?P<shard>\d+)(?:/0)*$"
)


@dataclass(frozen=True)
class Finding:
    """One problem of a file.

    Args:
      path: of the file, relative to the store.
      cause: a key of CAUSES.
      detail: the observation, and what was expected; that of the cause if it is empty.
      revision: that wrote the file; if it is 0, that of its folder, else the first.
      bucket, shard: of a shard; ``bucket`` is None for captions and all other files.
      num_records: records (captions in a shard of captions) that are affected.
      records: keys of the first of them (texts of captions).
    """

    path: str
    cause: str
    detail: str = ""
    revision: int = 0
    bucket: str | None = None
    shard: int | None = None
    num_records: int = 0
    records: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", self.detail or CAUSES[self.cause])
        object.__setattr__(self, "revision", self.revision or revision_of(self.path) or 1)

    def line(self) -> str:
        """The finding as one line for a person."""
        where = f"bucket '{self.bucket}', shard {self.shard}: " if self.bucket else ""
        where = where or (f"captions, shard {self.shard}: " if self.shard is not None else "")
        named = ", ".join(self.records[:3]) + (", ..." if self.num_records > 3 else "")
        affected = f" ({plural(self.num_records, 'record')}: {named})" if self.num_records else ""
        return f"{where}file '{self.path}': {self.detail}{affected}"


def shard_place(path: str) -> tuple[str, str | None, int] | None:
    """Array, bucket (None for captions) and number of a shard file; None for other files."""
    match = SHARD.fullmatch(path)
    return (match["array"], match["bucket"], int(match["shard"])) if match else None


class Locator:
    """Finds the bucket, shard and records of a damaged file; reads tables only when there is one.

    Args:
      manifests: intact ones, by revision.
    """

    def __init__(self, root: Path, manifests: Mapping[int, Manifest]) -> None:
        self._root, self._manifests = root, manifests
        self._table = cache(self._read_table)  # a damaged folder causes many findings

    @cached_property
    def _layouts(self) -> dict[int, dict[str, ArrayLayout]]:
        return {revision: manifest.layouts() for revision, manifest in self._manifests.items()}

    def finding(self, entry: FileEntry, cause: str, detail: str) -> Finding:
        """A finding with its bucket, shard and records."""
        place = shard_place(entry.path)
        newest = max((n for n, arrays in self._layouts.items() if place and place[0] in arrays), default=0)
        if place is None or not newest:
            return Finding(entry.path, cause, detail)
        (array, bucket, shard), layout = place, self._layouts[newest][place[0]]
        row = shard * layout.shard_rows
        revision = next((one.revision for one in layout.row_ranges if one.first <= row < one.end), newest)
        named = revision if revision in self._manifests else newest  # a later one may have replaced or dropped records
        try:
            table = self._records(named, layout, shard) if bucket else self._captions(named, layout, shard)
        except (LeanditError, OSError, KeyError):
            return Finding(entry.path, cause, detail, revision, bucket, shard)
        names = table[0].to_pylist() if table.num_columns else []
        if cause == "content" and names:
            spec, arrays = self._manifests[named].spec, self._layouts[newest]
            group = array_groups(spec, buckets_of(arrays))[array]
            names = self._differing([arrays[path] for path in group.rows], shard, table)
            detail = detail if names else f"{detail or CAUSES[cause]}: the index or the space between the records"
        return Finding(entry.path, cause, detail, revision, bucket, shard, len(names), names[:MAX_KEYS])

    def _read_table(self, revision: int, name: str) -> pa.Table:
        """A table of a revision, or its second copy; empty if both are damaged."""
        prefix, manifest = revision_prefix(revision), self._manifests[revision]
        entry = next(entry for entry in manifest.files if entry.path == prefix + name)
        for path in (self._root / entry.path, self._root / f"{prefix}{TWIN}/{name}"):
            try:
                if xxh3_file(path) == entry.xxh3_128:
                    return map_parquet(path)
            except (LeanditError, OSError):
                continue
        return pa.table({})

    def _records(self, revision: int, layout: ArrayLayout, shard: int) -> pa.Table:
        """Key, checksum, and first row and number of rows in the shard, of its stored records."""
        records, (_, bucket, *inside, _) = self._table(revision, RECORDS), layout.path.split("/")
        if not records.num_columns:
            return records
        rows = layout.rows_of(shard)
        is_inside = pc.and_(pc.equal(records["bucket"], bucket), pc.equal(records["status"], "stored"))
        is_inside = pc.and_(is_inside, pc.greater_equal(records["row"], rows.start))
        stored = records.filter(pc.fill_null(pc.and_(is_inside, pc.less(records["row"], rows.stop)), False))
        checksums = stored[f"checksum_{inside[1]}" if inside else "checksum"]
        ones, first = np.ones(len(stored), np.int64), stored["row"].to_numpy() - rows.start
        return pa.table({"key": stored["key"], "checksum": checksums, "row": first, "count": ones, "pooled": first})

    def _captions(self, revision: int, layout: ArrayLayout, shard: int) -> pa.Table:
        """Text, checksum, first row and number of rows in the shard, of its captions; empty for the null caption."""
        captions, (_, *inside, name) = self._table(revision, CAPTIONS), layout.path.split("/")
        if name not in (EMBEDDINGS, SCALES, POOLED) or not captions.num_columns:
            return pa.table({})
        spec = self._manifests[revision].spec
        encoder, suffix = spec.text_encoder_of(inside[0] if inside else ""), suffixes(spec)[inside[0] if inside else ""]
        starts, counts = captions[f"{CAPTION_START}{suffix}"].to_numpy(), captions[f"num_tokens{suffix}"]
        pooled, rows = pooled_rows(encoder.spec, starts), layout.rows_of(shard)
        of_array = pooled if name == POOLED else starts
        inside_shard = np.flatnonzero((of_array >= rows.start) & (of_array < rows.stop))
        if not len(inside_shard):
            return pa.table({})
        taken = captions.take(pa.array(inside_shard))
        # Tokens and pooled vectors of a caption are in shards of one number; each counts from its own first row.
        tokens = self._layouts[revision].get(f"{layout.path.removesuffix(name)}{EMBEDDINGS}", layout)
        vectors = self._layouts[revision].get(f"{layout.path.removesuffix(name)}{POOLED}", layout)
        columns = {"text": taken["text"], "checksum": taken[f"checksum{suffix}"]}
        columns |= {"row": starts[inside_shard] - shard * tokens.shard_rows}
        columns |= {"count": num_stored_tokens(encoder.spec, counts)[inside_shard].astype(np.int64)}
        return pa.table(columns | {"pooled": pooled[inside_shard] - shard * vectors.shard_rows})

    def _differing(self, layouts: list[ArrayLayout], shard: int, table: pa.Table) -> list[str]:
        """Names of the records or captions that do not match their checksum; all names if a file cannot be opened.

        Args:
          layouts: arrays whose rows have one checksum.
        """
        try:
            files = [ShardFile(self._root / one.shard_path(shard), one, len(one.rows_of(shard))) for one in layouts]
        except (DamageError, OSError, ValueError):
            return table[0].to_pylist()
        differing = []
        for name, checksum, row, count, pooled in zip(*(column.to_pylist() for column in table.columns), strict=True):
            places = [(pooled, 1) if one.path.endswith(f"/{POOLED}") else (row, count) for one in layouts]
            try:
                rows = [file.read(first, first + number) for file, (first, number) in zip(files, places, strict=True)]
                is_same = xxh3_64(*rows) == checksum
            except DamageError:
                is_same = False
            if checksum is not None and not is_same:
                differing.append(name)
        return differing
