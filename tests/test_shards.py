"""Shards: the bytes are Zarr's own, rows are mapped views, and what is damaged or foreign is refused, not misread."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from leandit.datasets.errors import DamageError, RecipeError
from leandit.datasets.files import canonical_json, read_json, write_atomic
from leandit.datasets.shards import CODECS, ArrayLayout, MappedShard, ShardedArray, check_codec, pack_shard

SHARD_ROWS = 4
COMPRESSED = [codec for codec in CODECS if codec != "none"]
layouts = pytest.mark.parametrize(
    "layout",
    [
        ArrayLayout("a/b", (rows, 2, 3, 5), dtype, SHARD_ROWS, chunk_rows, codec)
        for codec in CODECS
        for dtype in (["float16", "float32"] if codec in ("none", "blosc-lz4") else ["float16"])
        for rows in (8, 9, 3)  # full last shard, one row in the last, less than a shard
        for chunk_rows in (1, 2)
    ]
    + [
        ArrayLayout("n", (7,), "int64", 7, 7),
        ArrayLayout("n", (7, 3), "float16", 8, 4),
        ArrayLayout("n", (0, 3), "float16", 8),
    ],
    ids=lambda a: f"{a.codec}-{a.dtype}-{a.shape[0]}-{a.chunk_rows}",
)


def values_of(layout: ArrayLayout) -> np.ndarray:
    """Numbers with a zero row and a row of the fill value, which a careless writer drops."""
    values = (100 * np.random.default_rng(0).standard_normal(layout.shape)).astype(layout.dtype)
    if len(values) > 2 and values.dtype.kind == "f":
        values[1], values[2] = 0, np.nan
    return values


def write_array(root: Path, layout: ArrayLayout, values: np.ndarray) -> ShardedArray:
    """Write an array as the store does."""
    write_atomic(root / layout.path / "zarr.json", canonical_json(layout.metadata()))
    for shard in range(layout.num_shards):
        rows = layout.rows_of(shard)
        write_atomic(root / layout.shard_path(shard), pack_shard(layout, values[rows.start : rows.stop]))
    return ShardedArray(root, layout)


def write_with_zarr(root: Path, layout: ArrayLayout, values: np.ndarray, *, write_empty_chunks: bool = True) -> None:
    """Let zarr-python write the same array, from the same zarr.json."""
    write_atomic(root / layout.path / "zarr.json", canonical_json(layout.metadata()))
    with zarr.config.set({"array.write_empty_chunks": write_empty_chunks}):
        array: Any = zarr.open_array(root / layout.path, mode="r+")
        array[:] = values


def small(codec: str = "none", rows: int = 10, chunk_rows: int = 1) -> ArrayLayout:
    return ArrayLayout("a", (rows, 2, 3), "float16", SHARD_ROWS, chunk_rows, codec)


@layouts
def test_the_bytes_are_those_of_zarr_s_own_writer(layout: ArrayLayout, tmp_path: Path) -> None:
    values = values_of(layout)
    write_array(tmp_path / "ours", layout, values)
    write_with_zarr(tmp_path / "theirs", layout, values)
    for shard in range(layout.num_shards):
        path = layout.shard_path(shard)
        assert (tmp_path / "ours" / path).read_bytes() == (tmp_path / "theirs" / path).read_bytes()
    assert len(list((tmp_path / "theirs").rglob("c/*"))) == layout.num_shards


@layouts
def test_zarr_reads_the_same_numbers_as_we(layout: ArrayLayout, tmp_path: Path) -> None:
    values = values_of(layout)
    ours = write_array(tmp_path, layout, values)
    theirs = zarr.open_array(tmp_path / layout.path, mode="r")
    assert theirs.dtype == values.dtype
    np.testing.assert_array_equal(np.asarray(theirs[:]), values)
    np.testing.assert_array_equal(ours.read(0, len(values)), values)
    assert ArrayLayout.from_metadata(layout.path, read_json(tmp_path / layout.path / "zarr.json")) == layout


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(["none", "zstd"]), st.sampled_from([1, 2]))
def test_any_row_any_range_and_any_gathering_equal_numpy(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, codec: str, chunk_rows: int
) -> None:
    layout = small(codec, chunk_rows=chunk_rows)
    values, root = values_of(layout), tmp_path_factory.getbasetemp() / f"any-{codec}-{chunk_rows}"
    array = ShardedArray(root, layout) if root.exists() else write_array(root, layout, values)
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
    layout = small(codec)
    values = values_of(layout)
    array, out = write_array(tmp_path, layout, values), np.full((3, 2, 3), 7, np.float16)
    assert array.take(rows, out=out) is out
    np.testing.assert_array_equal(out, values[rows])


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    "out", [np.empty((2, 2, 3), np.float16), np.empty((3, 2, 3), np.float32), np.empty((3, 6), np.float16)]
)
def test_a_buffer_that_does_not_fit_is_refused(codec: str, out: np.ndarray, tmp_path: Path) -> None:
    layout = small(codec)
    array = write_array(tmp_path, layout, values_of(layout))
    with pytest.raises(ValueError, match="float16 \\(3, 2, 3\\)"):
        array.take([0, 1, 2], out=out)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_row_out_of_bounds_is_an_index_error(codec: str, tmp_path: Path) -> None:
    layout = small(codec)
    array = write_array(tmp_path, layout, values_of(layout))
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
    layout = small()
    array = write_array(tmp_path, layout, values_of(layout))
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
    layout = small()
    array = write_array(tmp_path, layout, values_of(layout))
    (tmp_path / layout.shard_path(2)).unlink()
    assert array.take([0, 7]).shape == (2, 2, 3)
    with pytest.raises(FileNotFoundError):
        array[8]


@pytest.mark.parametrize("codec", CODECS)
def test_a_flip_of_any_bit_of_the_index_is_found(codec: str, tmp_path: Path) -> None:
    layout = small(codec, rows=3)
    write_array(tmp_path, layout, values_of(layout))
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
    layout = small(codec, rows=4)
    write_array(tmp_path, layout, values_of(layout))
    path = tmp_path / layout.shard_path(0)
    content = path.read_bytes()
    path.write_bytes(content[: eval(keep, {"size": len(content)})])
    with pytest.raises(DamageError, match=r"shard .*/a/c/0"):
        MappedShard(path, layout, 4)


def test_a_shard_of_another_length_is_found(tmp_path: Path) -> None:
    layout = small(rows=4)
    write_array(tmp_path, layout, values_of(layout))
    path = tmp_path / layout.shard_path(0)
    content = path.read_bytes()
    path.write_bytes(content[12:])  # a row is gone in front, the index at the end is whole
    with pytest.raises(DamageError, match="not there"):
        MappedShard(path, layout, 4)


@pytest.mark.parametrize("codec", COMPRESSED)
def test_a_flip_of_any_byte_of_a_compressed_chunk_is_found(codec: str, tmp_path: Path) -> None:
    layout = small(codec, rows=4)
    values = values_of(layout)
    write_array(tmp_path, layout, values)
    path = tmp_path / layout.shard_path(0)
    good = path.read_bytes()
    index = np.frombuffer(good[-SHARD_ROWS * 16 - 4 : -4], "<u8").reshape(-1, 2).astype(int)
    for position in range(index[2, 0], index[2].sum()):
        bad = bytearray(good)
        bad[position] ^= 0x10
        path.write_bytes(bad)
        array = ShardedArray(tmp_path, layout)
        with pytest.raises(DamageError, match="chunk 2 "):
            array[2]
        with pytest.raises(DamageError, match="chunk 2 "):
            array.take([0, 2])
        np.testing.assert_array_equal(array[1], values[1])  # the neighbours are whole


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("empty", [0, 1, 3])
def test_a_shard_with_a_dropped_chunk_is_refused_not_misread(codec: str, empty: int, tmp_path: Path) -> None:
    layout = small(codec, rows=4)
    values = np.ones(layout.shape, np.float16)
    values[empty] = np.nan  # the fill value: zarr-python drops the chunk by default, and all later ones move up
    write_with_zarr(tmp_path, layout, values, write_empty_chunks=False)
    with pytest.raises(DamageError, match="chunks"):
        ShardedArray(tmp_path, layout).read(0, 4)


def test_chunks_in_another_order_are_refused_without_a_codec(tmp_path: Path) -> None:
    layout = small(rows=4)
    values = values_of(layout)
    write_array(tmp_path, layout, values)
    path = tmp_path / layout.shard_path(0)
    *_, tail = pack_shard(layout, values)
    swapped = np.frombuffer(bytes(tail)[:-4], "<u8").reshape(-1, 2)[[1, 0, 2, 3]].tobytes()
    path.write_bytes(path.read_bytes()[: -len(tail)] + swapped + _crc32c(swapped))
    with pytest.raises(DamageError, match="contiguous"):
        MappedShard(path, layout, 4)


def _crc32c(data: bytes) -> bytes:
    """By its definition (RFC 3720), bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    metadata = copy.deepcopy(small("zstd").metadata())
    inner: Any = metadata
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return metadata


