"""Shards: the bytes are Zarr's own, and what is foreign is refused, not misread."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import ARRAY_LAYOUTS, array_values, crc32c, small_array, write_array, write_array_with_zarr

from leandit.datasets.errors import DamageError
from leandit.datasets.format.zarr_shard import ArrayLayout, pack_shard


@pytest.mark.parametrize("layout", ARRAY_LAYOUTS, ids=lambda a: f"{a.codec}-{a.dtype}-{a.shape[0]}-{a.chunk_rows}")
def test_the_bytes_are_those_of_zarr_s_own_writer(layout: ArrayLayout, tmp_path: Path) -> None:
    values = array_values(layout)
    write_array(tmp_path / "ours", layout, values)
    write_array_with_zarr(tmp_path / "theirs", layout, values)
    for shard in range(layout.num_shards):
        path = layout.shard_path(shard)
        assert (tmp_path / "ours" / path).read_bytes() == (tmp_path / "theirs" / path).read_bytes()
    assert len(list((tmp_path / "theirs").rglob("c/*"))) == layout.num_shards


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    metadata = copy.deepcopy(small_array("zstd").metadata())
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
        changed(["shape"], [0, 2, 3]),
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


def test_the_bytes_of_a_tiny_shard_are_those_of_the_first_release() -> None:
    # If this changes, stores of released versions cannot be resumed or read: a FORMAT break.
    layout = ArrayLayout("a", (3, 2), "float16", 4, 2)
    found = b"".join(bytes(part) for part in pack_shard(layout, np.arange(6, dtype=np.float16).reshape(3, 2)))
    rows = np.array([0, 1, 2, 3, 4, 5, np.nan, np.nan], "<f2").tobytes()
    index = np.array([0, 8, 8, 8], "<u8").tobytes()
    assert found == rows + index + crc32c(index)
