"""One batch of pictures through the image encoder: halved if out of memory, repeated in float32 if not finite.

Both are recorded with each row, because they change its bits. A batch that runs out of memory starts over with forwards
of half the size, rounded up, down to one picture; so one number describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...datasets.errors import RecordRejected, ResourceError
from ...datasets.format.schema import LOGVAR_RANGE, EncoderIdentity, LatentSpec
from .vae import ImageEncoder

CPU_BATCH = 32  # on a CPU more rows in a forward are no faster
MAX_BATCH = 256
MAX_BATCH_BYTES = 96 << 20  # of decoded pixels: up to eight batches are in host memory
FLOAT32 = "float32"
SIZE = "batch:"


class Encoding(Protocol):
    """Encodes pictures: an ``ImageEncoder``, or one shared by threads (``SharedEncoder``)."""

    @property
    def identity(self) -> EncoderIdentity:
        """Of the encoder."""
        ...

    def black(self, shape: tuple[int, ...]) -> np.ndarray:
        """As ``ImageEncoder.black``."""
        ...

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """As ``ImageEncoder.encode``."""
        ...

    def encode_in_float32(self, pixels: np.ndarray) -> np.ndarray:
        """As ``ImageEncoder.encode_in_float32``."""
        ...


class SharedEncoder:
    """An encoder that threads share: one batch at a time, while other batches are prepared and stored.

    Args:
      measure: returns a context that measures a forward.
    """

    def __init__(self, encoder: ImageEncoder, measure: Callable[[], AbstractContextManager[None]]) -> None:
        self._encoder, self._measure = encoder, measure
        self.identity, self.black = encoder.identity, encoder.black

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """As ``ImageEncoder.encode``."""
        with self._encoder.turn, self._measure():
            return self._encoder.encode(pixels)

    def encode_in_float32(self, pixels: np.ndarray) -> np.ndarray:
        """As ``ImageEncoder.encode_in_float32``."""
        with self._encoder.turn, self._measure():
            return self._encoder.encode_in_float32(pixels)


@dataclass(frozen=True)
class EncodedRow:
    """One picture in its stored form.

    Args:
      arrays: (stored_channels, H, W) of each view; empty if rejected.
      fallback: how it was encoded if not as planned, as in the records table; else empty.
      reject: the reason if rejected.
    """

    arrays: list[np.ndarray]
    fallback: str = ""
    reject: RecordRejected | None = None


def encode_batch(
    views: Sequence[np.ndarray], records: np.ndarray, encoder: Encoding, spec: LatentSpec, *, max_rows: int
) -> tuple[list[EncodedRow], int]:
    """Encode one batch of the plan.

    Args:
      views: (B, height_px, width_px, 3) uint8 each: the pictures, and the flipped ones if the store has them.
      records: (B,) positions in the records table: the key of a stored sample.
      spec: of the latents.
      max_rows: rows of a forward; B or more if no smaller limit is known.
    Returns: a result for each row, and the rows of a forward that did fit.
    """
    num_rows = len(records)
    size = min(max_rows, num_rows)
    while (found := _encode_in_forwards(size, views, encoder)) is None:
        size = -(-size // 2)
    halved = f"{SIZE}{size}" if size < num_rows else ""
    stored, is_finite = _stored_views(found, spec, records)
    rows = [
        EncodedRow([view[i] for view in stored])
        if is_finite[i]
        else _encode_row(i, [view[i : i + 1] for view in views], [rows[i] for rows in found], records, encoder, spec)
        for i in range(num_rows)
    ]
    return [_with_fallback(row, halved) for row in rows], size


def _stored_views(
    found: Sequence[Sequence[np.ndarray | None]], spec: LatentSpec, records: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """All rows of each view in the store's dtype, and (B,) bool: finite in all views; all False if a row is missing."""
    if any(row is None for rows in found for row in rows):
        return [], np.zeros(len(records), bool)
    stored = [to_stored(np.stack([row for row in rows if row is not None]), spec, records) for rows in found]
    return stored, np.logical_and.reduce([np.isfinite(rows).all(axis=(1, 2, 3)) for rows in stored])


