"""Statistics of features in batches, kept in a file, and read from files of others."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from leandit.datasets.errors import DamageError
from leandit.tools.inspection.pictures import spread
from leandit.tools.sample.evaluation.moments import Moments, collect, read_moments, write_moments
from leandit.tools.sample.npz import Npz


def rows(count: int = 103, width: int = 7) -> np.ndarray:
    random = np.random.default_rng(0)
    return (random.normal(size=(count, width)) + 1000).astype(np.float32)  # far from zero, so that sums would cancel


def batches(features: np.ndarray, size: int) -> list[np.ndarray]:
    return [features[start : start + size] for start in range(0, len(features), size)]


@pytest.mark.parametrize("size", [1, 10, 103])
def test_mean_and_covariance_of_batches_are_those_of_all(size: int) -> None:
    features = rows()
    found = collect(batches(features, size), len(features))
    assert found.mean == pytest.approx(features.astype(float).mean(axis=0), rel=1e-13)
    assert found.covariance == pytest.approx(np.cov(features.astype(float).T), rel=1e-9, abs=1e-12)
    assert found.features is not None
    assert np.array_equal(found.features, features)


def test_the_kept_features_are_spread_evenly() -> None:
    features = rows()
    found = collect(batches(features, 10), len(features), most=20)
    assert found.features is not None
    assert np.array_equal(found.features, features[spread(103, 20)])
    assert found.count == 103


def test_kept_statistics_are_read_as_they_were_and_by_numpy(tmp_path: Path) -> None:
    found, path = collect(batches(rows(), 10), 103), tmp_path / "kept.npz"
    write_moments(path, found, {"network": {"side_px": 8}})
    again = read_moments(Npz(path))
    assert again.count == 103
    assert np.array_equal(again.mean, found.mean)
    assert np.array_equal(again.covariance, found.covariance)
    assert again.features is not None
    assert np.array_equal(again.features, found.features)
    assert Npz(path).text() == {"count": 103, "network": {"side_px": 8}}
    with np.load(path, allow_pickle=False) as plain:
        assert np.array_equal(plain["mu"], found.mean)
    before = path.read_bytes()
    write_moments(path, found, {"network": {"side_px": 8}})
    assert path.read_bytes() == before


def test_statistics_of_adm_are_read(tmp_path: Path) -> None:
    found = collect(batches(rows(), 10), 103)
    np.savez_compressed(tmp_path / "adm.npz", mu=found.mean, sigma=found.covariance, mu_s=np.zeros(3))
    again = read_moments(Npz(tmp_path / "adm.npz"))
    assert (again.count, again.features) == (0, None)
    assert np.array_equal(again.covariance, found.covariance)


@pytest.mark.parametrize("compressed", [True, False])
def test_rows_of_an_array_are_read_in_ranges(compressed: bool, tmp_path: Path) -> None:
    array = np.arange(60, dtype=np.uint8).reshape(10, 2, 3)
    (np.savez_compressed if compressed else np.savez)(tmp_path / "a.npz", arr_0=array)
    file = Npz(tmp_path / "a.npz")
    assert file.shape("arr_0") == ((10, 2, 3), np.uint8)
    first, second = file.rows("arr_0", [(1, 3), (7, 10)])
    assert np.array_equal(first, array[1:3])
    assert np.array_equal(second, array[7:])


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
    "columns first": (packed(npy(np.asfortranarray(np.zeros((3, 4))))), "by columns"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    content, words = BAD[name]
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(DamageError, match=r"bad\.npz") as raised:
        Npz(tmp_path / "bad.npz").read("arr_0")
    assert words in str(raised.value)


def test_moments_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", mu=np.zeros(3), sigma=np.zeros((4, 4)))
    with pytest.raises(DamageError, match=r"mu \(3,\) and sigma \(4, 4\)"):
        read_moments(Npz(tmp_path / "a.npz"))
    np.savez(tmp_path / "b.npz", mu=np.array([np.nan]), sigma=np.zeros((1, 1)))
    with pytest.raises(DamageError, match="not mean and covariance of features, or not finite"):
        read_moments(Npz(tmp_path / "b.npz"))
    write_moments(
        tmp_path / "c.npz", Moments(2, np.zeros(1), np.zeros((1, 1)), np.full((2, 1), np.nan, np.float32)), {"a": 1}
    )
    with pytest.raises(DamageError, match="or not finite"):
        read_moments(Npz(tmp_path / "c.npz"))
    np.savez(tmp_path / "d.npz", mu=np.zeros(3))
    with pytest.raises(DamageError, match="it has no array 'sigma'"):
        read_moments(Npz(tmp_path / "d.npz"))
