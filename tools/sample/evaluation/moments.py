"""What the measures need of images: the mean and covariance of all features, and the features of some images.

A batch holds images of fixed numbers and process r of n takes the batches r, r + n, r + 2n and so on, so the number of
processes changes neither what is computed together nor the order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from ....datasets.errors import DamageError, EncoderError, RecipeError, SourceError
from ....precompute.run.clock import Progress
from ....train.parallel.ranks import Ranks, all_gather
from ....train.sampling.guided import float32_products
from ...inspection.pictures import spread
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
        assert images.read
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
    """Statistics of images, or those that a file has; a collective call.

    Returns: for the first process; None for others.
    Raises: SourceError: an image cannot be read, there is only one, or statistics of a file are of another network;
      DamageError; EncoderError: a feature is not finite.
    """
    given = images.statistics
    if not images.read:
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

    batches = team.run(images, compute, stage)
    if not team.ranks.is_first:
        assert not list(batches)
        return None
    measured = collect(batches, images.count)
    if given and given.mean.shape != measured.mean.shape:
        raise SourceError(
            f"'{images.description['path']}': its mu has {len(given.mean)} numbers, the network gives "
            f"{len(measured.mean)}. Expected statistics of the same network."
        )
    return replace(given, features=measured.features) if given else measured


def kept_moments(images: ImageSet, network: Network, team: Team, file: Path | None) -> Moments | None:
    """As ``moments_of`` for a reference, read from a file if it exists, else written to it.

    Raises: RecipeError: the file holds other statistics.
    """
    described = {"network": network.description, "pictures": images.description}
    if file and file.exists():
        check_kept(kept := Npz(file), **described)
        LOG.info("reference: statistics kept in '%s'", file)
        return read_moments(kept)
    team.wait()  # all have looked before the first writes
    moments = moments_of(images, network, team, "reference")
    if file and moments:
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
                f"'{file.path}': its statistics are of {what} {kept or None}, this command has {wanted}. Give another "
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
