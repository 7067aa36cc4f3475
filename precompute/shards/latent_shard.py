"""One shard of latents: a pure function of a slice of the plan and the encoders.

A batch is the next ``batch_size`` rows of the shard. A picture that cannot be decoded leaves its row empty, so the
other rows keep their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...datasets.errors import RecordRejected
from ...datasets.format.schema import Fallback, LatentSpec, Reject
from ...datasets.format.zarr_shard import ArrayLayout
from ...datasets.revisions.writer import row_checksum
from ..encoders.forwards import EncodedRow, Encoding, encode_batch, rows_of_a_forward
from ..images.decoders import Decoded


@dataclass
class PackedShard:
    """A shard ready to be committed: arrays, a checksum for each row, rejects and fallbacks."""

    part: str
    shard: int
    arrays: dict[str, np.ndarray]
    checksums: list[str]
    source_checksums: list[str] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    qualities: list[tuple[float, float]] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)


@dataclass(frozen=True)
class EncodedBatch:
    """Result of one batch.

    Args:
      rows: of the bucket.
      pictures: decoded, or rejects.
      found: of each row; empty if nothing was encoded.
      first_rows: rows of the first forward that was tried.
      max_rows: rows of a forward, for the following batches.
    """

    rows: range
    pictures: Sequence[Decoded | RecordRejected]
    found: Sequence[EncodedRow]
    first_rows: int
    max_rows: int


class ShardBuilder:
    """Collects the encoded batches of one latent shard.

    Args:
      part, shard: of the plan.
      layouts: of the part's arrays: latents, then flipped latents if any.
      keys: of all rows of the bucket.
      records: positions in the records table, of all rows of the bucket.
      spec: of the latents.
      known_fallbacks: of an earlier commit record: rows that were not encoded as planned.
    """

    def __init__(
        self,
        part: str,
        shard: int,
        layouts: Sequence[ArrayLayout],
        *,
        keys: Sequence[str],
        records: np.ndarray,
        spec: LatentSpec,
        known_fallbacks: Sequence[Fallback] = (),
    ) -> None:
        self._part, self._shard, self._spec = part, shard, spec
        self._keys, self._records = keys, records
        self._rows = layouts[0].rows_of(shard)
        self._arrays = {
            layout.path: np.full((len(self._rows), *layout.shape[1:]), np.nan, layout.dtype) for layout in layouts
        }
        self.max_rows = spec.batch_size
        self._known_fallbacks = {fallback.row: fallback.how for fallback in known_fallbacks}
        self._rejects: list[Reject] = []
        self._fallbacks: list[Fallback] = []
        self._source_checksums: list[str] = []

    def encode(
        self, rows: range, pictures: Sequence[Decoded | RecordRejected], encoder: Encoding, *, max_rows: int
    ) -> EncodedBatch:
        """Encode one batch; thread-safe with other batches.

        Args:
          rows: of the bucket.
          pictures: decoded, or rejects.
          max_rows: rows of a forward, as far as the batches before have shown.
        """
        first_rows = min(max_rows, len(rows))
        shape = next((p.pixels.shape for p in pictures if isinstance(p, Decoded)), None)
        if shape is None:  # nothing to encode
            return EncodedBatch(rows, pictures, [], first_rows, max_rows)
        pixels = encoder.black((len(pictures), *shape))
        for i, picture in enumerate(pictures):
            if isinstance(picture, Decoded):
                pixels[i] = picture.pixels
        views = [pixels, pixels[:, :, ::-1]][: len(self._arrays)]
        records = self._records[rows.start : rows.stop]
        allowed = min(rows_of_a_forward(self._known_fallbacks.get(row), max_rows) for row in rows)
        found, size = encode_batch(views, records, encoder, self._spec, max_rows=allowed)
        # A size that did not fit is not tried again in this shard.
        return EncodedBatch(rows, pictures, found, first_rows, size if size < min(allowed, len(rows)) else max_rows)

    def store(self, batch: EncodedBatch, encoder: Encoding) -> list[RecordRejected | None]:
        """Store the next batch, in order.

        If an earlier batch did not fit and this one was started before that was known, it is encoded again: the shard
        must be as if the batches had run one after the other.

        Returns: the reject of each row, None if stored.
        """
        if batch.first_rows != min(self.max_rows, len(batch.rows)):
            batch = self.encode(batch.rows, batch.pictures, encoder, max_rows=self.max_rows)
        self.max_rows = min(self.max_rows, batch.max_rows)
        outcomes = []
        for i, picture in enumerate(batch.pictures):
            reject = picture if isinstance(picture, RecordRejected) else batch.found[i].reject
            self._store(batch.rows[i], picture, None if reject else batch.found[i], reject)
            outcomes.append(reject)
        return outcomes

    def _store(
        self, row: int, picture: Decoded | RecordRejected, found: EncodedRow | None, reject: RecordRejected | None
    ) -> None:
        """Store one row and its reject or fallback; rows of rejects stay NaN."""
        self._source_checksums.append(
            f"{picture.source_checksum:016x}" if found and isinstance(picture, Decoded) else ""
        )
        if reject is not None:
            refused = {"stage": reject.stage, "reason": reject.reason, "detail": reject.detail}
            self._rejects.append(Reject(row=row, key=self._keys[row], **refused))
        if found:
            for array, stored in zip(self._arrays.values(), found.arrays, strict=True):
                array[row - self._rows.start] = stored
            if found.fallback:
                self._fallbacks.append(Fallback(row=row, how=found.fallback))

    def finish(self) -> PackedShard:
        """Compute the checksums and return the shard."""
        rejected = {reject.row for reject in self._rejects}
        checksums = [
            "" if row in rejected else row_checksum(*(array[i] for array in self._arrays.values()))
            for i, row in enumerate(self._rows)
        ]
        return PackedShard(
            self._part,
            self._shard,
            self._arrays,
            checksums,
            source_checksums=self._source_checksums,
            rejects=self._rejects,
            fallbacks=self._fallbacks,
        )
