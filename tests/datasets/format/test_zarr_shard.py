"""Shards: the bytes are Zarr's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from making import ARRAY_LAYOUTS, array_values, crc32c, small_array, write_array, write_array_with_zarr

from leandit.datasets.format.zarr_shard import ArrayLayout, RowRange, pack_shard


@pytest.mark.parametrize("layout", ARRAY_LAYOUTS, ids=lambda a: f"{a.codec}-{a.dtype}-{a.shape[0]}-{a.chunk_rows}")
def test_the_bytes_are_those_of_zarr_s_own_writer(layout: ArrayLayout, tmp_path: Path) -> None:
    values = array_values(layout)
    ours = write_array(tmp_path / "ours", layout, values)
    write_array_with_zarr(tmp_path / "theirs", layout, values)
    for shard in range(layout.num_shards):
        path = layout.shard_path(shard)
        assert (tmp_path / "ours" / path).read_bytes() == (tmp_path / "theirs" / path).read_bytes()
    assert len(list((tmp_path / "theirs").rglob("c/*"))) == layout.num_shards
    read = np.asarray(zarr.open_array(tmp_path / "ours" / layout.path, mode="r")[:])
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read, values)
    np.testing.assert_array_equal(ours.read(0, len(values)), values)
    assert layout.problem() == ""


def test_zarr_reads_a_grown_array_through_its_gaps(tmp_path: Path) -> None:
    # Shard 1 ends early, shard 3 holds one row, and shard 2 is missing: zarr gives the fill value in their place.
    layout = small_array("blosc", rows=6).grown(RowRange(2, 12, 13)).grown(RowRange(3, 16, 24))
    values = array_values(layout)
    write_array(tmp_path, layout, values)
    found = np.asarray(zarr.open_array(tmp_path / "a", mode="r")[:])
    exists = layout.has_rows(np.arange(24))
    assert (found.shape, layout.shards.tolist()) == (values.shape, [0, 1, 3, 4, 5])
    np.testing.assert_array_equal(found[exists], values[exists])
    assert np.isnan(found[~exists]).all()


def test_the_bytes_of_a_tiny_shard_are_those_of_the_first_release() -> None:
    # If this changes, stores of released versions cannot be resumed or read: a FORMAT break.
    layout = ArrayLayout("a", (3, 2), "float16", 4, 2)
    found = b"".join(bytes(part) for part in pack_shard(layout, np.arange(6, dtype=np.float16).reshape(3, 2)))
    rows = np.array([0, 1, 2, 3, 4, 5, np.nan, np.nan], "<f2").tobytes()
    index = np.array([0, 8, 8, 8], "<u8").tobytes()
    assert found == rows + index + crc32c(index)
