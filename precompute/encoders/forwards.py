"""One batch of pictures through the encoders: halved if out of memory, repeated in float32 if not finite.

Both are recorded with each row, because they change its bits. A batch that runs out of memory starts over with forwards
of half the size, rounded up, down to one picture; so one number describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from ...datasets.errors import RecordRejected, ResourceError
from ...datasets.format.row_layout import LATENTS
from ...datasets.format.schema import LOGVAR_RANGE, EncoderIdentity, FeatureSpec, LatentSpec
from ...datasets.format.token_dtypes import StoredTokens, narrow, quality
from .vae import ImageEncoder

CPU_BATCH = 32  # on a CPU more rows in a forward are no faster
MAX_BATCH = 256
MAX_BATCH_BYTES = 96 << 20  # of decoded pixels: up to eight batches are in host memory
FLOAT32 = "float32"
SIZE = "batch:"
OWN = LATENTS  # the record's own picture

_Output = TypeVar("_Output")


class VisionEncoder(Protocol):
    """A vision model whose tokens are stored, as ``FeatureEncoder``."""

    @property
    def identity(self) -> EncoderIdentity:
        """Of the model."""
        ...

    def spec(self) -> FeatureSpec:
        """Of the stored tokens."""
        ...

    def encode(self, pixels: np.ndarray) -> list[np.ndarray]:
        """Patches (B, T, D) and (or) class tokens (B, D), float32."""
        ...

    def encode_in_float32(self, pixels: np.ndarray) -> list[np.ndarray]:
        """The same in float32 whatever the recipe's dtype, one picture at a time."""
        ...


class RowsEncoder(Protocol):
    """Makes the stored rows of one group of arrays from pictures: of the latents, a feature or a companion picture."""

    @property
    def group(self) -> str:
        """LATENTS, or the name of the feature or companion picture."""
        ...

    @property
    def picture(self) -> str:
        """Of which picture of a record: OWN, or the name of a companion."""
        ...

    @property
    def class_name(self) -> str:
        """Of the model."""
        ...

    def encode(self, pixels: np.ndarray) -> list[np.ndarray]:
        """(B, ...) float32 outputs of the model for (B, height_px, width_px, 3) uint8 pixels."""
        ...

    def encode_in_float32(self, pixels: np.ndarray) -> list[np.ndarray]:
        """The same in float32 whatever the recipe's dtype, one picture at a time."""
        ...

    def to_stored(self, outputs: Sequence[np.ndarray], records: np.ndarray) -> list[np.ndarray]:
        """(B, ...) rows of each array of the group, in the store's dtypes.

        Args:
          records: (B,) positions in the records table: the key of a stored sample.
        """
        ...

    def quality(self, outputs: Sequence[np.ndarray], stored: Sequence[np.ndarray]) -> tuple[float, float] | None:
        """Smallest cosine and largest error of one row's tokens; None for latents."""
        ...


@dataclass(frozen=True)
class LatentRows:
    """Rows of latents, of a record's own picture or a companion."""

    encoder: ImageEncoder
    spec: LatentSpec
    group: str = LATENTS

    @property
    def picture(self) -> str:
        """As of ``RowsEncoder``."""
        return self.group

    @property
    def class_name(self) -> str:
        """As of ``RowsEncoder``."""
        return self.encoder.identity.class_name

    def encode(self, pixels: np.ndarray) -> list[np.ndarray]:
        """As of ``RowsEncoder``."""
        return [self.encoder.encode(pixels)]

    def encode_in_float32(self, pixels: np.ndarray) -> list[np.ndarray]:
        """As of ``RowsEncoder``."""
        return [self.encoder.encode_in_float32(pixels)]

    def to_stored(self, outputs: Sequence[np.ndarray], records: np.ndarray) -> list[np.ndarray]:
        """As of ``RowsEncoder``."""
        return [to_stored(outputs[0], self.spec, records)]

    def quality(self, outputs: Sequence[np.ndarray], stored: Sequence[np.ndarray]) -> tuple[float, float] | None:
        """As of ``RowsEncoder``."""
        return None


