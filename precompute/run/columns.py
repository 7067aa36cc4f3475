"""A column: how images become the stored rows of one group of arrays (latents, a feature, a companion, a mask).

A batch runs in forwards of one size. When one runs out of memory, all start over with half the size, rounded up, down
to one image; a row whose latents are not finite is encoded again alone in float32. Both change the bits, so both are
recorded with the row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from ...datasets.format.row_layout import LATENTS, MASK
from ...datasets.format.schema import LOGVAR_RANGE, LatentSpec
from ...datasets.format.token_dtypes import (
    INT8_RANGE,
    StoredTokens,
    TokenQuality,
    measure_quality,
    narrow,
    narrow_latents,
)
from ...errors import RecordRejected
from ..encoders.loading import Encoders
from ..encoders.pretrained import encode_if_it_fits
from ..encoders.vae import ImageEncoder

FLOAT32 = "float32"
SIZE = "batch:"
OWN = LATENTS  # the record's own image

_turn = threading.Lock()  # held while a model runs, in the thread that encodes or in the one that stores

Outputs = list[np.ndarray]
"""(B, ...) float32 outputs of a model, or (B, H, W) uint8 of a mask."""

Views = Mapping[str, Sequence[np.ndarray]]
"""By image (OWN, or the name of a companion), for each view: (B, height_px, width_px, 3) uint8 pixels."""


@dataclass(frozen=True)
class Column:
    """One group of arrays of a record.

    Args:
      group: LATENTS, or the name of the feature or companion.
      image: the image of the record that it reads: OWN, or the name of a companion.
      model: class name of the encoder, for messages.
      encode: outputs for (B, height_px, width_px, 3) uint8 pixels, or (B, H, W) of a mask.
      narrow: (B, ...) rows of each array of the group in the store's dtypes, from outputs and the (B,) positions of
        the records, which are the keys of a stored sample.
      token_dtype: of stored tokens, whose quality is measured; empty for latents and masks.
      in_float32: in this context, ``encode`` computes in float32 whatever the recipe's dtype.
    """

    group: str
    image: str
    model: str
    encode: Callable[[np.ndarray], Outputs]
    narrow: Callable[[Outputs, np.ndarray], list[np.ndarray]]
    token_dtype: str = ""
    in_float32: Callable[[], AbstractContextManager[None]] = nullcontext

    def encode_exactly(self, pixels: np.ndarray) -> Outputs:
        """As ``encode``, in float32 whatever the recipe's dtype."""
        with self.in_float32():
            return self.encode(pixels)

    def quality(self, outputs: Outputs, rows: Sequence[np.ndarray]) -> TokenQuality | None:
        """What narrowing cost the tokens of one record; None for latents and masks.

        Args:
          outputs, rows: (1, ...) each.
        """
        if not self.token_dtype:
            return None
        arrays_per_output = 2 if self.token_dtype == "int8" else 1
        measured = list[TokenQuality]()
        for number, tokens in enumerate(outputs):
            width = tokens.shape[-1]
            first = number * arrays_per_output
            stored_rows = rows[first].reshape(-1, width)  # a class token is one row
            scales = None
            if arrays_per_output == 2:
                scales = rows[first + 1].reshape(-1, *rows[first + 1].shape[-2:])
            stored = StoredTokens(stored_rows, scales)
            measured.append(measure_quality(tokens.reshape(-1, width), stored, self.token_dtype))
        return worst(measured)


def worst(measured: Sequence[TokenQuality]) -> TokenQuality | None:
    """The smallest cosine and the largest error; None if nothing was measured."""
    if not measured:
        return None
    return TokenQuality(
        min_cosine=min(quality.min_cosine for quality in measured),
        max_error=max(quality.max_error for quality in measured),
    )


def latent_column(encoder: ImageEncoder, spec: LatentSpec, group: str = LATENTS) -> Column:
    """Latents of the record's own image, or of a companion."""
    return Column(
        *(group, group, encoder.identity.class_name, lambda pixels: [encoder.encode(pixels)]),
        lambda outputs, records: [to_stored(outputs[0], spec, records)],
        in_float32=encoder.in_float32,
    )


def image_columns(encoders: Encoders, latent: LatentSpec) -> dict[str, Column]:
    """The column of each group of a record's arrays, by group.

    Nothing is drawn of a companion: where a sample of each posterior is stored, its mean is.
    """
    mean = latent.model_copy(update={"kind": "mean"}) if latent.kind == "sample" else latent
    columns = [latent_column(encoders.image, latent)]
    for name, model in encoders.features.items():
        dtype = model.spec().dtype
        columns.append(
            Column(
                *(name, OWN, model.identity.class_name, model.encode),
                lambda outputs, _, dtype=dtype: _narrowed_tokens(outputs, dtype),
                *(dtype, model.in_float32),
            )
        )
    for name, kind in encoders.companions.items():
        mask = Column(name, name, "mask", lambda grey: [grey], lambda outputs, _: outputs)
        columns.append(mask if kind == MASK else latent_column(encoders.image, mean, name))
    return {column.group: column for column in columns}


