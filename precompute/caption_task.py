"""One shard of caption embeddings: a pure function of a slice of the plan and the encoder."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..datasets.frozen import FrozenPlan
from ..datasets.layout import CAPTION_PART, NULL_PART, RevisionLayout
from ..datasets.writer import row_checksum
from .shard_task import PackedShard
from .text_encoders import CaptionEncoder


def encode_null_caption(layout: RevisionLayout, encoder: CaptionEncoder) -> PackedShard:
    """The empty caption at full length."""
    (array,) = layout.part_arrays(NULL_PART)
    rows = encoder.encode_null().astype(array.dtype)
    return PackedShard(NULL_PART, 0, {array.path: rows}, [row_checksum(rows)])


def encode_caption_shard(plan: FrozenPlan, shard: int, encoder: CaptionEncoder, batch_size: int) -> PackedShard:
    """All captions of one shard, in batches of equal length."""
    (layout,) = plan.layout.part_arrays(CAPTION_PART)
    rows, captions = layout.rows_of(shard), plan.layout.captions_of(shard)
    table = plan.own_captions.slice(captions.start, len(captions))
    texts, lengths = table["text"].to_pylist(), table["num_tokens"].to_numpy()
    places = plan.layout.offsets[captions.start : captions.stop] - rows.start
    array = np.full((len(rows), *layout.shape[1:]), np.nan, layout.dtype)
    for batch in equal_length_batches(lengths, batch_size):
        encoded = encoder.encode([texts[i] for i in batch])
        for i, embedding in zip(batch, encoded, strict=True):
            array[places[i] : places[i] + lengths[i]] = embedding
    checksums = [row_checksum(array[p : p + n]) for p, n in zip(places, lengths, strict=True)]
    return PackedShard(CAPTION_PART, shard, {layout.path: array}, checksums)


def equal_length_batches(lengths: np.ndarray, batch_size: int) -> list[range]:
    """Cut captions that are sorted by length into batches of one length each."""
    batches = []
    borders = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    for start, stop in pairwise(borders):
        batches += [range(i, min(i + batch_size, stop)) for i in range(start, stop, batch_size)]
    return batches
