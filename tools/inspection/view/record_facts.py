"""Where the bytes of a record lie, and whether they are as written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....datasets.errors import LeanditError
from ....datasets.format.layout import commit_path
from ....datasets.format.row_layout import LATENTS, bucket_part, row_arrays
from ....datasets.revisions.writer import row_checksum
from ....datasets.store import LatentStore, Record


class RowPlace(NamedTuple):
    """Where a row of one array lies.

    Args:
      array: path of the array within its bucket.
      shape, dtype: of the row as stored.
      file: path of the shard within the store.
      offset: first byte of the row, or of its compressed chunk.
      num_bytes: of the row, or of its compressed chunk.
    """

    array: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GroupFacts:
    """The arrays of a record that share a checksum: its latents, a feature, or a companion image.

    Args:
      recorded: XXH3-64 in the records table, 16 hex digits; "" for none.
      read: the same of the bytes as they are now; "" if they cannot be read.
      problem: why they cannot be read.
    """

    name: str
    places: list[RowPlace]
    recorded: str
    read: str
    problem: str = ""

    @property
    def is_as_written(self) -> bool:
        """The bytes are those that were written."""
        return bool(self.read) and self.read == self.recorded


def commit_of(store: LatentStore, record: Record) -> str:
    """Path of the commit record of a stored record's shard."""
    assert record.bucket is not None
    _, shard = store.latents(record.bucket).locate(record.row)
    return commit_path(record.revision, bucket_part(record.bucket), shard)


def groups_of(store: LatentStore, record: Record, values: Mapping[str, Any]) -> Iterator[GroupFacts]:
    """The latents, features and companion images of a stored record, read now.

    Args:
      values: the columns of the record, checksums as 16 hex digits.
    """
    for name in (LATENTS, *store.features, *store.pictures):
        recorded = values[f"checksum_{name}" if name else "checksum"] or ""
        try:
            places, rows = [], []
            for path, (shape, dtype) in row_arrays(store.spec, record.bucket or "", name).items():
                array = store.array(f"{bucket_part(record.bucket or '')}/{path}")
                places.append(RowPlace(path, shape, dtype, *array.place(record.row)))
                rows.append(array[record.row])
            yield GroupFacts(name or "latent", places, recorded, row_checksum(*rows))
        except LeanditError as error:
            yield GroupFacts(name or "latent", [], recorded, "", str(error))