@dataclass(frozen=True)
class MaskRows:
    """Rows of a mask, which are stored as they are decoded."""

    group: str
    class_name: str = "mask"

    @property
    def picture(self) -> str:
        """As of ``RowsEncoder``."""
        return self.group

    def encode(self, pixels: np.ndarray) -> list[np.ndarray]:
        """(B, H, W) uint8 as they are."""
        return [pixels]

    def encode_in_float32(self, pixels: np.ndarray) -> list[np.ndarray]:
        """The same."""
        return [pixels]

    def to_stored(self, outputs: Sequence[np.ndarray], records: np.ndarray) -> list[np.ndarray]:
        """As of ``RowsEncoder``."""
        return list(outputs)

    def quality(self, outputs: Sequence[np.ndarray], stored: Sequence[np.ndarray]) -> tuple[float, float] | None:
        """As of ``RowsEncoder``."""
        return None


@dataclass(frozen=True)
class FeatureRows:
    """Rows of a feature: patches and (or) class tokens, and for int8 their scales."""

    encoder: VisionEncoder
    group: str
    picture: str = OWN

    @property
    def class_name(self) -> str:
        """As of ``RowsEncoder``."""
        return self.encoder.identity.class_name

    def encode(self, pixels: np.ndarray) -> list[np.ndarray]:
        """As of ``RowsEncoder``."""
        return self.encoder.encode(pixels)

    def encode_in_float32(self, pixels: np.ndarray) -> list[np.ndarray]:
        """As of ``RowsEncoder``."""
        return self.encoder.encode_in_float32(pixels)

    def to_stored(self, outputs: Sequence[np.ndarray], records: np.ndarray) -> list[np.ndarray]:
        """As of ``RowsEncoder``."""
        rows = []
        for tokens in outputs:  # (B, T, D), or (B, D) of class tokens
            stored = narrow(tokens.reshape(-1, tokens.shape[-1]), self.encoder.spec().dtype)
            rows += [part.reshape(tokens.shape[: tokens.ndim - 2 + part.ndim]) for part in stored.parts]
        return rows

    def quality(self, outputs: Sequence[np.ndarray], stored: Sequence[np.ndarray]) -> tuple[float, float] | None:
        """As of ``RowsEncoder``."""
        dtype, rest, found = self.encoder.spec().dtype, list(stored), []
        for tokens in outputs:
            parts = [rest.pop(0) for _ in range(2 if dtype == "int8" else 1)]
            rows = StoredTokens.of([np.atleast_2d(parts[0]), *(np.atleast_1d(scales) for scales in parts[1:])])
            found.append(quality(np.atleast_2d(tokens), rows, dtype))
        return min(cosine for cosine, _ in found), max(error for _, error in found)


