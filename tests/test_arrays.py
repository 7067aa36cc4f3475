"""Stored arrays: rows are mapped views, whole arrays read as numpy, and what is damaged is refused, not misread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from making import ARRAY_LAYOUTS, SHARD_ROWS, array_values, crc32c, small_array, write_array, write_array_with_zarr

from leandit.datasets.arrays import MappedShard, ShardedArray
from leandit.datasets.errors import DamageError
from leandit.datasets.hashing import read_json
from leandit.datasets.shards import CODECS, ArrayLayout, pack_shard

COMPRESSED = [codec for codec in CODECS if codec != "none"]


@pytest.mark.parametrize("layout", ARRAY_LAYOUTS, ids=lambda a: f"{a.codec}-{a.dtype}-{a.shape[0]}-{a.chunk_rows}")
def test_zarr_reads_the_same_numbers_as_we(layout: ArrayLayout, tmp_path: Path) -> None:
    values = array_values(layout)
    ours = write_array(tmp_path, layout, values)
    theirs = zarr.open_array(tmp_path / layout.path, mode="r")
    assert theirs.dtype == values.dtype
    np.testing.assert_array_equal(np.asarray(theirs[:]), values)
    np.testing.assert_array_equal(ours.read(0, len(values)), values)
    if len(values):  # a store has no array without rows
        assert ArrayLayout.from_metadata(layout.path, read_json(tmp_path / layout.path / "zarr.json")) == layout


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(["none", "zstd"]), st.sampled_from([1, 2]))
def test_any_row_any_range_and_any_gathering_equal_numpy(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, codec: str, chunk_rows: int
) -> None:
    layout = small_array(codec, chunk_rows=chunk_rows)
    values, root = array_values(layout), tmp_path_factory.getbasetemp() / f"any-{codec}-{chunk_rows}"
    array = ShardedArray(root, [layout]) if root.exists() else write_array(root, layout, values)
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    rows = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=12))
    row = data.draw(st.integers(-len(values), len(values) - 1))
    np.testing.assert_array_equal(array.read(start, stop), values[start:stop])
    np.testing.assert_array_equal(array.take(rows), values[rows] if rows else values[:0])
    np.testing.assert_array_equal(array[row], values[row])
    assert array.read(start, stop).dtype == array.take(rows).dtype == array[row].dtype == values.dtype


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("rows", [[3, 1, 3], [9, 0, 4]])  # within one shard, over three
def test_take_fills_the_buffer_it_is_given(codec: str, rows: list[int], tmp_path: Path) -> None:
    layout = small_array(codec)
    values = array_values(layout)
    array, out = write_array(tmp_path, layout, values), np.full((3, 2, 3), 7, np.float16)
    assert array.take(rows, out=out) is out
    np.testing.assert_array_equal(out, values[rows])


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    "out", [np.empty((2, 2, 3), np.float16), np.empty((3, 2, 3), np.float32), np.empty((3, 6), np.float16)]
)
def test_a_buffer_that_does_not_fit_is_refused(codec: str, out: np.ndarray, tmp_path: Path) -> None:
    layout = small_array(codec)
    array = write_array(tmp_path, layout, array_values(layout))
    with pytest.raises(ValueError, match="float16 \\(3, 2, 3\\)"):
        array.take([0, 1, 2], out=out)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_row_out_of_bounds_is_an_index_error(codec: str, tmp_path: Path) -> None:
    layout = small_array(codec)
    array = write_array(tmp_path, layout, array_values(layout))
    for row in (10, -11, 10**9):
        with pytest.raises(IndexError, match="there are 10"):
            array[row]
    for rows in ([0, 10], [-1], [3, -1, 12]):
        with pytest.raises(IndexError, match="there are 10"):
            array.take(rows)
    for start, stop in ((0, 11), (-1, 3), (5, 4), (11, 11)):
        with pytest.raises(IndexError, match="there are 10"):
            array.read(start, stop)
    assert [len(list(array)), len(array)] == [10, 10]  # iteration ends


def memory_map_of(array: np.ndarray) -> np.memmap | None:
    base: Any = array
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    return base


def test_an_uncompressed_row_is_a_read_only_view_onto_the_mapped_file(tmp_path: Path) -> None:
    layout = small_array()
    array = write_array(tmp_path, layout, array_values(layout))
    row, rows = array[5], array.read(4, 8)
    for view in (row, rows):
        mapped = memory_map_of(view)
        assert mapped is not None
        assert Path(str(mapped.filename)) == tmp_path / layout.shard_path(1)
        assert not view.flags.writeable
        assert not view.flags.owndata
    assert np.shares_memory(row, rows)
    assert np.shares_memory(row, array[5])
    with pytest.raises(ValueError, match="read-only"):
        row[:] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        row.flags.writeable = True
    assert memory_map_of(array.take([5])) is None  # a batch is the caller's own


def test_a_shard_is_mapped_when_it_is_first_touched(tmp_path: Path) -> None:
    layout = small_array()
    array = write_array(tmp_path, layout, array_values(layout))
    (tmp_path / layout.shard_path(2)).unlink()
    assert array.take([0, 7]).shape == (2, 2, 3)
    with pytest.raises(DamageError, match=r"a/c/2/0/0'.*is missing.*verify --repair"):
        array[8]


def test_a_shard_that_has_not_the_size_of_the_manifest_is_refused_when_it_is_mapped(tmp_path: Path) -> None:
    layout = small_array()
    write_array(tmp_path, layout, array_values(layout))
    sizes = {layout.shard_path(i): (tmp_path / layout.shard_path(i)).stat().st_size for i in range(3)}
    array = ShardedArray(tmp_path, [layout], sizes | {layout.shard_path(1): 1})
    assert array[0].shape == (2, 3)
    with pytest.raises(DamageError, match=r"a/c/1/0/0'.*not those of the manifest"):
        array[4]
    del sizes[layout.shard_path(2)]
    with pytest.raises(DamageError, match=r"a/c/2/0/0'"):
        ShardedArray(tmp_path, [layout], sizes)[8]


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(["none", "zstd"]))
def test_arrays_that_follow_each_other_read_as_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, codec: str
) -> None:
    # As a bucket of a grown store: the first ends amid a shard, the second is empty, the third has one row.
    layouts = [ArrayLayout(f"r{i}/a", (n, 2, 3), "float16", SHARD_ROWS, 1, codec) for i, n in enumerate((6, 0, 1, 9))]
    root = tmp_path_factory.getbasetemp() / f"stacked-{codec}"
    values = [np.random.default_rng(i).standard_normal(a.shape).astype(a.dtype) for i, a in enumerate(layouts)]
    if not root.exists():
        for layout, part in zip(layouts, values, strict=True):
            write_array(root, layout, part)
    whole, array = np.concatenate(values), ShardedArray(root, layouts)
    start = data.draw(st.integers(0, 16))
    stop = data.draw(st.integers(start, 16))
    rows = data.draw(st.lists(st.integers(0, 15), max_size=20))
    assert len(array) == 16
    np.testing.assert_array_equal(array.read(start, stop), whole[start:stop])
    np.testing.assert_array_equal(array.take(rows), whole[rows] if rows else whole[:0])
    for row in rows:
        np.testing.assert_array_equal(array[row], whole[row])
        layout, shard = array.locate(row)
        first = [0, 6, 6, 7][layouts.index(layout)]
        assert row - first in layout.rows_of(shard)


@pytest.mark.parametrize("codec", CODECS)
def test_a_flip_of_any_bit_of_the_index_is_found(codec: str, tmp_path: Path) -> None:
    layout = small_array(codec, rows=3)
    write_array(tmp_path, layout, array_values(layout))
    path = tmp_path / layout.shard_path(0)
    good = path.read_bytes()
    for position in range(len(good) - SHARD_ROWS * 16 - 4, len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        path.write_bytes(bad)
        with pytest.raises(DamageError, match="index") as caught:
            MappedShard(path, layout, 3)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("keep", ["0", "1", "3", "4", "67", "size - 1", "size // 2"])
def test_a_cut_shard_is_found(codec: str, keep: str, tmp_path: Path) -> None:
    layout = small_array(codec, rows=4)
    write_array(tmp_path, layout, array_values(layout))
    path = tmp_path / layout.shard_path(0)
    content = path.read_bytes()
    path.write_bytes(content[: eval(keep, {"size": len(content)})])
    with pytest.raises(DamageError, match=r"shard .*/a/c/0"):
        MappedShard(path, layout, 4)


def test_a_shard_of_another_length_is_found(tmp_path: Path) -> None:
    layout = small_array(rows=4)
    write_array(tmp_path, layout, array_values(layout))
    path = tmp_path / layout.shard_path(0)
    content = path.read_bytes()
    path.write_bytes(content[12:])  # a row is gone in front, the index at the end is whole
    with pytest.raises(DamageError, match="not there"):
        MappedShard(path, layout, 4)


@pytest.mark.parametrize("codec", COMPRESSED)
def test_a_flip_of_any_byte_of_a_compressed_chunk_is_found(codec: str, tmp_path: Path) -> None:
    layout = small_array(codec, rows=4)
    values = array_values(layout)
    write_array(tmp_path, layout, values)
    path = tmp_path / layout.shard_path(0)
    good = path.read_bytes()
    index = np.frombuffer(good[-SHARD_ROWS * 16 - 4 : -4], "<u8").reshape(-1, 2).astype(int)
    for position in range(index[2, 0], index[2].sum()):
        bad = bytearray(good)
        bad[position] ^= 0x10
        path.write_bytes(bad)
        array = ShardedArray(tmp_path, [layout])
        with pytest.raises(DamageError, match="chunk 2 "):
            array[2]
        with pytest.raises(DamageError, match="chunk 2 "):
            array.take([0, 2])
        np.testing.assert_array_equal(array[1], values[1])  # the neighbours are whole


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("empty", [0, 1, 3])
def test_a_shard_with_a_dropped_chunk_is_refused_not_misread(codec: str, empty: int, tmp_path: Path) -> None:
    layout = small_array(codec, rows=4)
    values = np.ones(layout.shape, np.float16)
    values[empty] = np.nan  # the fill value: zarr-python drops the chunk by default, and all later ones move up
    write_array_with_zarr(tmp_path, layout, values, write_empty_chunks=False)
    with pytest.raises(DamageError, match="chunks"):
        ShardedArray(tmp_path, [layout]).read(0, 4)


def test_chunks_in_another_order_are_refused_without_a_codec(tmp_path: Path) -> None:
    layout = small_array(rows=4)
    values = array_values(layout)
    write_array(tmp_path, layout, values)
    path = tmp_path / layout.shard_path(0)
    *_, tail = pack_shard(layout, values)
    swapped = np.frombuffer(bytes(tail)[:-4], "<u8").reshape(-1, 2)[[1, 0, 2, 3]].tobytes()
    path.write_bytes(path.read_bytes()[: -len(tail)] + swapped + crc32c(swapped))
    with pytest.raises(DamageError, match="contiguous"):
        MappedShard(path, layout, 4)
