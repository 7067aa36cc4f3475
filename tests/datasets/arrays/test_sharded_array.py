"""Stored arrays: rows are mapped views, whole arrays read as numpy, and what is damaged is refused, not misread."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import in_child
from hypothesis import given
from hypothesis import strategies as st
from making import SHARD_ROWS, array_values, small_array, write_array, write_array_with_zarr

from leandit.datasets.arrays import shard_folder, sharded_array
from leandit.datasets.arrays.shard_file import ShardFile
from leandit.datasets.arrays.shard_folder import ShardFolder
from leandit.datasets.arrays.sharded_array import ShardedArray
from leandit.datasets.batches.buffer_pool import BufferPool
from leandit.datasets.disk.cached import cached_property
from leandit.datasets.format.zarr_shard import CODECS, ArrayLayout, RowRange
from leandit.errors import DamageError, RowOutOfRange

# How shards are read: all in one range of addresses, each mapped alone where that cannot be had, or not mapped.
WAYS = ["window", "alone", "pread"]


def open_array(root: Path, layout: ArrayLayout, way: str, monkeypatch: pytest.MonkeyPatch) -> ShardedArray:
    if way == "alone":
        monkeypatch.setattr(sharded_array, "AddressWindow", no_window)
    return ShardedArray(ShardFolder(root, access="pread" if way == "pread" else "map"), layout)


def no_window(*_: int) -> None:
    raise OSError("no such range of addresses")


OUTS = [np.empty((2, 2, 3), np.float16), np.empty((3, 2, 3), np.float32), np.empty((3, 6), np.float16)]


@pytest.mark.parametrize("codec", CODECS)
def test_a_buffer_that_does_not_fit_is_refused(codec: str, tmp_path: Path) -> None:
    layout = small_array(codec)
    array = write_array(tmp_path, layout, array_values(layout))
    for out in OUTS:
        with pytest.raises(ValueError, match="float16 \\(3, 2, 3\\)"):
            array.take([0, 1, 2], out=out)
    right = np.full((3, 2, 3), 7, np.float16)
    for rows in ([3, 1, 3], [9, 0, 4]):  # within one shard, over three
        assert array.take(rows, out=right) is right
        np.testing.assert_array_equal(right, array_values(layout)[rows])


MASK = np.arange(10) % 3 == 1
KEYS: list[Any] = [7, -1, np.int32(3), slice(None), slice(2, 9), slice(-3, None), slice(9, 2), slice(8, 1, -3)]
KEYS += [slice(20, 30), [3, 1, -1], np.array([0, 9, 9], np.uint8), MASK, MASK.tolist(), (7, 1), ()]
KEYS += [([5, 0], slice(0, 1)), (slice(1, 8), slice(None), -1), np.empty(0, int)]


@pytest.mark.parametrize("codec", CODECS)
def test_an_array_is_read_as_one_of_numpy(codec: str, tmp_path: Path) -> None:
    layout = small_array(codec)
    values = array_values(layout)
    array = write_array(tmp_path, layout, values)
    assert (array.shape, array.ndim, array.dtype) == (values.shape, values.ndim, values.dtype)
    assert isinstance(array.dtype, np.dtype)
    for key in KEYS:
        got, wanted = array[key], values[key]
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), key
        np.testing.assert_array_equal(got, wanted, err_msg=str(key))
    assert array[[]].shape == (0, *values.shape[1:])
    np.testing.assert_array_equal(array[range(3)], values[:3])


NO_ROWS = {
    RowOutOfRange: ([0, 10], [-11], (10, 0), MASK[:9]),
    TypeError: ("7", 1.5, [[1]], (..., 0), (0, [1, 2]), None),
}


def test_rows_that_are_none_are_refused(tmp_path: Path) -> None:
    layout = small_array()
    array = write_array(tmp_path, layout, array_values(layout))
    for raised, keys in NO_ROWS.items():
        for key in keys:
            with pytest.raises(raised, match=layout.path):
                array[key]


@pytest.mark.parametrize(("codec", "way"), [("blosc", "window"), *(("none", way) for way in WAYS)])
def test_a_row_out_of_bounds_is_an_index_error(
    codec: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = small_array(codec)
    write_array(tmp_path, layout, array_values(layout))
    array = open_array(tmp_path, layout, way, monkeypatch)
    for row in (10, -11, 10**9):
        with pytest.raises(IndexError, match="it has 10"):
            array[row]
    for rows in ([0, 10], [-1], [3, -1, 12], [0, 2**40], [3, -(2**62)]):
        with pytest.raises(IndexError, match="it has 10"):
            array.take(rows)
    for start, stop in ((0, 11), (-1, 3), (5, 4), (11, 11)):
        with pytest.raises(IndexError, match="it has 10"):
            array.read(start, stop)
    assert [len(list(array)), len(array)] == [10, 10]  # iteration ends


def mapped_file_of(array: np.ndarray) -> str:
    """The file whose map an array's numbers lie in, as the system says; "" where they lie in plain memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, last = line.split(maxsplit=5)
        low, high = (int(end, 16) for end in addresses.split("-"))
        if low <= array.ctypes.data < high:
            return last if last.startswith("/") else ""
    return ""


