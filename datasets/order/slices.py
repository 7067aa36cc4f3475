"""How large a global batch is, and how ranks and microbatches cut it. Pure functions.

A plan is the same at every world size. Every rank takes its slice of every global batch, so all ranks make equally many
steps. A "short" last batch may be smaller than the number of ranks, and then leaves some of them an empty slice;
"drop" with batch sizes that the number of ranks divides never does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral

import numpy as np

from ...errors import RecipeError
from ..format.buckets import bucket_size


def rank_slice(size: int, rank: int, world_size: int) -> slice:
    """The part of ``size`` records of a global batch that a rank reads, or of a rank's records that a microbatch has.

    The slices follow each other, cover the batch exactly, and differ by at most one record.

    Raises: IndexError: there is no such rank.
    """
    if not 0 <= rank < world_size:
        raise IndexError(f"rank {rank} of {world_size} ranks: expected 0 to {world_size - 1}")
    return slice(size * rank // world_size, size * (rank + 1) // world_size)


def spread(total: int, count: int) -> np.ndarray:
    """Positions of ``count`` of ``total`` items, or of all if there are fewer, evenly from the first to the last."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(int)


def batch_sizes_by_tokens(
    buckets: Iterable[str], tokens: int, pixels_per_token: int, *, multiple_of: int = 1
) -> dict[str, int]:
    """Largest batch of each bucket whose records have no more image tokens together than this.

    Args:
      buckets: names, "HxW" in pixels.
      tokens: T, most image tokens of a global batch: B * H * W <= T * pixels_per_token^2.
      pixels_per_token: side of a token in pixels: the VAE's downscaling times the model's patch size.
      multiple_of: every size is a multiple of this: ranks times microbatches, so that all get equally many records.
    Raises: RecipeError: a number below 1, a name that is not HxW, or a bucket with no such size.
    """
    for name, value in (("tokens", tokens), ("pixels_per_token", pixels_per_token), ("multiple_of", multiple_of)):
        if not isinstance(value, Integral) or value < 1:
            raise RecipeError(f"{name} of {value}: expected a whole number, at least 1.")
    sizes, token_area = {}, pixels_per_token**2
    for bucket in buckets:
        height_px, width_px = bucket_size(bucket)
        sizes[bucket] = tokens * token_area // (height_px * width_px) // multiple_of * multiple_of
        if not sizes[bucket]:
            needed = -(-multiple_of * height_px * width_px // token_area)
            raise RecipeError(
                f"bucket '{bucket}': a batch of {multiple_of} has {needed} image tokens, {tokens} are allowed. Allow "
                f"at least {needed}, or set multiple_of below {multiple_of}."
            )
    return sizes


def by_bucket(what: str, value: int | Mapping[str, int], buckets: Iterable[str]) -> dict[str, int]:
    """One number for each bucket, from one for all or from a mapping.

    Raises: RecipeError: it is neither, or the mapping lacks a bucket; ``what`` says what it maps to.
    """
    if isinstance(value, Integral):
        return dict.fromkeys(buckets, int(value))
    if not isinstance(value, Mapping):
        raise RecipeError(f"a {what} of {value!r}: expected a whole number, or one for each bucket.")
    if missing := [bucket for bucket in buckets if bucket not in value]:
        raise RecipeError(f"bucket '{missing[0]}': no {what} is given. Available: {', '.join(value) or 'none'}.")
    for bucket in buckets:
        if not isinstance(value[bucket], Integral):
            raise RecipeError(f"bucket '{bucket}': a {what} of {value[bucket]!r}; expected a whole number.")
    return {bucket: int(value[bucket]) for bucket in buckets}