SHARDING = ["codecs", 0, "configuration"]


@pytest.mark.parametrize(
    "metadata",
    [
        changed(["zarr_format"], 2),
        changed(["data_type"], "int32"),
        changed(["data_type"], "no-such-type"),
        changed(["fill_value"], 0.0),
        changed(["shape"], 5),
        changed(["shape"], None),
        changed(["chunk_key_encoding", "configuration", "separator"], "."),
        changed(["chunk_grid", "configuration", "chunk_shape"], [4, 1, 3]),
        changed(["codecs"], []),
        changed(["codecs"], [{"name": "bytes", "configuration": {"endian": "little"}}]),
        changed([*SHARDING, "index_location"], "start"),
        changed([*SHARDING, "chunk_shape"], [1, 1, 3]),
        changed([*SHARDING, "codecs", 0, "configuration", "endian"], "big"),
        changed([*SHARDING, "codecs", 1, "configuration", "level"], 7),
        changed([*SHARDING, "codecs", 1, "name"], "lzma"),
        changed([*SHARDING, "codecs", 2], None),
        changed([*SHARDING, "index_codecs"], [{"name": "bytes", "configuration": {"endian": "little"}}]),
        {},
    ],
)
def test_a_foreign_array_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(DamageError, match=r"array 'a': zarr\.json is not one that leandit writes"):
        ArrayLayout.from_metadata("a", metadata)


def test_a_codec_that_is_not_on_the_list_is_refused() -> None:
    for codec in CODECS:
        check_codec(codec)
    with pytest.raises(RecipeError, match=r"'lzma'.*none, zstd, gzip, blosc-lz4, blosc-zstd"):
        check_codec("lzma")


def test_the_bytes_of_a_tiny_shard_are_those_of_the_first_release() -> None:
    # If this changes, stores of released versions cannot be resumed or read: a FORMAT break.
    layout = ArrayLayout("a", (3, 2), "float16", 4, 2)
    found = b"".join(bytes(part) for part in pack_shard(layout, np.arange(6, dtype=np.float16).reshape(3, 2)))
    rows = np.array([0, 1, 2, 3, 4, 5, np.nan, np.nan], "<f2").tobytes()
    index = np.array([0, 8, 8, 8], "<u8").tobytes()
    assert found == rows + index + _crc32c(index)