def test_an_uncompressed_row_is_a_read_only_view_onto_the_mapped_file(tmp_path: Path) -> None:
    layout = small_array()
    array = write_array(tmp_path, layout, array_values(layout))
    row, rows = array[5], array.read(4, 8)
    for view in (row, rows):
        assert mapped_file_of(view) == str(tmp_path / layout.shard_path(1))
        assert not view.flags.writeable
        assert not view.flags.owndata
    assert np.shares_memory(row, rows)
    assert np.shares_memory(row, array[5])
    with pytest.raises(ValueError, match="read-only"):
        row[:] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        row.flags.writeable = True
    assert mapped_file_of(array.take([5])) == ""  # a batch is the caller's own


def test_a_shard_that_is_missing_or_of_another_size_is_refused_when_it_is_mapped(tmp_path: Path) -> None:
    layout = small_array()
    write_array(tmp_path, layout, array_values(layout))
    first, second, third = (layout.shard_path(i) for i in range(3))
    (tmp_path / third).unlink()
    sizes = {first: (tmp_path / first).stat().st_size, second: 1, third: 116}
    array = ShardedArray(ShardFolder(tmp_path, sizes), layout)
    assert array[0].shape == (2, 3)
    with pytest.raises(DamageError, match=r"a/c/1/0/0'.*has 116 bytes, the manifest says 1"):
        array[4]
    with pytest.raises(DamageError, match=r"a/c/2/0/0'.*is missing.*verify .*--repair"):
        array[8]
    with pytest.raises(DamageError, match=r"a/c/2/0/0'"):
        ShardedArray(ShardFolder(tmp_path, {first: sizes[first]}), layout)[8]


# As a bucket of a grown store: a revision ends amid a shard, one fills its shards, and one has a single row.
GROWN = [(0, 6), (8, 9), (12, 20), (20, 25)]


def grown_array(codec: str = "none", shape: tuple[int, ...] = (2, 3)) -> ArrayLayout:
    """Layout of an array of four revisions; rows 6, 7, 9, 10 and 11 do not exist."""
    layout = ArrayLayout("a", (6, *shape), "float16", SHARD_ROWS, 1, codec)
    for revision, (first, end) in enumerate(GROWN[1:], 2):
        layout = layout.grown(RowRange(revision, first, end))
    return layout


