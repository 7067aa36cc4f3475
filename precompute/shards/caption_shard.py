"""One shard of caption embeddings: a pure function of a slice of the plan and the encoder."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...datasets.errors import EncoderError
from ...datasets.format.layout import Part
from ...datasets.format.schema import TextSpec
from ...datasets.format.table_schemas import STORED
from ...datasets.format.token_dtypes import StoredTokens, is_storable, narrow, quality
from ...datasets.revisions.commits import new_results
from ...datasets.revisions.plan import FrozenPlan
from ...datasets.revisions.writer import row_checksum
from ..encoders.text.encoder import CaptionEncoder, EncodedCaption, EncodedCaptions
from .latent_shard import PackedShard


def encode_null_caption(part: Part, encoder: CaptionEncoder) -> PackedShard:
    """Encode the empty caption at full length."""
    assert part.captions is not None
    stored, results = stored_rows(encoder.encode_null().row(0), part.captions.spec), new_results(part, 1)
    store_result(results[0, 0], stored.rows, stored.quality)
    return PackedShard(part.name, 0, dict(zip(_paths(part), stored.rows, strict=True)), results)


def store_result(result: np.void, rows: list[np.ndarray], quality: tuple[float, float] | None) -> None:
    """Fill in the result of a caption: checksum, and what narrowing cost, if anything was narrowed."""
    result["state"], result["checksum"] = STORED, row_checksum(*rows)
    if quality:
        result["min_cosine"], result["max_error"] = quality


def encode_caption_shard(plan: FrozenPlan, part: Part, shard: int, encoder: CaptionEncoder) -> PackedShard:
    """Encode all captions of one shard, in batches of equal length.

    Raises: EncoderError: a value exceeds the range of the store's dtype.
    """
    layout = part.captions
    assert layout is not None
    spec, captions = layout.spec, layout.captions_of(shard)
    texts = plan.captions_of(part)["text"].slice(captions.start, len(captions)).to_pylist()
    lengths = layout.num_tokens[captions.start : captions.stop]
    starts = [layout.starts_of(caption) for caption in captions]
    arrays = [np.full((len(one.rows_of(shard)), *one.shape[1:]), one.fill_value, one.dtype) for one in part.arrays]
    bases = [one.rows_of(shard).start for one in part.arrays]
    results = new_results(part, len(captions))

    def store(batch: np.ndarray, encoded: EncodedCaptions) -> None:
        for number, i in enumerate(batch.tolist()):
            stored = stored_rows(encoded.row(number), spec)
            for array, rows, start, base in zip(arrays, stored.rows, starts[i], bases, strict=True):
                array[start - base : start - base + len(rows)] = rows
            store_result(results[i, 0], stored.rows, stored.quality)

    # Narrowing takes as long as several captions on a GPU, so it runs in a thread, one batch behind the encoder.
    with ThreadPoolExecutor(1, thread_name_prefix="leandit-narrow") as behind:
        storing: Future[None] | None = None
        for batch in caption_batches(lengths, spec, encoder):
            encoded = encoder.encode([texts[i] for i in batch])
            if storing:
                storing.result()
            storing = behind.submit(store, batch, encoded)
        if storing:
            storing.result()
    return PackedShard(part.name, shard, dict(zip(_paths(part), arrays, strict=True)), results)


class StoredRows(NamedTuple):
    """Rows of a caption in each array of its part; smallest cosine and largest error, None if nothing was narrowed."""

    rows: list[np.ndarray]
    quality: tuple[float, float] | None


def stored_rows(caption: EncodedCaption, spec: TextSpec) -> StoredRows:
    """A caption in the store's dtypes."""
    rows, found = list[np.ndarray](), list[tuple[float, float]]()
    kinds = (
        (caption.tokens, spec.dtype),
        (None if caption.pooled is None else caption.pooled[None], spec.pooled_dtype),
    )
    for tokens, dtype in kinds:
        if tokens is not None:
            stored = _stored(tokens, dtype)
            rows += stored.parts
            found += [quality(tokens, stored, dtype)] if dtype != "float32" else []
    measured = (min(cosine for cosine, _ in found), max(error for _, error in found)) if found else None
    return StoredRows(rows, measured)


def _paths(part: Part) -> list[str]:
    return [array.path for array in part.arrays]


def _stored(tokens: np.ndarray, dtype: str) -> StoredTokens:
    """Tokens in the store's dtype; raises EncoderError if a value exceeds its range."""
    stored = narrow(tokens, dtype)
    if not is_storable(stored, dtype):
        raise EncoderError(
            f"store.text_dtype '{dtype}': it cannot hold a caption embedding's {np.abs(tokens).max():.4g}. Use "
            'store.text_dtype = "bfloat16", "int8" or "float32".'
        )
    return stored


def caption_batches(lengths: np.ndarray, spec: TextSpec, encoder: CaptionEncoder) -> list[np.ndarray]:
    """Split the captions of a shard into batches as the spec says; positions of each batch's captions."""
    shared = encoder.tokenizer.num_shared  # computed with each caption, though not stored
    return equal_length_batches(lengths, spec.batch_size, batch_tokens=spec.batch_tokens, num_shared=shared)


def equal_length_batches(
    lengths: np.ndarray, batch_size: int, *, batch_tokens: int = 0, num_shared: int = 0
) -> list[np.ndarray]:
    """Split captions into batches of one length each, shortest first; within a length in their order.

    Args:
      lengths: (N,) tokens of each. Sorted for the first text encoder of a store; another one may count otherwise.
      batch_size: captions in a full batch.
      batch_tokens: if not 0, tokens in a full batch instead; a longer caption is a batch by itself.
      num_shared: tokens computed with each caption in addition to its own.
    Returns: positions of each batch's captions.
    """
    batches, order = [], np.argsort(lengths, kind="stable")
    borders = [0, *(np.flatnonzero(np.diff(lengths[order])) + 1).tolist(), len(lengths)]
    for start, stop in pairwise(borders) if len(lengths) else ():
        size = max(1, batch_tokens // (int(lengths[order[start]]) + num_shared)) if batch_tokens else batch_size
        batches += [order[i : min(i + size, stop)] for i in range(start, stop, size)]
    return batches
