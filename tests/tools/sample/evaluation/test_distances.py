"""Distances between sets of features, beside formulas that are written out, and numbers of other libraries."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from leandit.tools.sample.evaluation import distances
from leandit.tools.sample.evaluation.distances import cmmd, frechet_distance, kernel_distance, neighbor_measures

Sets = tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def sets() -> Sets:
    """200 and 300 points in 16 dimensions, of different means and variances."""
    random = np.random.default_rng(0)
    one, other = random.normal(size=(200, 16)), random.normal(size=(300, 16)) * np.linspace(0.5, 2, 16) + 0.3
    return one.astype(np.float32), other.astype(np.float32)


def moments(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return rows.astype(np.float64).mean(axis=0), np.cov(rows.astype(np.float64).T)


def test_the_frechet_distance_is_that_of_scipy(sets: Sets) -> None:
    # trace(C + C' - 2 scipy.linalg.sqrtm(C @ C')) + |m - m'|^2 of scipy 1.17.1; torchmetrics 1.9.0 has the same digits.
    # Another number would make published distances incomparable.
    assert frechet_distance(*moments(sets[0]), *moments(sets[1])) == pytest.approx(7.234659772515, rel=1e-11)
    assert frechet_distance(*moments(sets[1]), *moments(sets[0])) == pytest.approx(7.234659772515, rel=1e-11)


def test_the_frechet_distance_is_exact_where_there_are_fewer_images_than_features() -> None:
    random = np.random.default_rng(1)
    one, other = random.normal(size=(50, 128)), random.normal(size=(40, 128)) + 0.1
    centred = (one - one.mean(0)) @ (other - other.mean(0)).T  # tr (C C')^(1/2) is the sum of its singular values
    roots = np.linalg.svd(centred, compute_uv=False).sum() / math.sqrt(49 * 39)
    (mean, covariance), (other_mean, other_covariance) = moments(one), moments(other)
    expected = ((mean - other_mean) ** 2).sum() + np.trace(covariance + other_covariance) - 2 * roots
    assert frechet_distance(mean, covariance, other_mean, other_covariance) == pytest.approx(expected, rel=1e-6)


def naive_mmd(one: np.ndarray, other: np.ndarray) -> float:
    def kernel(x: np.ndarray, y: np.ndarray) -> float:
        return (sum(float(a) * float(b) for a, b in zip(x, y, strict=True)) / len(x) + 1) ** 3

    def within(rows: np.ndarray) -> float:
        return sum(kernel(x, y) for x, y in itertools.permutations(rows, 2)) / (len(rows) * (len(rows) - 1))

    across = sum(kernel(x, y) for x, y in itertools.product(one, other)) / (len(one) * len(other))
    return within(one) + within(other) - 2 * across


def test_kid_is_the_unbiased_mmd_of_the_cubic_kernel(sets: Sets) -> None:
    one, other = sets[0][:20], sets[1][:20]  # as many as a subset, so that all subsets are the same
    mean, deviation = kernel_distance(one, other)
    assert mean == pytest.approx(naive_mmd(one, other), rel=1e-12)
    assert deviation == pytest.approx(0, abs=1e-12)
    # poly_mmd of torchmetrics 1.9.0, of the same 200 rows
    assert kernel_distance(sets[0], sets[1][:200])[0] == pytest.approx(0.9111042715654514, rel=1e-12)


def test_cmmd_is_a_thousand_times_the_mmd_of_normalised_embeddings(sets: Sets) -> None:
    one, other = (rows.astype(float) / np.linalg.norm(rows.astype(float), axis=1)[:, None] for rows in sets)

    def kernel(x: np.ndarray, y: np.ndarray) -> float:
        return float(np.mean([math.exp(-((a - b) ** 2).sum() / 200) for a in x for b in y]))

    expected = 1000 * (kernel(one, one) + kernel(other, other) - 2 * kernel(one, other))
    assert cmmd(*sets) == pytest.approx(expected, rel=1e-8)
    assert cmmd(sets[0] * 7, sets[1]) == pytest.approx(expected, rel=1e-5)  # of any length


def naive_radii(rows: list[list[float]], k: int) -> list[float]:
    return [sorted(math.dist(a, b) for j, b in enumerate(rows) if j != i)[k - 1] for i, a in enumerate(rows)]


def test_precision_recall_density_and_coverage_are_those_of_their_definitions(
    sets: Sets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distances, "ROWS", 17)  # so that there are many parts, and a short one
    made, real = sets[0][:60, :3].tolist(), (sets[1][:80, :3] + 0.8).tolist()
    radii, made_radii = naive_radii(real, 3), naive_radii(made, 3)
    precision = sum(any(math.dist(x, y) <= r for y, r in zip(real, radii, strict=True)) for x in made) / len(made)
    recall = sum(any(math.dist(x, y) <= r for y, r in zip(made, made_radii, strict=True)) for x in real) / len(real)
    radii = naive_radii(real, 5)
    inside = [[math.dist(x, y) <= r for y, r in zip(real, radii, strict=True)] for x in made]
    density = sum(map(sum, inside)) / (5 * len(made))
    coverage = sum(map(any, zip(*inside, strict=True))) / len(real)
    expected = {"precision": precision, "recall": recall, "density": density, "coverage": coverage}
    assert neighbor_measures(np.array(made), np.array(real)) == pytest.approx(expected)
    assert 0.1 < min(precision, recall, coverage) <= max(precision, recall, coverage) < 1


@pytest.mark.parametrize("count", [7, 31, 100])
def test_copies_are_inside_the_balls_of_each_other(count: int) -> None:
    """Six copies of each image have balls without a radius; what is in them does not depend on rounding."""
    random = np.random.default_rng(0)
    real = np.repeat(np.abs(random.normal(size=(37, 2048))).astype(np.float32), 6, axis=0)
    chosen = random.permutation(len(real))[:count]
    made = real[chosen]
    made[::2] *= np.float32(1 + 2**-22)  # as a network rounds in another batch
    shown = len(np.unique(chosen // 6)) / 37
    found = neighbor_measures(made, real)
    assert found["precision"] == 1
    assert (found["density"], found["coverage"]) == pytest.approx((6 / 5, shown))
