"""Mean and standard deviation of each latent channel as a model sees it, shard by shard, then merged.

A shard's statistics are a function of its bytes: values are counted by their float16 pattern, so neither the order of
the rows nor the processor changes a bit. What is merged is exact but for the rounding of float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from ..format.schema import LOGVAR_RANGE, LatentSpec, LatentStatistics
from ..format.token_dtypes import widen_latents

PATTERNS = 1 << 16  # of a float16
BLOCK_VALUES = 1 << 19  # counted at once, so that numpy's copy of them stays in the cache
# A model expects channels of about mean 0 and standard deviation 1. Published autoencoders keep within these limits on
# photographs, with their own scale and shift; without these, or with those of another one, channels are beyond them.
MEAN_LIMIT = 3.0
STD_LIMITS = (0.2, 5.0)
MAX_HALF = float(np.finfo(np.float16).max)


def statistics_of(arrays: Iterable[np.ndarray], spec: LatentSpec) -> LatentStatistics:
    """Statistics of the rows of a shard, with the variance of a stored posterior; empty rows count for nothing.

    Args:
      arrays: (N, row_channels, H, W) as stored: the latents, and those of the flipped images.
    """
    counts = np.zeros((spec.stored_channels, PATTERNS), np.int64)
    for rows in arrays:
        _count(rows, counts)
    values = _halves()
    num_values = counts.sum(axis=1)
    mean = (counts[: spec.channels] * values).sum(axis=1) / np.maximum(num_values[: spec.channels], 1)
    deviation = np.where(counts[: spec.channels] > 0, values - mean[:, None], 0)
    squares = (counts[: spec.channels] * deviation**2).sum(axis=1)
    if spec.has_posterior:
        squares += (counts[spec.channels :] * _variances(spec.kind == "mean_std")).sum(axis=1)
    std = np.sqrt(squares / np.maximum(num_values[: spec.channels], 1))
    shift, scale = np.array(spec.shift), np.array(spec.scale)
    is_empty = not num_values[0]
    return LatentStatistics(
        count=int(num_values[0]),
        channel_mean=(np.zeros(spec.channels) if is_empty else (mean - shift) * scale).tolist(),
        channel_std=(std * np.abs(scale)).tolist(),
    )


def merge_statistics(parts: Sequence[LatentStatistics]) -> LatentStatistics:
    """Statistics of all values of the parts, in the order given.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", equation 2.1.
    """
    count, mean, squares = 0, np.zeros(len(parts[0].channel_mean)), np.zeros(len(parts[0].channel_mean))
    for part in parts:
        if not part.count:
            continue
        total, difference = count + part.count, np.array(part.channel_mean) - mean
        mean = mean + difference * (part.count / total)
        squares = squares + np.array(part.channel_std) ** 2 * part.count + difference**2 * (count / total * part.count)
        count = total
    std = np.sqrt(squares / max(count, 1))
    return LatentStatistics(count=count, channel_mean=mean.tolist(), channel_std=std.tolist())


def statistics_without(whole: LatentStatistics, part: LatentStatistics) -> LatentStatistics:
    """Statistics of the values that are left when those of a part are taken out of the whole.

    It undoes ``merge_statistics``. Its error grows with the share of the part, so this must be at most about half.
    """
    count = whole.count - part.count
    if not part.count:
        return whole
    if count <= 0:
        empty = [0.0] * len(whole.channel_mean)
        return LatentStatistics(count=0, channel_mean=empty, channel_std=empty)
    whole_mean = np.array(whole.channel_mean)
    part_mean = np.array(part.channel_mean)
    mean = whole_mean + (whole_mean - part_mean) * (part.count / count)
    squares = np.array(whole.channel_std) ** 2 * whole.count
    squares -= np.array(part.channel_std) ** 2 * part.count
    squares -= (part_mean - mean) ** 2 * (count / whole.count * part.count)
    std = np.sqrt(np.maximum(squares, 0) / count)
    return LatentStatistics(count=count, channel_mean=mean.tolist(), channel_std=std.tolist())


def unusual_channels(mean: Sequence[float], std: Sequence[float]) -> tuple[list[int], list[int]]:
    """Channels whose mean, and channels whose standard deviation is beyond the limits, or is no number.

    Args:
      mean, std: (C,) each, as a model sees the channels.
    """
    means, deviations = np.array(mean), np.array(std)
    has_usual_mean = np.abs(means) <= MEAN_LIMIT
    has_usual_std = (deviations >= STD_LIMITS[0]) & (deviations <= STD_LIMITS[1])
    return np.flatnonzero(~has_usual_mean).tolist(), np.flatnonzero(~has_usual_std).tolist()


def _count(rows: np.ndarray, counts: np.ndarray) -> None:
    """Add the patterns of (N, C, H, W) rows to (C, 65536) counts."""
    step = max(1, BLOCK_VALUES // max(1, rows[0, 0].size)) if len(rows) else 1
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        if block.dtype == np.int8:  # empty rows are zeros, also the scales
            block = np.where(block.any(axis=(1, 2, 3), keepdims=True), widen_latents(block), np.nan)
        if block.dtype != np.float16:
            block = np.clip(block, -MAX_HALF, MAX_HALF).astype(np.float16)
        for channel in range(len(counts)):
            patterns = np.ascontiguousarray(block[:, channel]).view(np.uint16).reshape(-1)
            counts[channel] += np.bincount(patterns, minlength=PATTERNS)
    counts[:, ~np.isfinite(_patterns())] = 0


def _patterns() -> np.ndarray:
    return np.arange(PATTERNS, dtype=np.uint16).view(np.float16)


@cache
def _halves() -> np.ndarray:
    """(65536,) float64, the value of each pattern; 0 for those that are not finite."""
    return np.nan_to_num(_patterns().astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


@cache
def _variances(is_std: bool) -> np.ndarray:
    """(65536,) the variance that each stored spread means, rounded to float32: exp differs between processors."""
    variances = _halves() ** 2 if is_std else np.exp(np.clip(_halves(), *LOGVAR_RANGE))
    return variances.astype(np.float32).astype(np.float64)
