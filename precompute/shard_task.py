"""One shard of latents: a pure function of a slice of the plan and the encoders.

A batch is the next ``batch_size`` rows of the shard, whatever fails in it: a picture that cannot be decoded leaves its
place in the batch empty, so its neighbours keep their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..datasets.errors import RecordRejected
from ..datasets.schema import LatentSpec, Reject
from ..datasets.shards import ArrayLayout
from ..datasets.writer import row_checksum
from .decoder import Decoded
from .encoders import ImageEncoder
from .posterior import sample_once


@dataclass
class PackedShard:
    """A shard ready to be committed: rows of each array, a checksum a row, the rejects; the quality of captions."""

    part: str
    shard: int
    arrays: dict[str, np.ndarray]
    checksums: list[str]
    source_checksums: list[str] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    qualities: list[tuple[float, float]] = field(default_factory=list)


class ShardBuilder:
    """Collects the encoded batches of one latent shard.

    Args:
      part, shard: which.
      layouts: of the part's arrays: latents, then flipped ones if any.
      keys: of all rows of the bucket.
      records: positions in the records table of all rows of the bucket.
      spec: of the latents.
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
    ) -> None:
        self._part, self._shard, self._spec = part, shard, spec
        self._keys, self._records = keys, records
        self._rows = layouts[0].rows_of(shard)
        self._arrays = {
            layout.path: np.full((len(self._rows), *layout.shape[1:]), np.nan, layout.dtype) for layout in layouts
        }
        self._rejects: list[Reject] = []
        self._source_checksums: list[str] = []

    def add(self, rows: range, pictures: Sequence[Decoded | RecordRejected], encoder: ImageEncoder) -> None:
        """Encode one batch into its rows.

        Args:
          rows: of the bucket.
          pictures: decoded, or why there is none.
        """
        failed: dict[int, RecordRejected] = {}
        shape = next((p.pixels.shape for p in pictures if isinstance(p, Decoded)), None)
        if shape is None:  # nothing to encode in the whole batch
            failed = {i: p for i, p in enumerate(pictures) if isinstance(p, RecordRejected)}
        else:
            pixels = np.zeros((len(pictures), *shape), np.uint8)
            for i, picture in enumerate(pictures):
                if isinstance(picture, RecordRejected):
                    failed[i] = picture
                else:
                    pixels[i] = picture.pixels
            for flipped, path in enumerate(self._arrays):
                stored, broken = self._encode(pixels[:, :, ::-1] if flipped else pixels, rows, encoder)
                for i in broken:
                    failed.setdefault(i, RecordRejected("encode", "nonfinite", f"{encoder.identity.class_name} output"))
                self._arrays[path][rows.start - self._rows.start : rows.stop - self._rows.start] = stored
        for i, picture in enumerate(pictures):
            reject = failed.get(i)
            checksum = f"{picture.source_checksum:016x}" if isinstance(picture, Decoded) else ""
            self._source_checksums.append("" if reject else checksum)
            if reject is not None:
                row = rows[i]
                for array in self._arrays.values():
                    array[row - self._rows.start] = np.nan
                self._rejects.append(
                    Reject(row=row, key=self._keys[row], stage=reject.stage, reason=reject.reason, detail=reject.detail)
                )

    def _encode(self, pixels: np.ndarray, rows: range, encoder: ImageEncoder) -> tuple[np.ndarray, list[int]]:
        records = self._records[rows.start : rows.stop]
        stored = to_stored(encoder.encode(pixels), self._spec, records)
        broken = np.flatnonzero(~np.isfinite(stored).all(axis=(1, 2, 3)))
        if len(broken):
            stored[broken] = to_stored(encoder.encode_in_float32(pixels[broken]), self._spec, records[broken])
            broken = np.flatnonzero(~np.isfinite(stored).all(axis=(1, 2, 3)))
        return stored, broken.tolist()

    def finish(self) -> PackedShard:
        """Checksum the rows and hand the shard over."""
        rejected = {reject.row for reject in self._rejects}
        checksums = [
            "" if row in rejected else row_checksum(*(array[i] for array in self._arrays.values()))
            for i, row in enumerate(self._rows)
        ]
        return PackedShard(
            self._part, self._shard, self._arrays, checksums, self._source_checksums, list(self._rejects)
        )


def to_stored(moments: np.ndarray, spec: LatentSpec, records: np.ndarray) -> np.ndarray:
    """What is kept of an encoder's output, in the store's dtype.

    Args:
      moments: (B, 2C, H, W) mean and log-variance, or (B, C, H, W) latents; float32.
      records: (B,) positions in the records table: the key of a stored sample.
    Returns: (B, stored_channels, H, W).
    """
    if spec.kind == "mean":
        moments = moments[:, : spec.channels]
    elif spec.kind == "sample":
        moments = sample_once(moments, records)
    with np.errstate(over="ignore"):  # what float16 cannot hold becomes infinity, and is rejected as such
        return moments.astype(spec.dtype)
