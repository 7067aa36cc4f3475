"""All that a store knows of one record: values, captions, where its bytes lie and whether they are as written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .....datasets.errors import LeanditError
from .....datasets.format.layout import commit_path
from .....datasets.format.row_layout import LATENTS, bucket_part, row_arrays
from .....datasets.format.table_schemas import REJECT_REASONS, suffixes
from .....datasets.revisions.writer import row_checksum
from .....datasets.store import LatentStore, Record

HASHED = ("checksum", "source_checksum")  # columns of 64 bits, shown as 16 hex digits


@dataclass(frozen=True)
class CaptionFacts:
    """A caption of a record: its id, text, and by text encoder its stored tokens and whether it was cut."""

    id: int
    text: str
    tokens: dict[str, int]
    truncated: bool


@dataclass(frozen=True)
class RowPlace:
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
    """The arrays of a record that share a checksum: its latents, a feature, or a companion picture.

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


def column_values(store: LatentStore, record: Record) -> dict[str, Any]:
    """Every column of the records table, checksums as 16 hex digits."""
    values = store.records.slice(record.index, 1).to_pylist()[0]
    for name, value in values.items():
        if name.startswith(HASHED) and value is not None:
            values[name] = f"{value:016x}"
    return values


def reason_in_words(record: Record) -> str:
    """What the reason of a reject means; "" for others."""
    return REJECT_REASONS.get(record.reason or "", "")


def captions_of(store: LatentStore, record: Record) -> list[CaptionFacts]:
    """The captions of a record, in its order."""
    found = []
    for number in record.caption_ids:
        row = store.captions.slice(number, 1).to_pylist()[0]
        tokens = {name: row[f"num_tokens{suffix}"] for name, suffix in suffixes(store.spec).items()}
        truncated = any(row[f"truncated{suffix}"] for suffix in suffixes(store.spec).values())
        found.append(CaptionFacts(number, row["text"], tokens, truncated))
    return found


def commit_of(store: LatentStore, record: Record) -> str:
    """Path of the commit record of a stored record's shard."""
    assert record.bucket is not None
    _, shard = store.latents(record.bucket).locate(record.row)
    return commit_path(record.revision, bucket_part(record.bucket), shard)


def groups_of(store: LatentStore, record: Record) -> Iterator[GroupFacts]:
    """The latents, features and companion pictures of a stored record, read now."""
    values = column_values(store, record)
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
