"""Distances between two sets of features, as pure functions.

All arithmetic is in float64. Sums run in a fixed order, so equal features give equal numbers.

Sources: Heusel et al. 2017, "GANs Trained by a Two Time-Scale Update Rule", eq. 6 (Fréchet distance); Binkowski et al.
2018, "Demystifying MMD GANs", section 3 (KID); Jayasumana et al. 2024, "Rethinking FID" (CMMD); Kynkaanniemi et al.
2019, "Improved Precision and Recall Metric"; Naeem et al. 2020, "Reliable Fidelity and Diversity Metrics".
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

SUBSETS, SUBSET_SIZE = 100, 1000  # of KID, as in torch-fidelity
NEIGHBOURS_PRECISION, NEIGHBOURS_DENSITY = 3, 5  # as in the papers
CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0
ROWS = 512  # of a matrix of distances that is in memory at once
SAME = 1e-10  # squared distance of equal pictures at most, as a share of the squared lengths: features are float32
CPU = torch.device("cpu")


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


def kernel_distance(
    features: np.ndarray, reference: np.ndarray, *, seed: int = 0, device: torch.device = CPU
) -> tuple[float, float]:
    """KID: mean and standard deviation over subsets of the unbiased squared MMD with the kernel (x.y / D + 1)^3.

    Args:
      features: (N, D) float.
      reference: (M, D) float.
      seed: of the subsets, drawn without replacement.
    Source: Binkowski et al. 2018, section 3 and eq. 4.
    """
    one, other = _matrix(features, device), _matrix(reference, device)
    size = min(SUBSET_SIZE, len(one), len(other))
    random = np.random.default_rng(seed)
    found = []
    for _ in range(SUBSETS):
        x = one[torch.from_numpy(random.choice(len(one), size, replace=False)).to(device)]
        y = other[torch.from_numpy(random.choice(len(other), size, replace=False)).to(device)]
        within = _mean_off_diagonal(_cubic(x, x)) + _mean_off_diagonal(_cubic(y, y))
        found.append(within - 2 * float(_cubic(x, y).mean()))
    return float(np.mean(found)), float(np.std(found))


def cmmd(features: np.ndarray, reference: np.ndarray, *, device: torch.device = CPU) -> float:
    """CMMD: 1000 times the squared MMD of normalised embeddings with a Gaussian kernel of sigma 10.

    The biased estimate, as in the authors' program: it is 0 for equal sets.

    Args:
      features: (N, D) float, CLIP embeddings; normalised here.
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


def precision_recall(
    features: np.ndarray, reference: np.ndarray, *, k: int = NEIGHBOURS_PRECISION, device: torch.device = CPU
) -> tuple[float, float]:
    """Share of the pictures inside the reference's manifold, and of the reference inside the pictures'.

    A manifold is the union of balls around its points, each as large as the distance to its k-th nearest neighbour.

    Args:
      features: (N, D) float.
      reference: (M, D) float.
      k: less than N and M.
    Source: Kynkaanniemi et al. 2019, eqs. 1 and 2.
    """
    one, other = _matrix(features, device), _matrix(reference, device)
    radii, other_radii = neighbour_distances(one, k), neighbour_distances(other, k)
    inside = torch.zeros(len(other), dtype=torch.bool, device=device)
    num_precise = 0
    for rows, part in _distances(one, other):
        num_precise += int((part <= other_radii).any(dim=1).sum())
        inside |= (part <= radii[rows, None]).any(dim=0)
    return num_precise / len(one), int(inside.sum()) / len(other)


def density_coverage(
    features: np.ndarray, reference: np.ndarray, *, k: int = NEIGHBOURS_DENSITY, device: torch.device = CPU
) -> tuple[float, float]:
    """How many balls of the reference a picture is in, over k; and the share of those balls that hold a picture.

    Args:
      features: (N, D) float.
      reference: (M, D) float.
      k: less than M.
    Source: Naeem et al. 2020, eqs. 4 and 5.
    """
    one, other = _matrix(features, device), _matrix(reference, device)
    radii = neighbour_distances(other, k)
    covered, num_inside = torch.zeros(len(other), dtype=torch.bool, device=device), 0
    for _, part in _distances(one, other):
        inside = part <= radii
        num_inside += int(inside.sum())
        covered |= inside.any(dim=0)
    return num_inside / (k * len(one)), int(covered.sum()) / len(other)


def neighbour_distances(points: Tensor, k: int) -> Tensor:
    """Distance of each point to its k-th nearest other point; (N, D) to (N,) float64."""
    found = []
    for rows, part in _distances(points, points):
        part[torch.arange(len(part)), torch.arange(rows.start, rows.stop)] = torch.inf  # not its own neighbour
        found.append(part.kthvalue(k, dim=1).values)
    return torch.cat(found)


def _matrix(rows: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(rows, np.float64)).to(device)


def _distances(one: Tensor, other: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Euclidean distances, some rows of ``one`` at a time: the rows, and (rows, M).

    Those of equal pictures are 0. Otherwise rounding would say which copy is inside the ball around another, whose
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
