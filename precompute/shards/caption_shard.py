"""One shard of caption embeddings: a pure function of a slice of the plan and the encoder."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from ...datasets.errors import EncoderError
from ...datasets.format.layout import CAPTION_PART, NULL_PART
from ...datasets.format.schema import TextSpec
from ...datasets.format.token_dtypes import StoredTokens, is_storable, narrow, quality
from ...datasets.revisions.plan import FrozenPlan
from ...datasets.revisions.writer import row_checksum
from ..encoders.text import CaptionEncoder
from .latent_shard import PackedShard


def encode_null_caption(plan: FrozenPlan, encoder: CaptionEncoder) -> PackedShard:
    """Encode the empty caption at full length."""
    assert plan.spec.text is not None
    paths = [array.path for array in plan.layout.part_arrays(NULL_PART)]
    parts = _stored(encoder.encode_null().token_rows()[0], plan.spec.text.dtype).parts
    return PackedShard(NULL_PART, 0, dict(zip(paths, parts, strict=True)), [row_checksum(*parts)])


def encode_caption_shard(plan: FrozenPlan, shard: int, encoder: CaptionEncoder) -> PackedShard:
    """Encode all captions of one shard, in batches of equal length.

    Raises: EncoderError: a value exceeds the range of the store's dtype.
    """
    spec, layouts = plan.spec.text, plan.layout.part_arrays(CAPTION_PART)
    assert spec is not None
    rows, captions = layouts[0].rows_of(shard), plan.layout.captions_of(shard)
    table = plan.own_captions.slice(captions.start, len(captions))
    texts, lengths = table["text"].to_pylist(), table["num_tokens"].to_numpy()
    places = plan.layout.offsets[captions.start : captions.stop] - rows.start
    arrays = {one.path: np.full((len(rows), *one.shape[1:]), one.fill_value, one.dtype) for one in layouts}
    checksums, qualities = [""] * len(captions), []

    def store(batch: range, encoded: np.ndarray) -> None:
        for i, tokens in zip(batch, encoded, strict=True):
            stored = _stored(tokens, spec.dtype)
            for array, part in zip(arrays.values(), stored.parts, strict=True):
                array[places[i] : places[i] + lengths[i]] = part
            checksums[i] = row_checksum(*stored.parts)
            if spec.dtype != "float32":
                qualities.append(quality(tokens, stored, spec.dtype))

    # Narrowing takes as long as several captions on a GPU, so it runs in a thread, one batch behind the encoder.
    with ThreadPoolExecutor(1, thread_name_prefix="leandit-narrow") as behind:
        storing: Future[None] | None = None
        for batch in caption_batches(lengths, spec, encoder):
            encoded = encoder.encode([texts[i] for i in batch]).token_rows()
            if storing:
                storing.result()
            storing = behind.submit(store, batch, encoded)
        if storing:
            storing.result()
    return PackedShard(CAPTION_PART, shard, arrays, checksums, qualities=qualities)


def _stored(tokens: np.ndarray, dtype: str) -> StoredTokens:
    """Tokens in the store's dtype; raises EncoderError if a value exceeds its range."""
    stored = narrow(tokens, dtype)
    if not is_storable(stored, dtype):
        raise EncoderError(
            f"store.text_dtype '{dtype}': it cannot hold a caption embedding's {np.abs(tokens).max():.4g}. Use "
            'store.text_dtype = "bfloat16", "int8" or "float32".'
        )
    return stored


def caption_batches(lengths: np.ndarray, spec: TextSpec, encoder: CaptionEncoder) -> list[range]:
    """Split the captions of a shard, sorted by length, into batches as the spec says."""
    shared = encoder.tokenizer.num_shared  # computed with each caption, though not stored
    return equal_length_batches(lengths, spec.batch_size, batch_tokens=spec.batch_tokens, num_shared=shared)


def equal_length_batches(
    lengths: np.ndarray, batch_size: int, *, batch_tokens: int = 0, num_shared: int = 0
) -> list[range]:
    """Split captions sorted by length into batches of one length each.

    Args:
      batch_size: captions in a full batch.
      batch_tokens: if not 0, tokens in a full batch instead; a longer caption is a batch by itself.
      num_shared: tokens computed with each caption in addition to its own.
    """
    batches = []
    borders = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    for start, stop in pairwise(borders) if len(lengths) else ():
        size = max(1, batch_tokens // (int(lengths[start]) + num_shared)) if batch_tokens else batch_size
        batches += [range(i, min(i + size, stop)) for i in range(start, stop, size)]
    return batches
