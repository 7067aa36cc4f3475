"""What the measures need of images: the mean and covariance of all features, and the features of some images."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ....datasets.order.slices import spread
from ....errors import DamageError, EncoderError, RecipeError, SourceError
from ....precompute.run.clock import Progress
from ....train.sampling.guided import float32_products
from ..npz import Npz, write_npz
from .distances import Moments
from .images import ImageSet
from .networks import Network

LOG = logging.getLogger(__name__)
BATCH = 64  # images that go through the network together; another number changes the rounding
MOST_FEATURES = 50_000  # images whose features are kept; the others count in mean and covariance alone
MEAN, COVARIANCE, FEATURES = "mu", "sigma", "features"  # the first two as ADM names them
PLACES = {"path", "network", "revision"}  # where things lie, in a description; the rest is what they are
Compute = Callable[[list[np.ndarray], np.ndarray], np.ndarray]
"""Images of a batch and their numbers to one row for each."""


def compute_batches(images: ImageSet, compute: Compute, stage: str, progress: Progress) -> Iterator[np.ndarray]:
    """The results of each batch of images, in order."""
    batches = [np.arange(start, min(start + BATCH, images.count)) for start in range(0, images.count, BATCH)]
    assert images.read
    for pixels, numbers in zip(images.read(iter(batches)), batches, strict=True):
        with float32_products(tf32=False):  # torch allows it for convolutions
            result = compute(pixels, numbers)
        yield result
        progress(stage, int(numbers[-1]) + 1, images.count)


def moments_of(images: ImageSet, network: Network, stage: str, progress: Progress) -> Moments:
    """Statistics of images, or those that a file has.

    Raises: SourceError: an image cannot be read, there is only one, or statistics of a file are of another network;
      DamageError; EncoderError: a feature is not finite.
    """
    given = images.statistics
    if given and not images.read:
        return given
    if images.count < 2:
        raise SourceError(f"'{images.description['path']}': it holds 1 image. Expected at least 2 for a covariance.")

    def compute(pixels: list[np.ndarray], numbers: np.ndarray) -> np.ndarray:
        features = network.features(pixels)
        if not (finite := np.isfinite(features).all(axis=1)).all():
            raise EncoderError(
                f"--features: network '{network.description['network']}' gives numbers that are not finite for image "
                f"{numbers[~finite][0]} of the set. Check its weights."
            )
        return features

    measured = collect(compute_batches(images, compute, stage, progress), images.count)
    if given and given.mean.shape != measured.mean.shape:
        raise SourceError(
            f"'{images.description['path']}': its mu has {len(given.mean)} numbers, the network gives "
            f"{len(measured.mean)}. Expected statistics of the same network."
        )
    return replace(given, features=measured.features) if given else measured


def kept_moments(images: ImageSet, network: Network, file: Path | None, progress: Progress) -> Moments:
    """Statistics of a reference: read from a file if it exists, else computed and written to it.

    Raises: RecipeError: the file holds other statistics.
    """
    described = {"network": network.description, "images": images.description}
    if file and file.exists():
        check_kept(kept := Npz(file), **described)
        LOG.info("reference: statistics kept in '%s'", file)
        return read_moments(kept)
    moments = moments_of(images, network, "reference", progress)
    if file:
        write_moments(file, moments, described)
    return moments


def collect(batches: Iterable[np.ndarray], count: int, *, most: int = MOST_FEATURES) -> Moments:
    """The statistics of features that come in batches, in the order of the images.

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
        centered, shift = rows - batch_mean, batch_mean - mean
        scatter += centered.T @ centered + np.outer(shift, shift) * (seen * number / (seen + number))
        mean = mean + shift * (number / (seen + number))
        first, last = np.searchsorted(kept, [seen, seen + number])
        features[first:last] = batch[kept[first:last] - seen]
        seen += number
    assert seen == count, f"{seen} of {count} images"
    return Moments(count, mean, scatter / (count - 1), features)


def write_moments(path: Path, moments: Moments, described: Mapping[str, Any]) -> None:
    """Write statistics with a description of the network and the images."""
    assert moments.features is not None
    arrays = {MEAN: moments.mean, COVARIANCE: moments.covariance, FEATURES: moments.features}
    write_npz(path, arrays, {**described, "count": moments.count})


def check_kept(file: Npz, **expected: Mapping[str, Any]) -> None:
    """Raise RecipeError if kept statistics are of another network, or of other images."""
    described = file.text() or {}
    for what, wanted in expected.items():
        kept = described.get(what) or {}
        if any(kept.get(key) != wanted.get(key) for key in (kept.keys() | wanted.keys()) - PLACES):
            raise RecipeError(
                f"'{file.path}': its statistics are of {what} {kept or None}, this command has {wanted}. Use another "
                f"file, or the same {what}."
            )


def read_moments(file: Npz) -> Moments:
    """Statistics of a file, of this program or another.

    Raises: DamageError: mean, covariance and features do not belong together, or are not finite.
    """
    described = file.text() or {}
    mean, covariance = (file.read(name).astype(np.float64) for name in (MEAN, COVARIANCE))
    features = file.read(FEATURES) if FEATURES in file and described else None
    width = mean.shape
    fits = len(width) == 1 and covariance.shape == (*width, *width)
    fits = fits and (features is None or features.shape[1:] == width)
    finite = all(np.isfinite(array).all() for array in (mean, covariance, features) if array is not None)
    if not fits or not finite:
        raise DamageError(
            f"'{file.path}': its mu {mean.shape} and sigma {covariance.shape} are not mean and covariance of features"
            f"{'' if finite else ', or not finite'}. Make the file again."
        )
    return Moments(int(described.get("count", 0)), mean, (covariance + covariance.T) / 2, features)
