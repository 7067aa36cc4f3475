"""Distances between sets of features, beside formulas that are written out, and numbers of other libraries."""

from __future__ import annotations

import io
import itertools
import math
import zipfile
from pathlib import Path

import numpy as np
import pytest

from leandit.datasets.order.slices import spread
from leandit.errors import DamageError
from leandit.tools.sample.evaluation import distances
from leandit.tools.sample.evaluation.distances import (
    Moments,
    cmmd,
    frechet_distance,
    kernel_distance,
    neighbor_measures,
)
from leandit.tools.sample.evaluation.moments import collect, read_moments, write_moments
from leandit.tools.sample.npz import Npz

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


def test_precision_recall_density_and_coverage_by_definition(sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
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


def far_rows(count: int = 103, width: int = 7) -> np.ndarray:
    random = np.random.default_rng(0)
    return (random.normal(size=(count, width)) + 1000).astype(np.float32)  # far from zero, so that sums would cancel


def batches(features: np.ndarray, size: int) -> list[np.ndarray]:
    return [features[start : start + size] for start in range(0, len(features), size)]


@pytest.mark.parametrize(("size", "most"), [(1, 103), (10, 20), (103, 200)])
def test_mean_and_covariance_of_batches_are_those_of_all_and_kept_features_are_spread(size: int, most: int) -> None:
    features = far_rows()
    found = collect(batches(features, size), len(features), most=most)
    assert found.mean == pytest.approx(features.astype(float).mean(axis=0), rel=1e-13)
    assert found.covariance == pytest.approx(np.cov(features.astype(float).T), rel=1e-9, abs=1e-12)
    assert np.array_equal(found.features, features[spread(103, most)])
    assert found.count == 103


def test_statistics_are_read_as_they_were_by_numpy_too_and_so_are_those_of_adm(tmp_path: Path) -> None:
    found, path = collect(batches(far_rows(), 10), 103), tmp_path / "kept.npz"
    write_moments(path, found, {"network": {"side_px": 8}})
    again = read_moments(Npz(path))
    assert again.count == 103
    for name in ("mean", "covariance", "features"):
        assert np.array_equal(getattr(again, name), getattr(found, name)), name
    assert Npz(path).text() == {"count": 103, "network": {"side_px": 8}}
    with np.load(path, allow_pickle=False) as plain:
        assert np.array_equal(plain["mu"], found.mean)
    before = path.read_bytes()
    write_moments(path, found, {"network": {"side_px": 8}})
    assert path.read_bytes() == before

    np.savez_compressed(tmp_path / "adm.npz", mu=found.mean, sigma=found.covariance, mu_s=np.zeros(3))
    again = read_moments(Npz(tmp_path / "adm.npz"))
    assert (again.count, again.features) == (0, None)
    assert np.array_equal(again.covariance, found.covariance)


def packed(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("arr_0.npy", content)
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    return buffer.getvalue()


BAD = {
    "no zip": (b"nothing", "not a .npz file"),
    "no array": (packed(b"nothing"), "magic"),
    "a header of more than there is": (packed(npy(np.zeros((9, 9)))[:-8]), "claims shape (9, 9)"),
    "objects": (packed(npy(np.array([{}]))), "dtype object; expected one of uint8"),
    "columns first": (packed(npy(np.asfortranarray(np.zeros((3, 4))))), "in column-major order"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    content, words = BAD[name]
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(DamageError, match=r"bad\.npz") as raised:
        Npz(tmp_path / "bad.npz").read("arr_0")
    assert words in str(raised.value)


def test_moments_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    zero, path = np.zeros((1, 1)), tmp_path / "a.npz"

    def refused(words: str) -> None:
        with pytest.raises(DamageError, match=words):
            read_moments(Npz(path))

    np.savez(path, mu=np.zeros(3), sigma=np.zeros((4, 4)))
    refused(r"mu \(3,\) and sigma \(4, 4\)")
    np.savez(path, mu=np.array([np.nan]), sigma=zero)
    refused("not mean and covariance of features, or not finite")
    write_moments(path, Moments(2, np.zeros(1), zero, np.full((2, 1), np.nan, np.float32)), {"a": 1})
    refused("or not finite")
    np.savez(path, mu=np.zeros(3))
    refused("it has no array 'sigma'")