@given(st.data(), st.sampled_from([*CODECS]), st.sampled_from(WAYS), st.sampled_from([(2, 3), (1,), (26, 38), (17,)]))
def test_an_array_that_has_grown_is_read_by_its_row_numbers_whatever_a_row_measures(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, codec: str, way: str, shape: tuple[int, ...]
) -> None:
    # In the window the rows of all shards share one grid, whatever a row measures; 17 and 2 bytes share little.
    layout, root = grown_array(codec, shape), tmp_path_factory.getbasetemp() / f"grown-{codec}-{shape}"
    values = np.random.default_rng(3).standard_normal(layout.shape).astype(layout.dtype)
    if not root.exists():
        write_array(root, layout, values)
    with pytest.MonkeyPatch.context() as patch:
        array = open_array(root, layout, way, patch)
        ranges = []
        for _ in range(data.draw(st.integers(1, 9))):
            first, end = data.draw(st.sampled_from([*GROWN, (12, 25)]))  # the last two follow without a gap
            start = data.draw(st.integers(first, end))
            ranges.append((start, data.draw(st.integers(start, end))))
        one = st.sampled_from([row for first, end in GROWN for row in range(first, end)])
        row, rows = data.draw(one), data.draw(st.lists(one, max_size=20))
        assert len(array) == 25
        np.testing.assert_array_equal(array.read(*ranges[0]), values[slice(*ranges[0])])
        np.testing.assert_array_equal(array.take(rows), values[rows] if rows else values[:0])
        np.testing.assert_array_equal(array[row], values[row])
        np.testing.assert_array_equal(array[row - 25], values[row])
        starts, stops = np.array(ranges).T
        found, out = array.take_ranges(starts, stops - starts), np.empty((sum(stops - starts), *shape), np.float16)
        np.testing.assert_array_equal(found, np.concatenate([values[start:stop] for start, stop in ranges]))
        assert array.take_ranges(starts, stops - starts, out=out) is out
        np.testing.assert_array_equal(out, found)


