"""One shard of latents, features and companion pictures: a pure function of a slice of the plan and the encoders.

A batch is the next ``batch_size`` rows of the shard. A picture that cannot be decoded leaves its row empty, so the
other rows keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...datasets.errors import RecordRejected
from ...datasets.format.layout import Part
from ...datasets.format.schema import Fallback, Reject
from ...datasets.format.table_schemas import REJECTED, STORED
from ...datasets.revisions.commits import new_results
from ...datasets.revisions.writer import row_checksum
from ..encoders.forwards import EncodedRow, RowsEncoder, Views, encode_batch, rows_of_a_forward
from ..images.decoders import Decoded
from .picture_batches import BucketSource, Picture


@dataclass
class PackedShard:
    """A shard ready to be committed: arrays by path, results of its rows (ROW_RESULTS), rejects and fallbacks."""

    part: str
    shard: int
    arrays: dict[str, np.ndarray]
    results: np.ndarray
    rejects: list[Reject] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)


@dataclass(frozen=True)
class EncodedBatch:
    """Result of one batch.

    Args:
      rows: of the bucket.
      pictures: decoded, or rejects; None for a row that no record has.
      found: of each row; empty if nothing was encoded.
      first_rows: rows of the first forward that was tried.
      max_rows: rows of a forward, for the following batches.
    """

    rows: range
    pictures: Sequence[Picture | None]
    found: Sequence[EncodedRow]
    first_rows: int
    max_rows: int


def batch_views(
    pictures: Sequence[Picture | None], names: Iterable[str], black: Callable[[tuple[int, ...]], np.ndarray], count: int
) -> Views:
    """Pixels of a batch in which at least one picture is decoded, for ``encode_batch``; black where one is not.

    Args:
      names: OWN, and of companions.
      black: returns zeroed pixels.
      count: 2 for flipped views too, else 1.
    """
    views = {}
    for name in sorted(names):
        found = {i: one.companions[name] if name else one for i, one in enumerate(pictures) if isinstance(one, Decoded)}
        pixels = black((len(pictures), *next(iter(found.values())).pixels.shape))
        for i, one in found.items():
            pixels[i] = one.pixels
        views[name] = [pixels, pixels[:, :, ::-1]][:count]
    return views


class ShardBuilder:
    """Collects the encoded batches of one shard of pictures.

    Args:
      part, shard: of the plan.
      source: of the part's rows.
      batch_size: planned rows of a forward.
      known_fallbacks: of an earlier commit record: rows that were not encoded as planned.
    """

    def __init__(
        self,
        part: Part,
        shard: int,
        source: BucketSource,
        *,
        batch_size: int,
        known_fallbacks: Sequence[Fallback] = (),
    ) -> None:
        self._part, self._shard, self._source = part, shard, source
        self._rows = part.arrays[0].rows_of(shard)
        self._arrays = {
            group: [np.full((len(self._rows), *one.shape[1:]), one.fill_value, one.dtype) for one in layouts]
            for group, layouts in part.groups.items()
        }
        self.max_rows = batch_size
        self._known_fallbacks = {fallback.row: fallback.how for fallback in known_fallbacks}
        self._rejects: list[Reject] = []
        self._fallbacks: list[Fallback] = []
        self._results = new_results(part, len(self._rows))

    def encode(
        self,
        rows: range,
        pictures: Sequence[Picture | None],
        encoders: Sequence[RowsEncoder],
        black: Callable[[tuple[int, ...]], np.ndarray],
        *,
        num_views: int,
        max_rows: int,
    ) -> EncodedBatch:
        """Encode one batch; thread-safe with other batches.

        Args:
          rows: of the bucket.
          pictures: decoded, or rejects; None for a row that no record has.
          encoders: of each group of the part.
          black: returns zeroed pixels.
          num_views: 2 if flipped pictures are stored, else 1.
          max_rows: rows of a forward, as far as the batches before have shown.
        """
        first_rows = min(max_rows, len(rows))
        if not any(isinstance(picture, Decoded) for picture in pictures):  # nothing to encode
            return EncodedBatch(rows, pictures, [], first_rows, max_rows)
        views = batch_views(pictures, {one.picture for one in encoders}, black, num_views)
        records = self._source.positions[rows.start : rows.stop]
        allowed = min(rows_of_a_forward(self._known_fallbacks.get(row), max_rows) for row in rows)
        found, size = encode_batch(views, records, encoders, max_rows=allowed)
        # A size that did not fit is not tried again in this shard.
        return EncodedBatch(rows, pictures, found, first_rows, size if size < min(allowed, len(rows)) else max_rows)

    def store(
        self, batch: EncodedBatch, again: Callable[[range, Sequence[Picture | None], int], EncodedBatch]
    ) -> list[RecordRejected | None]:
        """Store the next batch, in order.

        If an earlier batch did not fit and this one was started before that was known, it is encoded again: the shard
        must be as if the batches had run one after the other.

        Args:
          again: encodes rows and pictures with a limit of rows.
        Returns: the reject of each row, None if stored.
        """
        if batch.first_rows != min(self.max_rows, len(batch.rows)):
            batch = again(batch.rows, batch.pictures, self.max_rows)
        self.max_rows = min(self.max_rows, batch.max_rows)
        outcomes = []
        for i, picture in enumerate(batch.pictures):
            found = batch.found[i] if batch.found and isinstance(picture, Decoded) else None
            reject = picture if isinstance(picture, RecordRejected) else found and found.reject
            self._store(batch.rows[i], picture, None if reject else found, reject)
            outcomes.append(reject)
        return outcomes

    def _store(
        self, row: int, picture: Picture | None, found: EncodedRow | None, reject: RecordRejected | None
    ) -> None:
        """Store one row and its reject or fallback; rows of rejects stay empty."""
        results = self._results[row - self._rows.start]
        if reject is not None:
            refused = {"stage": reject.stage, "reason": reject.reason, "detail": reject.detail}
            self._rejects.append(Reject(row=row, key=self._source.keys[row], **refused))
            results["state"] = REJECTED
        if found is None or not isinstance(picture, Decoded):
            return
        results["state"] = STORED
        for i, (group, arrays) in enumerate(self._arrays.items()):
            for array, values in zip(arrays, found.groups[group], strict=True):
                array[row - self._rows.start] = values
            of_file = picture.companions[group] if group in self._source.companions else picture
            results["source_checksum"][i] = of_file.source_checksum
            if quality := found.qualities.get(group):
                results["min_cosine"][i], results["max_error"][i] = quality
        if found.fallback:
            self._fallbacks.append(Fallback(row=row, how=found.fallback))

    def finish(self) -> PackedShard:
        """Compute the checksums and return the shard."""
        for i, arrays in enumerate(self._arrays.values()):
            for row in np.flatnonzero(self._results["state"][:, i] == STORED):
                self._results["checksum"][row, i] = row_checksum(*(array[row] for array in arrays))
        arrays = [array for of_group in self._arrays.values() for array in of_group]
        paths = [layout.path for layout in self._part.arrays]
        return PackedShard(
            self._part.name,
            self._shard,
            dict(zip(paths, arrays, strict=True)),
            self._results,
            rejects=self._rejects,
            fallbacks=self._fallbacks,
        )