def largest_batch(encoder: ImageEncoder, height_px: int, width_px: int) -> int:
    """The largest power of two of pictures of one size that fit into one forward, found by doubling.

    CPU_BATCH on a CPU; at most MAX_BATCH and MAX_BATCH_BYTES on any device.

    Raises: ResourceError: not even one fits.
    """
    max_rows = min(MAX_BATCH, max(1, MAX_BATCH_BYTES // (3 * height_px * width_px)))
    if encoder.device.type == "cpu":
        return min(CPU_BATCH, max_rows)
    fits, size = 0, 1
    while (
        size <= max_rows
        and _encode_if_it_fits(encoder.encode, np.zeros((size, height_px, width_px, 3), np.uint8)) is not None
    ):
        fits, size = size, 2 * size
    if not fits:
        raise ResourceError(
            f"vae.batch_size 0: one picture of {height_px}x{width_px} px does not fit into the memory of "
            f"{encoder.device}. Use vae.tile_px, a smaller vae.dtype, or another device."
        )
    return fits


def rows_of_a_forward(fallback: str | None, planned: int) -> int:
    """Rows that were encoded in one forward, from a row's ``fallback``."""
    size = next((part for part in (fallback or "").split(",") if part.startswith(SIZE)), None)
    return int(size.removeprefix(SIZE)) if size else planned


def to_stored(moments: np.ndarray, spec: LatentSpec, records: np.ndarray) -> np.ndarray:
    """The stored part of an encoder's output, in the store's dtype.

    Args:
      moments: (B, 2C, H, W) mean and log-variance, or (B, C, H, W) latents; float32.
      records: (B,) positions in the records table: the key of a stored sample.
    Returns: (B, stored_channels, H, W).
    """
    if spec.kind == "mean":
        moments = moments[:, : spec.channels]
    elif spec.kind == "sample":
        moments = sample_once(moments, records)
    with np.errstate(over="ignore"):  # overflow becomes infinity, which is rejected
        return moments.astype(spec.dtype)


def sample_once(moments: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Draw mean + std * noise once, (B, C, H, W) float32; the noise depends on the record alone.

    Args:
      moments: (B, 2C, H, W) float32, mean then log-variance.
      records: (B,) positions in the records table.
    Source: Kingma and Welling 2014, section 2.4 (reparameterization).
    """
    drawn = []
    for row, record in zip(moments, records, strict=True):  # alone, so its bits depend on no other row
        mean, logvar = np.split(row, 2)
        # Philox is counter-based, so any record can be drawn alone.
        generator = np.random.Generator(np.random.Philox(key=[0, 0], counter=[0, 0, 0, int(record)]))
        noise = generator.standard_normal(mean.shape, dtype=np.float32)
        drawn.append(mean + np.exp(0.5 * np.clip(logvar, *LOGVAR_RANGE)) * noise)
    return np.stack(drawn)


def _encode_in_forwards(
    size: int, views: Sequence[np.ndarray], encoder: Encoding
) -> list[list[np.ndarray | None]] | None:
    """Moments of each row of each view; None if they do not fit, and for a row that does not fit alone."""
    found = []
    for pixels in views:
        rows: list[np.ndarray | None] = []
        for start in range(0, len(pixels), size):
            moments = _encode_if_it_fits(encoder.encode, pixels[start : start + size])
            if moments is None and size > 1:
                return None
            rows += [None] if moments is None else list(moments)
        found.append(rows)
    return found


def _encode_if_it_fits(encode: Callable[[np.ndarray], np.ndarray], pixels: np.ndarray) -> np.ndarray | None:
    """The encoder's output, or None if out of memory."""
    try:
        return encode(pixels)
    except torch.OutOfMemoryError:
        pass  # empty_cache below: the exception still holds the forward's tensors here
    torch.cuda.empty_cache()
    return None


def _encode_row(
    row: int,
    pixels: list[np.ndarray],
    moments: list[np.ndarray | None],
    records: np.ndarray,
    encoder: Encoding,
    spec: LatentSpec,
) -> EncodedRow:
    """One row in the store's dtype, encoded again in float32 if a view is not finite."""
    arrays, fallback = [], ""
    for picture, found in zip(pixels, moments, strict=True):
        if found is None:
            return EncodedRow([], reject=_too_large(picture))
        stored = to_stored(found[None], spec, records[row : row + 1])[0]
        if not np.isfinite(stored).all():
            fallback, again = FLOAT32, _encode_if_it_fits(encoder.encode_in_float32, picture)
            if again is None:
                return EncodedRow([], reject=_too_large(picture))
            stored = to_stored(again, spec, records[row : row + 1])[0]
        if not np.isfinite(stored).all():
            return EncodedRow([], reject=RecordRejected("encode", "nonfinite", f"{encoder.identity.class_name} output"))
        arrays.append(stored)
    return EncodedRow(arrays, fallback)


def _too_large(picture: np.ndarray) -> RecordRejected:
    height_px, width_px = picture.shape[1:3]
    detail = f"one picture of {height_px}x{width_px} px does not fit; vae.tile_px or a smaller vae.dtype needs less"
    return RecordRejected("encode", "out_of_memory", detail)


def _with_fallback(row: EncodedRow, halved: str) -> EncodedRow:
    if row.reject or not halved:
        return row
    return EncodedRow(row.arrays, f"{halved},{row.fallback}" if row.fallback else halved)