@pytest.mark.parametrize(("codec", "way"), [("blosc", "window"), *(("none", way) for way in WAYS)])
@pytest.mark.parametrize("touched", [False, True])
def test_a_row_of_a_gap_is_refused_in_every_way(
    codec: str, way: str, touched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = grown_array(codec)
    write_array(tmp_path, layout, np.ones(layout.shape, np.float16))
    array = open_array(tmp_path, layout, way, monkeypatch)
    if touched:  # all shards are mapped: nothing is checked then but the row
        array.take([row for first, end in GROWN for row in range(first, end)])

    def refused(said: str, read: Callable[..., Any], *arguments: Any, **how: Any) -> None:
        with pytest.raises(RowOutOfRange, match=said):
            read(*arguments, **how)

    for row in (6, 7, 9, 11):
        said, out = rf"array 'a': row {row} lies in a gap", np.empty((1, 2, 3), np.float16)
        for key in (row, row - 25):
            refused(said, array.__getitem__, key)
        refused(said, array.read, row, row + 1)
        refused(said, array.take, [0, row, 24])
        refused(said, array.take, np.array([row]), out=out)
        refused(said, array.take_ranges, np.array([0, row]), np.array([1, 1]))
    for start, stop in ((0, 25), (5, 7), (8, 13)):
        out, ranges = np.empty((stop - start, 2, 3), np.float16), (np.array([start]), np.array([stop - start]))
        refused("lies in a gap", array.read, start, stop)
        refused("lies in a gap", array.__getitem__, slice(start, stop))
        refused("lies in a gap", array.take_ranges, *ranges, out=out)
    refused("row 6 lies in a gap", list, array)  # and does not end the iteration
    refused("row 6 lies in a gap", np.asarray, array)


@pytest.mark.parametrize("codec", CODECS)
def test_a_flip_of_any_bit_of_the_index_and_a_cut_shard_are_found(codec: str, tmp_path: Path) -> None:
    layout = small_array(codec, rows=4)
    write_array(tmp_path, layout, array_values(layout))
    path = tmp_path / layout.shard_path(0)
    good = path.read_bytes()
    for position in range(len(good) - SHARD_ROWS * 16 - 4, len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        path.write_bytes(bad)
        with pytest.raises(DamageError, match=rf"shard '{re.escape(str(path))}': the index"):
            ShardFile(path, layout, 4)
    for size in (0, 3, 67, len(good) - 1, len(good) // 2):
        path.write_bytes(good[:size])
        with pytest.raises(DamageError, match=r"shard .*/a/c/0"):
            ShardFile(path, layout, 4)
    path.write_bytes(good[12:])  # a row is gone in front, the index at the end is whole
    with pytest.raises(DamageError, match="missing chunks"):
        ShardFile(path, layout, 4)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("way", WAYS)
def test_a_shard_without_its_empty_chunks_is_refused(
    codec: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default zarr-python drops chunks of the fill value, and all later ones move up: rows in place would shift.
    layout = small_array(codec, rows=4)
    values = np.ones(layout.shape, np.float16)
    values[1] = np.nan
    write_array_with_zarr(tmp_path, layout, values, write_empty_chunks=False)
    with pytest.raises(DamageError, match="the index names missing chunks"):
        open_array(tmp_path, layout, way, monkeypatch).read(0, 4)


@pytest.mark.parametrize("way", WAYS)
def test_a_shard_that_is_replaced_whole_or_removed_is_read_on(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a repair or a compaction does: the file that is open stays what it was.
    layout = small_array()
    values = array_values(layout)
    write_array(tmp_path, layout, values)
    array = open_array(tmp_path, layout, way, monkeypatch)
    array.take(np.arange(10))
    write_array(tmp_path, layout, values + 1)
    (tmp_path / layout.shard_path(1)).unlink()
    np.testing.assert_array_equal(array.take(np.arange(10)), values)


def test_files_are_let_go_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_folder, "MAX_OPEN_SHARDS", 3)
    layout = ArrayLayout("a", (40, 5), "float16", 1)
    values = array_values(layout)
    write_array(tmp_path, layout, values)
    for way in ("alone", "pread"):
        before = len(os.listdir("/proc/self/fd"))
        array = open_array(tmp_path, layout, way, monkeypatch)
        np.testing.assert_array_equal(array.take(np.arange(40)[::-1]), values[::-1])
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) - before <= 3
        assert Path("/proc/self/maps").read_text().count(str(tmp_path)) <= 3
        with ThreadPoolExecutor(8) as pool:  # many threads open and read one array
            rows = [np.random.default_rng(seed).integers(0, 40, 30) for seed in range(100)]
            for wanted, found in zip(rows, pool.map(array.take, rows), strict=True):
                np.testing.assert_array_equal(found, values[wanted])


@pytest.mark.parametrize("way", WAYS)
def test_a_fork_reads_on_and_does_not_wait_for_what_a_thread_of_its_parent_holds(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = small_array()
    values = array_values(layout)
    write_array(tmp_path, layout, values)
    array, pool = open_array(tmp_path, layout, way, monkeypatch), BufferPool()
    lent = pool.take(layout.shape, layout.dtype)
    array.take(np.arange(10), out=lent)

    def read() -> int:
        nonlocal lent
        del lent
        other = ShardedArray(ShardFolder(tmp_path), layout)
        found = [one.take(np.arange(10), out=pool.take(layout.shape, layout.dtype)) for one in (array, other)]
        return Slow().value - all(np.array_equal(rows, values, equal_nan=True) for rows in found)

    held, release = threading.Event(), threading.Event()

    class Slow:  # the functools.cached_property of Python 3.11 has one lock for all objects
        @cached_property
        def value(self) -> int:
            if threading.current_thread() is holder:
                held.set()
                release.wait(60)
            return 1

    def hold() -> None:
        with array._folder.lock, pool._lock:
            _ = Slow().value

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    try:
        assert in_child(read) == 0
    finally:
        release.set()
        holder.join()


def test_views_can_be_read_while_the_process_ends(tmp_path: Path) -> None:
    layout = small_array()
    write_array(tmp_path, layout, array_values(layout))
    program = f"""
import atexit, numpy as np
from pathlib import Path
from leandit.datasets.arrays.shard_folder import ShardFolder
from leandit.datasets.arrays.sharded_array import ShardedArray
from leandit.datasets.format.zarr_shard import ArrayLayout
views = []
atexit.register(lambda: print(float(views[0].sum()) == float(views[0].sum())))
layout = ArrayLayout({layout.path!r}, {layout.shape}, {layout.dtype!r}, {layout.shard_rows})
array = ShardedArray(ShardFolder(Path({str(tmp_path)!r})), layout)
views.append(array.read(0, 1))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
