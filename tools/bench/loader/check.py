"""Checks that a peer delivers every record of an epoch once, bit for bit.

A loader that loses or widens records does other work, and its time says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from ....datasets.store import LatentStore
from ..harness.work import TEXT, Field, Rows, Served, Workload, rows_of

BLOCK_ROWS = 1024


@dataclass
class Check:
    """The faults of one epoch.

    Args:
      records: of the store.
      served: records delivered.
      lost: records never delivered.
      doubled: records delivered more than once.
      altered: rows whose bits equal no record.
      wrong_labels, wrong_texts: records delivered with another label or caption.
      wrong_beside: records delivered with other scales, features or captions of a second text encoder.
      dtypes: what an array became, where it is not the store's.
      shuffle: blocks of B neighbouring records that a batch draws from, against those of a global shuffle; 1 is global.
    """

    records: int
    served: int = 0
    lost: int = 0
    doubled: int = 0
    altered: int = 0
    wrong_labels: int = 0
    wrong_texts: int = 0
    wrong_beside: int = 0
    dtypes: list[str] = field(default_factory=list)
    shuffle: float = 1.0

    @property
    def problems(self) -> list[str]:
        """The faults in words; empty if there are none."""
        counts = {
            "lost": self.lost,
            "doubled": self.doubled,
            "altered": self.altered,
            "with a wrong label": self.wrong_labels,
            "with a wrong caption": self.wrong_texts,
            "with wrong arrays beside": self.wrong_beside,
        }
        faults = [f"{count} of {self.records} records {what}" for what, count in counts.items() if count]
        return faults + self.dtypes


def check_epoch(store: LatentStore, workload: Workload, batches: Iterable[Served]) -> Check:
    """Compare the batches of one epoch with the store; a latent is identified by its bits, which are unique."""
    check = Check(workload.num_records)
    parts = {workload.latent_shape(rows.bucket): rows for rows in rows_of(store)}
    known = {shape: _rows_by_hash(rows) for shape, rows in parts.items()}
    seen = {shape: np.zeros(len(rows), np.int64) for shape, rows in parts.items()}
    dtypes: set[str] = set()
    shuffles = []
    for batch in batches:
        latents, labels = np.asarray(batch.latents), np.asarray(batch.labels)
        check.served += len(latents)
        dtypes |= _changed("float16", latents)
        shape = latents.shape[1:]
        rows = np.array([known.get(shape, {}).get(each, -1) for each in _hashes(latents)], np.int64)
        good = np.flatnonzero(rows >= 0)
        check.altered += len(rows) - len(good)
        if not len(good):
            continue
        part = parts[shape]
        np.add.at(seen[shape], rows[good], 1)
        check.wrong_labels += int(np.sum(labels[good] != part.labels[rows[good]]))
        if part.caption_ids is not None:
            wrong_texts, wrong_beside = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
            for field in workload.fields(part.bucket):
                array = _delivered(batch, field)
                dtypes |= set() if array is None else _changed(field.dtype, array)
                wrong = wrong_texts if field.name == TEXT else wrong_beside
                wrong |= ~_same(part, rows, field, array, np.asarray(batch.lengths))
            check.wrong_texts += int(np.sum(wrong_texts[good]))
            check.wrong_beside += int(np.sum(wrong_beside[good]))
        shuffles.append(_mixing(rows[good], len(part), workload.batch))
    counts = np.concatenate(list(seen.values()))
    check.lost, check.doubled = int(np.sum(counts == 0)), int(np.sum(counts > 1))
    check.dtypes = sorted(dtypes)
    check.shuffle = float(np.mean([value for value in shuffles if value is not None] or [1.0]))
    return check


def _hashes(latents: np.ndarray) -> list[int]:
    """Hash each latent as float16, so that a widened one is still recognized."""
    return [xxhash.xxh3_64_intdigest(row) for row in np.ascontiguousarray(latents, np.float16)]


def _rows_by_hash(rows: Rows) -> dict[int, int]:
    blocks = (np.arange(start, min(start + BLOCK_ROWS, len(rows))) for start in range(0, len(rows), BLOCK_ROWS))
    row_of = {each: int(row) for block in blocks for row, each in zip(block, _hashes(rows.latents(block)), strict=True)}
    assert len(row_of) == len(rows), f"{len(rows) - len(row_of)} records of bucket '{rows.bucket}' are equal"
    return row_of


def _changed(dtype: str, array: np.ndarray) -> set[str]:
    return set() if array.dtype == dtype else {f"{dtype} became {array.dtype}"}


def _delivered(batch: Served, field: Field) -> np.ndarray | None:
    """An array of a batch; None if the peer leaves it out."""
    array = batch.text if field.name == TEXT else (batch.beside or {}).get(field.name)
    return None if array is None else np.asarray(array)


def _same(part: Rows, rows: np.ndarray, field: Field, array: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
    """(B,) whether each record has its rows of a field, bit for bit; row -1 is not a record."""
    expected = lengths.sum() if field.ragged else len(rows)
    if array is None or len(lengths) != len(rows) or expected != len(array):
        return np.zeros(len(rows), bool)
    of_records = np.split(array, np.cumsum(lengths)[:-1]) if field.ragged else list(array)

    def wanted(row: int) -> np.ndarray | None:
        return part.text(row) if field.name == TEXT else part.beside(row)[field.name]

    return np.array([row >= 0 and _equal(got, wanted(row)) for got, row in zip(of_records, rows.tolist(), strict=True)])


def _equal(got: np.ndarray, wanted: np.ndarray | None) -> bool:
    return wanted is not None and got.shape == wanted.shape and got.tobytes() == wanted.astype(got.dtype).tobytes()


def _mixing(rows: np.ndarray, count: int, batch: int) -> float | None:
    """Blocks that a full batch draws from, relative to a global shuffle; None if the batch is not full."""
    blocks = -(-count // batch)
    if len(rows) < batch or blocks < 2:
        return None
    expected = blocks * (1 - (1 - 1 / blocks) ** batch)
    return len(np.unique(rows // batch)) / expected