class SharedEncoder:
    """A ``RowsEncoder`` that threads share: one batch at a time, while other batches are prepared and stored.

    Args:
      turn: lock of all encoders on a device.
      measure: returns a context that measures a forward.
    """

    def __init__(
        self,
        encoder: RowsEncoder,
        turn: AbstractContextManager[Any],
        measure: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._encoder, self._turn, self._measure = encoder, turn, measure
        self.group, self.picture, self.class_name = encoder.group, encoder.picture, encoder.class_name
        self.to_stored, self.quality = encoder.to_stored, encoder.quality

    def encode(self, pixels: np.ndarray) -> list[np.ndarray]:
        """As of ``RowsEncoder``."""
        with self._turn, self._measure():
            return self._encoder.encode(pixels)

    def encode_in_float32(self, pixels: np.ndarray) -> list[np.ndarray]:
        """As of ``RowsEncoder``."""
        with self._turn, self._measure():
            return self._encoder.encode_in_float32(pixels)


@dataclass(frozen=True)
class EncodedRow:
    """One picture in its stored form.

    Args:
      groups: of each group its arrays in the order of the layout, the flipped ones last; empty if rejected.
      qualities: of each feature, the smallest cosine and the largest error of its tokens.
      fallback: how it was encoded if not as planned, as in the records table; else empty.
      reject: the reason if rejected.
    """

    groups: dict[str, list[np.ndarray]]
    qualities: dict[str, tuple[float, float]] = field(default_factory=dict)
    fallback: str = ""
    reject: RecordRejected | None = None


Views = Mapping[str, Sequence[np.ndarray]]
"""Of each picture of the records, OWN and companions by name, (B, height_px, width_px, 3) uint8 (of a mask (B, H, W)):
as it is, and flipped if the store has flipped ones."""

Outputs = list[list[np.ndarray] | None]
"""Of each row the outputs of a model, each with a batch of one; None if it did not fit alone."""


def encode_batch(
    views: Views, records: np.ndarray, encoders: Sequence[RowsEncoder], *, max_rows: int
) -> tuple[list[EncodedRow], int]:
    """Encode one batch of the plan.

    Args:
      views: of each picture that an encoder needs.
      records: (B,) positions in the records table: the key of a stored sample.
      encoders: of each group of arrays. All use forwards of the same size, so one number describes a fallback.
      max_rows: rows of a forward; B or more if no smaller limit is known.
    Returns: a result for each row, and the rows of a forward that did fit.
    """
    num_rows = len(records)
    size = min(max_rows, num_rows)
    while (found := _encode_in_forwards(size, views, encoders)) is None:
        size = -(-size // 2)
    halved = f"{SIZE}{size}" if size < num_rows else ""
    rows = []
    for i in range(num_rows):
        outputs = [[of_view[i] for of_view in of_encoder] for of_encoder in found]
        pixels = {name: [view[i : i + 1] for view in of_picture] for name, of_picture in views.items()}
        rows.append(_with_fallback(_store_row(outputs, pixels, records[i : i + 1], encoders), halved))
    return rows, size


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


def _encode_in_forwards(size: int, views: Views, encoders: Sequence[RowsEncoder]) -> list[list[Outputs]] | None:
    """Outputs of each encoder for each view; None if they do not fit."""
    found: list[list[Outputs]] = []
    for encoder in encoders:
        of_views = []
        for pixels in views[encoder.picture]:
            rows: Outputs = []
            for start in range(0, len(pixels), size):
                some = pixels[start : start + size]
                outputs = _encode_if_it_fits(encoder.encode, some)
                if outputs is None and size > 1:
                    return None
                rows += [None if outputs is None else [one[i : i + 1] for one in outputs] for i in range(len(some))]
            of_views.append(rows)
        found.append(of_views)
    return found


def _encode_if_it_fits(encode: Callable[[np.ndarray], _Output], pixels: np.ndarray) -> _Output | None:
    """The encoder's output, or None if out of memory."""
    try:
        return encode(pixels)
    except torch.OutOfMemoryError:
        pass  # empty_cache below: the exception still holds the forward's tensors here
    torch.cuda.empty_cache()
    return None


def _store_row(
    outputs: Sequence[Outputs], pixels: Views, record: np.ndarray, encoders: Sequence[RowsEncoder]
) -> EncodedRow:
    """One row in the store's dtypes, encoded again in float32 if it is not finite.

    Args:
      outputs: of each encoder, for each view.
      pixels: of this row alone.
    """
    groups: dict[str, list[np.ndarray]] = {}
    qualities: dict[str, tuple[float, float]] = {}
    fallback = ""
    for encoder, of_views in zip(encoders, outputs, strict=True):
        groups[encoder.group] = []
        for found, picture in zip(of_views, pixels[encoder.picture], strict=True):
            if found is None:
                return EncodedRow({}, reject=_too_large(picture))
            stored = encoder.to_stored(found, record)
            if not _is_finite(stored):
                fallback, found = FLOAT32, _encode_if_it_fits(encoder.encode_in_float32, picture)
                if found is None:
                    return EncodedRow({}, reject=_too_large(picture))
                stored = encoder.to_stored(found, record)
            if not _is_finite(stored):
                return EncodedRow({}, reject=RecordRejected("encode", "nonfinite", f"{encoder.class_name} output"))
            groups[encoder.group] += [rows[0] for rows in stored]
            if measured := encoder.quality([one[0] for one in found], [rows[0] for rows in stored]):
                before = qualities.get(encoder.group, measured)
                qualities[encoder.group] = min(before[0], measured[0]), max(before[1], measured[1])
    return EncodedRow(groups, qualities, fallback)


def _is_finite(stored: Sequence[np.ndarray]) -> bool:
    return all(bool(np.isfinite(rows).all()) for rows in stored)


def _too_large(picture: np.ndarray) -> RecordRejected:
    height_px, width_px = picture.shape[1:3]
    detail = f"one picture of {height_px}x{width_px} px does not fit; vae.tile_px or a smaller vae.dtype needs less"
    return RecordRejected("encode", "out_of_memory", detail)


def _with_fallback(row: EncodedRow, halved: str) -> EncodedRow:
    if row.reject or not halved:
        return row
    return replace(row, fallback=f"{halved},{row.fallback}" if row.fallback else halved)
