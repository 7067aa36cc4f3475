"""What the measures need of a set: the mean and covariance of all features, and the features of some pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....datasets.errors import DamageError
from .npz import Npz, write_npz

MOST_FEATURES = 50_000  # pictures whose features are kept; the others count in mean and covariance alone
MEAN, COVARIANCE, FEATURES = "mu", "sigma", "features"  # the first two as ADM names them


@dataclass(frozen=True)
class Moments:
    """Statistics of a set of features.

    Args:
      count: of the pictures; 0: unknown, in a file of another program.
      mean: (D,) float64.
      covariance: (D, D) float64.
      features: (M, D) float32 of all pictures, or of ``MOST_FEATURES`` spread evenly; None: not known.
    """

    count: int
    mean: np.ndarray
    covariance: np.ndarray
    features: np.ndarray | None


def spread(count: int, most: int) -> np.ndarray:
    """At most so many of the numbers 0 to count - 1, evenly spread; int64, ascending."""
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).round().astype(np.int64)


def collect(batches: Iterable[np.ndarray], count: int, *, most: int = MOST_FEATURES) -> Moments:
    """The statistics of features that come in batches, in the order of the pictures.

    Deviations are summed about the mean so far (Chan et al. 1979), in float64, so that nothing cancels.

    Args:
      batches: (B, D) float32 each, ``count`` rows in all.
      count: at least 2.
      most: features to keep.
    """
    kept = spread(count, most)
    mean, scatter, features, seen = np.zeros(0), np.zeros((0, 0)), np.zeros((0, 0), np.float32), 0
    for batch in batches:
        rows = batch.astype(np.float64)
        if not seen:
            width = rows.shape[1]
            mean, scatter = np.zeros(width), np.zeros((width, width))
            features = np.empty((len(kept), width), np.float32)
        number, batch_mean = len(rows), rows.mean(axis=0)
        centred, shift = rows - batch_mean, batch_mean - mean
        scatter += centred.T @ centred + np.outer(shift, shift) * (seen * number / (seen + number))
        mean = mean + shift * (number / (seen + number))
        first, last = np.searchsorted(kept, [seen, seen + number])
        features[first:last] = batch[kept[first:last] - seen]
        seen += number
    assert seen == count, f"{seen} of {count} pictures"
    return Moments(count, mean, scatter / (count - 1), features)


def keep(path: Path, moments: Moments, described: dict[str, Any]) -> None:
    """Write statistics with a description of the network and the pictures."""
    assert moments.features is not None
    arrays = {MEAN: moments.mean, COVARIANCE: moments.covariance, FEATURES: moments.features}
    write_npz(path, arrays, described | {"count": moments.count})


def read_moments(file: Npz) -> Moments:
    """Statistics of a file, of this program or another.

    Raises: DamageError: mean, covariance and features do not belong together, or are not finite.
    """
    described = file.text() or {}
    mean, covariance = (file.read(name).astype(np.float64) for name in (MEAN, COVARIANCE))
    features = file.read(FEATURES) if FEATURES in file and described else None
    _check_shapes(file.path, mean, covariance, features)
    return Moments(int(described.get("count", 0)), mean, (covariance + covariance.T) / 2, features)


def _check_shapes(path: Path, mean: np.ndarray, covariance: np.ndarray, features: np.ndarray | None) -> None:
    width: Sequence[int] = mean.shape
    fits = len(width) == 1 and covariance.shape == (*width, *width)
    fits = fits and (features is None or features.shape[1:] == tuple(width))
    finite = all(np.isfinite(array).all() for array in (mean, covariance, features) if array is not None)
    if not fits or not finite:
        raise DamageError(
            f"'{path}': its mu {mean.shape} and sigma {covariance.shape} are not mean and covariance of features"
            f"{'' if finite else ', or not finite'}. Make the file again."
        )
