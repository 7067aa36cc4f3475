"""All about one record: its columns, captions, channels, and where its bytes lie and whether they are as written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ....datasets.errors import LeanditError
from ....datasets.format.layout import commit_path
from ....datasets.format.row_layout import LATENTS, bucket_part, row_arrays
from ....datasets.format.table_schemas import suffixes
from ....datasets.revisions.writer import row_checksum
from ....datasets.store import LatentStore, Record
from .tables import StoreTables

HASHED = ("checksum", "source_checksum")  # columns of 64 bits, shown as 16 hex digits


def readable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row of ``StoreTables``, checksums as 16 hex digits."""
    return {
        name: f"{value:016x}" if name.startswith(HASHED) and value is not None else value
        for name, value in row.items()
        if name != "position"
    }


def captions_of(store: LatentStore, tables: StoreTables, record: Record) -> list[dict[str, Any]]:
    """``id``, ``text``, ``tokens`` by text encoder, and ``truncated`` of each caption, in the record's order."""
    captions, columns = tables.captions(record.caption_ids), suffixes(store.spec)
    return [
        {
            "id": number,
            "text": captions[number]["text"],
            "tokens": {name: captions[number][f"num_tokens{suffix}"] for name, suffix in columns.items()},
            "truncated": any(captions[number][f"truncated{suffix}"] for suffix in columns.values()),
        }
        for number in record.caption_ids
    ]


def channel_names(store: LatentStore) -> list[str]:
    """A name for each stored channel of a latent: "mean 0"."""
    spec = store.spec.latent
    second = {"mean_logvar": "log-variance", "mean_std": "deviation"}.get(spec.kind, "")
    names = ["mean" if second else "channel"] * spec.channels + [second] * (spec.stored_channels - spec.channels)
    return [f"{name} {number % spec.channels}" for number, name in enumerate(names)]


def commit_of(store: LatentStore, record: Record) -> str:
    """Path of the commit record of a stored record's shard."""
    assert record.bucket is not None
    _, shard = store.latents(record.bucket).locate(record.row)
    return commit_path(record.revision, bucket_part(record.bucket), shard)


def groups_of(store: LatentStore, record: Record, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arrays of a stored record that share a checksum: its latents, each feature, each companion image.

    Args:
      values: the ``readable`` columns of the record.
    Returns: ``name``; ``places``, in each array the row's ``shape`` and ``dtype``, the ``file`` in the store and the
      first byte (``offset``) and ``num_bytes`` of the row or its compressed chunk; ``recorded``, XXH3-64 in the records
      table as 16 hex digits, and ``read``, that of the bytes as they are now; ``problem``, if they cannot be read.
    """
    for name in (LATENTS, *store.features, *store.pictures):
        facts = {"name": name or "latent", "recorded": values[f"checksum_{name}" if name else "checksum"] or ""}
        try:
            places, rows = [], []
            for path, (shape, dtype) in row_arrays(store.spec, record.bucket or "", name).items():
                array = store.array(f"{bucket_part(record.bucket or '')}/{path}")
                place = dict(zip(("file", "offset", "num_bytes"), array.place(record.row), strict=True))
                places.append({"array": path, "shape": shape, "dtype": dtype, **place})
                rows.append(array[record.row])
            yield facts | {"places": places, "read": row_checksum(*rows), "problem": ""}
        except LeanditError as error:
            yield facts | {"places": [], "read": "", "problem": str(error)}
