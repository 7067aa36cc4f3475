"""Statistics of features in batches, kept in a file, and read from files of others."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from leandit.datasets.errors import DamageError
from leandit.tools.inspection.images import spread
from leandit.tools.sample.evaluation.distances import Moments
from leandit.tools.sample.evaluation.moments import collect, read_moments, write_moments
from leandit.tools.sample.npz import Npz


def rows(count: int = 103, width: int = 7) -> np.ndarray:
    random = np.random.default_rng(0)
    return (random.normal(size=(count, width)) + 1000).astype(np.float32)  # far from zero, so that sums would cancel


def batches(features: np.ndarray, size: int) -> list[np.ndarray]:
    return [features[start : start + size] for start in range(0, len(features), size)]


@pytest.mark.parametrize(("size", "most"), [(1, 103), (10, 20), (103, 200)])
def test_mean_and_covariance_of_batches_are_those_of_all_and_kept_features_are_spread(size: int, most: int) -> None:
    features = rows()
    found = collect(batches(features, size), len(features), most=most)
    assert found.mean == pytest.approx(features.astype(float).mean(axis=0), rel=1e-13)
    assert found.covariance == pytest.approx(np.cov(features.astype(float).T), rel=1e-9, abs=1e-12)
    assert found.features is not None
    assert np.array_equal(found.features, features[spread(103, most)])
    assert found.count == 103


def test_statistics_are_read_as_they_were_by_numpy_too_and_so_are_those_of_adm(tmp_path: Path) -> None:
    found, path = collect(batches(rows(), 10), 103), tmp_path / "kept.npz"
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


@pytest.mark.parametrize("compressed", [True, False])
def test_rows_of_an_array_are_read_by_number(compressed: bool, tmp_path: Path) -> None:
    array = np.arange(60, dtype=np.uint8).reshape(10, 2, 3)
    (np.savez_compressed if compressed else np.savez)(tmp_path / "a.npz", arr_0=array)
    file = Npz(tmp_path / "a.npz")
    assert file.shape("arr_0") == ((10, 2, 3), np.uint8)
    assert np.array_equal(list(file.rows("arr_0", [1, 2, 7, 9])), array[[1, 2, 7, 9]])


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
    "objects": (packed(npy(np.array([{}]))), "it holds object"),
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
