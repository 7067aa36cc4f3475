"""What the measures need of images: the mean and covariance of all features, and the features of some images.

A batch holds images of fixed numbers and process r of n takes the batches r, r + n, r + 2n and so on, so the number of
processes changes neither what is computed together nor the order.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from ....datasets.errors import DamageError, EncoderError, RecipeError, SourceError
from ....precompute.progress.clock import Progress
from ....train.parallel.ranks import Ranks, all_gather
from ....train.sampling.guided import float32_products
from ..npz import Npz, write_npz
from ..subjects import evenly_spread
from .images import ImageSet
from .networks import Network

LOG = logging.getLogger(__name__)
BATCH = 64  # images that go through the network together; another number changes the rounding
MOST_FEATURES = 50_000  # images whose features are kept; the others count in mean and covariance alone
MEAN, COVARIANCE, FEATURES = "mu", "sigma", "features"  # the first two as ADM names them
PLACES = ("path", "network", "revision")  # where things lie, in a description; the rest is what they are
Compute = Callable[[list[np.ndarray], np.ndarray], np.ndarray]
"""Images of a batch and their numbers to one row for each."""


@dataclass(frozen=True)
class Moments:
    """Statistics of a set of features.

    Args:
      count: of the images; 0: unknown, in a file of another program.
      mean: (D,) float64.
      covariance: (D, D) float64.
      features: (M, D) float32 of all images, or of ``MOST_FEATURES`` spread evenly; None: not known.
    """

    count: int
    mean: np.ndarray
    covariance: np.ndarray
    features: np.ndarray | None


class Team:
    """The processes of an evaluation.

    Args:
      ranks: connected if there are several.
      progress: called by each process.
    """

    def __init__(self, ranks: Ranks, progress: Progress) -> None:
        self.ranks, self.progress = ranks, progress
        self._group: Any = dist.new_group(backend="gloo") if self.ranks.world_size > 1 else None

    def wait(self) -> None:
        """Wait for all processes."""
        all_gather(self.ranks, None)

    def run(self, images: ImageSet, compute: Compute, stage: str) -> Iterator[np.ndarray]:
        """Compute all batches; a collective call, to be iterated to its end in all processes.

        Returns: for the first process the results of each batch, in order; for others nothing.
        """
        rank, world_size = self.ranks.rank, self.ranks.world_size
        batches = [np.arange(start, min(start + BATCH, images.count)) for start in range(0, images.count, BATCH)]
        read = images.read(iter(batches[rank::world_size]))
        for first in range(0, len(batches), world_size):
            together = batches[first : first + world_size]
            result = None
            if rank < len(together):
                with float32_products(tf32=False):  # torch allows it for convolutions
                    result = compute(next(read), together[rank])
            results: list[Any] | None = [result]
            if self._group is not None:
                results = [None] * world_size if self.ranks.is_first else None
                dist.gather_object(result, results, dst=0, group=self._group)
            yield from (rows for rows in results or () if rows is not None)
            self.progress(stage, int(together[-1][-1]) + 1, images.count)


def moments_of(images: ImageSet, network: Network, team: Team, stage: str) -> Moments | None:
    """Statistics of images; a collective call.

    Returns: for the first process; None for others.
    Raises: SourceError: an image cannot be read, or there is only one; DamageError; EncoderError: a feature is not
      finite.
    """
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

    batches = team.run(images, compute, stage)
    if team.ranks.is_first:
        return collect(batches, images.count)
    assert not list(batches)
    return None


def collect(batches: Iterable[np.ndarray], count: int, *, most: int = MOST_FEATURES) -> Moments:
    """The statistics of features that come in batches, in the order of the images.

    Deviations are summed about the mean so far (Chan et al. 1979), in float64, so that nothing cancels.

    Args:
      batches: (B, D) float32 each, ``count`` rows in all.
      count: at least 2.
      most: features to keep.
    """
    kept = evenly_spread(count, min(count, most))
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
    assert seen == count, f"{seen} of {count} images"
    return Moments(count, mean, scatter / (count - 1), features)


def kept_moments(images: ImageSet, network: Network, team: Team, file: Path) -> Moments | None:
    """As ``moments_of`` for a reference, read from a file if it exists, else written to it.

    Raises: RecipeError: the file holds other statistics.
    """
    described = {"network": network.description, "pictures": images.description}
    if file.exists():
        kept = Npz(file)
        found = kept.text() or {}
        for what in described:
            if content_of(found.get(what) or {}) != content_of(described[what]):
                raise RecipeError(
                    f"--keep-statistics '{file}': it is of {what} {found.get(what)}, this command has "
                    f"{described[what]}. Give another file, or remove this one."
                )
        LOG.info("reference: statistics kept in '%s'", file)
        return read_moments(kept)
    team.wait()  # all have looked before the first writes
    moments = moments_of(images, network, team, "reference")
    if moments:
        write_moments(file, moments, described)
    return moments


def content_of(description: dict[str, Any]) -> dict[str, Any]:
    """A description without places."""
    return {key: value for key, value in description.items() if key not in PLACES}


def write_moments(path: Path, moments: Moments, described: dict[str, Any]) -> None:
    """Write statistics with a description of the network and the images."""
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


def with_features(statistics: Moments, measured: Moments, path: str) -> Moments:
    """Mean and covariance of a file with the features of its images, as in ADM's reference batches.

    Raises: SourceError: they are of different networks.
    """
    if statistics.mean.shape != measured.mean.shape:
        raise SourceError(
            f"'{path}': its mu has {len(statistics.mean)} numbers, the network gives {len(measured.mean)}. Expected "
            "statistics of the same network."
        )
    return dataclasses.replace(statistics, features=measured.features)