def to_stored(moments: np.ndarray, spec: LatentSpec, records: np.ndarray) -> np.ndarray:
    """The stored part of an encoder's output, in the store's dtype.

    Args:
      moments: (B, 2C, H, W) mean and log-variance, or (B, C, H, W) latents; float32.
      records: (B,) positions in the records table: the key of a stored sample.
    Returns: (B, row_channels, H, W); infinity in float32 where int8 cannot hold latents, which are rejected.
    """
    if spec.kind == "mean":
        moments = moments[:, : spec.channels]
    elif spec.kind == "sample":
        moments = sample_once(moments, records)
    if spec.dtype == "int8":
        is_storable = np.abs(moments) <= INT8_RANGE
        return narrow_latents(moments) if is_storable.all() else np.where(is_storable, moments, np.inf)
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


def _narrowed_tokens(outputs: Outputs, dtype: str) -> list[np.ndarray]:
    rows = []
    for tokens in outputs:  # (B, T, D), or (B, D) of class tokens
        rows += narrow(tokens, dtype).parts
    return rows


@dataclass(frozen=True)
class EncodedBatch:
    """Outputs of the columns for one batch.

    Args:
      outputs: of each column, for each view, of each row (each with a batch of one; None if it did not fit alone).
      forward_rows: rows of a forward, the largest that did fit.
    """

    outputs: list[list[list[Outputs | None]]]
    forward_rows: int


def encode_batch(views: Views, columns: Sequence[Column], *, max_rows: int) -> EncodedBatch:
    """Run the models of columns on a batch, with forwards of at most ``max_rows``, halved while out of memory."""
    num_rows = len(next(iter(views.values()))[0])
    size = min(max_rows, num_rows)
    with _turn:
        while (outputs := _in_forwards(size, views, columns)) is None:
            size = -(-size // 2)
    return EncodedBatch(outputs, size)


def _in_forwards(size: int, views: Views, columns: Sequence[Column]) -> list[list[list[Outputs | None]]] | None:
    outputs = []
    for column in columns:
        of_views = []
        for pixels in views[column.image]:
            rows: list[Outputs | None] = []
            for start in range(0, len(pixels), size):
                batch = pixels[start : start + size]
                if (output := encode_if_it_fits(column.encode, batch)) is None and size > 1:
                    return None
                rows += [output and [one[i : i + 1] for one in output] for i in range(len(batch))]
            of_views.append(rows)
        outputs.append(of_views)
    return outputs


@dataclass(frozen=True)
class StoredRow:
    """One record in the store's dtypes: the rows and the quality of each column, and its ``fallback``."""

    rows: list[list[np.ndarray]]
    qualities: list[TokenQuality | None]
    fallback: str


def stored_row(
    encoded: EncodedBatch, i: int, views: Views, record: int, columns: Sequence[Column]
) -> StoredRow | RecordRejected:
    """Narrow one row of a batch; if it is not finite, encode it again in float32 first.

    Args:
      record: position in the records table.
    """
    keys, all_rows, qualities, is_exact = np.array([record]), [], [], False
    for column, of_views in zip(columns, encoded.outputs, strict=True):
        rows, measured = list[np.ndarray](), list[TokenQuality]()
        for of_rows, pixels in zip(of_views, views[column.image], strict=True):
            if (outputs := of_rows[i]) is None:
                return _too_large(pixels)
            narrowed = column.narrow(outputs, keys)
            if not _is_finite(narrowed):
                is_exact = True
                with _turn:
                    outputs = encode_if_it_fits(column.encode_exactly, pixels[i : i + 1])
                if outputs is None:
                    return _too_large(pixels)
                narrowed = column.narrow(outputs, keys)
            if not _is_finite(narrowed):
                return RecordRejected("encode", "nonfinite", f"{column.model} output")
            rows += [one[0] for one in narrowed]
            quality = column.quality(outputs, narrowed)
            if quality:
                measured.append(quality)
        all_rows.append(rows)
        qualities.append(worst(measured))
    num_rows = len(next(iter(views.values()))[0])
    halved = f"{SIZE}{encoded.forward_rows}" if encoded.forward_rows < num_rows else ""
    return StoredRow(all_rows, qualities, ",".join(filter(None, [halved, FLOAT32 if is_exact else ""])))


def forward_rows_of(fallback: str | None, planned: int) -> int:
    """Rows that were encoded in one forward, from a row's ``fallback``."""
    size = next((part for part in (fallback or "").split(",") if part.startswith(SIZE)), None)
    return int(size.removeprefix(SIZE)) if size else planned


def _is_finite(rows: Sequence[np.ndarray]) -> bool:
    return all(bool(np.isfinite(one).all()) for one in rows)


def _too_large(pixels: np.ndarray) -> RecordRejected:
    height_px, width_px = pixels.shape[1:3]
    detail = f"one image of {height_px}x{width_px} px does not fit; vae.tile_px or a smaller vae.dtype needs less"
    return RecordRejected("encode", "out_of_memory", detail)
