"""Distances between two sets of features, as pure functions.

All arithmetic is in float64. Sums run in a fixed order, so equal features give equal numbers.

Sources: Heusel et al. 2017, "GANs Trained by a Two Time-Scale Update Rule", eq. 6 (Fréchet distance); Binkowski et al.
2018, "Demystifying MMD GANs", section 3 (KID); Jayasumana et al. 2024, "Rethinking FID" (CMMD); Kynkaanniemi et al.
2019, "Improved Precision and Recall Metric"; Naeem et al. 2020, "Reliable Fidelity and Diversity Metrics".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....errors import SourceError

SUBSETS, SUBSET_SIZE = 100, 1000  # of KID, as in torch-fidelity
NEIGHBORS_PRECISION, NEIGHBORS_DENSITY = 3, 5  # as in the papers
CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0
ROWS = 512  # of a matrix of distances that is in memory at once
SAME = 1e-10  # squared distance of equal images at most, as a share of the squared lengths: features are float32
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Moments:
    """Statistics of a set of features.

    Args:
      count: of the images; 0: unknown, in a file of another program.
      mean: (D,) float64.
      covariance: (D, D) float64.
      features: (M, D) float32 of all images, or of some that are spread evenly; None: not known.
    """

    count: int
    mean: np.ndarray
    covariance: np.ndarray
    features: np.ndarray | None


def measure(images: Moments, reference: Moments, *, is_clip: bool, device: torch.device) -> dict[str, float | None]:
    """All distances that the statistics allow; the Fréchet distance alone without features of both.

    Args:
      is_clip: the features are CLIP's embeddings, for which CMMD is defined; it is None for others.
    Raises: SourceError: too few images, or statistics of another network.
    """
    if images.mean.shape != reference.mean.shape:
        raise SourceError(
            f"the images have {len(images.mean)} features, the reference {len(reference.mean)}. Expected both of the "
            "same network."
        )
    frechet = frechet_distance(images.mean, images.covariance, reference.mean, reference.covariance)
    ours, theirs = images.features, reference.features
    if ours is None or theirs is None:
        return {"frechet": frechet}
    if min(len(ours), len(theirs)) <= NEIGHBORS_DENSITY:
        raise SourceError(
            f"{len(ours)} images and {len(theirs)} of the reference: expected more than {NEIGHBORS_DENSITY} of each, "
            "for their neighbors."
        )
    kid, kid_std = kernel_distance(ours, theirs, device=device)
    score = cmmd(ours, theirs, device=device) if is_clip else None
    neighbors = neighbor_measures(ours, theirs, device=device)
    return {"frechet": frechet, "kid": kid, "kid_std": kid_std, "cmmd": score, **neighbors}


def frechet_distance(
    mean: np.ndarray, covariance: np.ndarray, other_mean: np.ndarray, other_covariance: np.ndarray
) -> float:
    """Squared Fréchet distance of two normal distributions: |m - m'|^2 + tr(C + C' - 2 (C C')^(1/2)).

    The eigenvalues of C C' are those of the symmetric A^T C' A, with C = A A^T; directions without variance are left
    out of A, because the rounding errors of many zeros would add up under the root.

    Args:
      mean, other_mean: (D,) float64.
      covariance, other_covariance: (D, D) float64, symmetric.
    Source: Heusel et al. 2017, eq. 6.
    """
    values, vectors = np.linalg.eigh(covariance)
    kept = values > len(values) * np.finfo(np.float64).eps * max(values.max(), 0.0)
    factor = vectors[:, kept] * np.sqrt(values[kept])  # (D, rank)
    product = factor.T @ other_covariance @ factor
    roots = np.sqrt(np.linalg.eigvalsh((product + product.T) / 2).clip(min=0)) if kept.any() else np.zeros(1)
    difference = mean - other_mean
    distance = difference @ difference + np.trace(covariance) + np.trace(other_covariance) - 2 * roots.sum()
    return max(0.0, float(distance))  # of equal sets the rounding error may be negative


def kernel_distance(features: np.ndarray, reference: np.ndarray, *, device: torch.device = CPU) -> tuple[float, float]:
    """KID: mean and standard deviation over subsets of the unbiased squared MMD with the kernel (x.y / D + 1)^3.

    Subsets are drawn without replacement, the same ones each time.

    Args:
      features: (N, D) float.
      reference: (M, D) float.
    Source: Binkowski et al. 2018, section 3 and eq. 4.
    """
    one, other = _matrix(features, device), _matrix(reference, device)
    size = min(SUBSET_SIZE, len(one), len(other))
    random = np.random.default_rng(0)
    found = []
    for _ in range(SUBSETS):
        x = one[torch.from_numpy(random.choice(len(one), size, replace=False)).to(device)]
        y = other[torch.from_numpy(random.choice(len(other), size, replace=False)).to(device)]
        within = _mean_off_diagonal(_cubic(x, x)) + _mean_off_diagonal(_cubic(y, y))
        found.append(within - 2 * float(_cubic(x, y).mean()))
    return float(np.mean(found)), float(np.std(found))


def cmmd(features: np.ndarray, reference: np.ndarray, *, device: torch.device = CPU) -> float:
    """CMMD: 1000 times the squared MMD of normalized embeddings with a Gaussian kernel of sigma 10.

    The biased estimate, as in the authors' program: it is 0 for equal sets.

    Args:
      features: (N, D) float, CLIP embeddings; normalized here.
      reference: (M, D) float.
    Source: Jayasumana et al. 2024, section 4.
    """
    one, other = (torch.nn.functional.normalize(_matrix(rows, device)) for rows in (features, reference))
    pairs = ((one, one), (other, other), (one, other))
    within, within_other, across = (
        sum(float(torch.exp(part.square() / (-2 * CMMD_SIGMA**2)).sum()) for _, part in _distances(x, y))
        / (len(x) * len(y))
        for x, y in pairs
    )
    return max(0.0, CMMD_SCALE * (within + within_other - 2 * across))


def neighbor_measures(features: np.ndarray, reference: np.ndarray, *, device: torch.device = CPU) -> dict[str, float]:
    """Precision, recall, density and coverage.

    Each point has a ball as large as the distance to its k-th nearest neighbor. Precision is the share of the images in
    any ball of the reference, recall the share of the reference in any ball of the images (k = 3); density is how many
    balls of the reference an image is in, over k, and coverage the share of those balls that hold an image (k = 5).

    Args:
      features: (N, D) float, N more than 3.
      reference: (M, D) float, M more than 5.
    Sources: Kynkaanniemi et al. 2019, eqs. 1 and 2; Naeem et al. 2020, eqs. 4 and 5.
    """
    one, other = _matrix(features, device), _matrix(reference, device)
    (radii,) = _neighbor_distances(one, NEIGHBORS_PRECISION)
    small, large = _neighbor_distances(other, NEIGHBORS_PRECISION, NEIGHBORS_DENSITY)
    recalled, covered = torch.zeros(2, len(other), dtype=torch.bool, device=device)
    num_precise = num_inside = 0
    for rows, part in _distances(one, other):
        num_precise += int((part <= small).any(dim=1).sum())
        recalled |= (part <= radii[rows, None]).any(dim=0)
        inside = part <= large
        num_inside += int(inside.sum())
        covered |= inside.any(dim=0)
    return {
        "precision": num_precise / len(one),
        "recall": int(recalled.sum()) / len(other),
        "density": num_inside / (NEIGHBORS_DENSITY * len(one)),
        "coverage": int(covered.sum()) / len(other),
    }


def _neighbor_distances(points: Tensor, *ks: int) -> list[Tensor]:
    """Distance of each point to its k-th nearest other point, for each k; (N, D) to (N,) float64."""
    found: list[list[Tensor]] = [[] for _ in ks]
    for rows, part in _distances(points, points):
        part[torch.arange(len(part)), torch.arange(rows.start, rows.stop)] = torch.inf  # not its own neighbor
        for k, distances in zip(ks, found, strict=True):
            distances.append(part.kthvalue(k, dim=1).values)
    return list(map(torch.cat, found))


def _matrix(rows: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(rows, np.float64)).to(device)


def _distances(one: Tensor, other: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Euclidean distances, some rows of ``one`` at a time: the rows, and (rows, M).

    Those of equal images are 0. Otherwise rounding would say which copy is inside the ball around another, whose
    radius is rounding too.
    """
    squares = other.square().sum(1)
    for start in range(0, len(one), ROWS):
        rows = slice(start, min(start + ROWS, len(one)))
        lengths = one[rows].square().sum(1)[:, None] + squares
        part = lengths - 2 * one[rows] @ other.T
        yield rows, part.masked_fill_(part <= SAME * lengths, 0).sqrt_()


def _cubic(one: Tensor, other: Tensor) -> Tensor:
    return (one @ other.T / one.shape[1] + 1) ** 3


def _mean_off_diagonal(kernel: Tensor) -> float:
    size = len(kernel)
    return float(kernel.sum() - kernel.diagonal().sum()) / (size * (size - 1))
