"""bfloat16 arrays are numbers in ``store.zarr``, and bits for a reader without leandit."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from noise_store import make_store
from repository import ROOT

from leandit.datasets.store import LatentStore


@pytest.mark.parametrize("codec", ["none", "blosc"])
def test_bfloat16_captions_are_numbers_in_the_zarr_of_a_store(codec: str, tmp_path: Path) -> None:
    counts = {"token_counts": [3, 5, 8], "text_width": 16, "text_dtype": "bfloat16"}
    make_store(tmp_path / "store", {"64x64": 9}, codec=codec, **counts)
    store = LatentStore(tmp_path / "store")
    text = store.text("")
    numbers: Any = store.zarr["captions/embeddings"]
    bits: Any = zarr.open_group(tmp_path / "store", mode="r")["captions/embeddings"]
    assert (numbers.dtype, bits.dtype, numbers.shape) == (np.float32, np.uint16, bits.shape)
    for caption in range(store.captions.num_rows):
        start, length = int(text.starts[caption]), int(text.lengths[caption])
        tokens = np.asarray(numbers[start : start + length])
        np.testing.assert_array_equal(tokens, np.asarray(text[caption], np.float32))
        np.testing.assert_array_equal(tokens.view(np.uint32) >> 16, bits[start : start + length])
    latents: Any = store.zarr[f"buckets/64x64/{store.spec.latent.array}"]
    assert latents.dtype == np.float16


def test_the_codec_is_registered_with_zarr_python_and_writes_what_it_reads(tmp_path: Path) -> None:
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["zarr.codecs"]
    ((name, target),) = entries.items()
    module, _, attribute = target.partition(":")
    codec = getattr(importlib.import_module(module), attribute)
    assert codec().to_dict() == {"name": name}
    zarr.registry.register_codec(name, codec)
    numbers = np.array([[1, -0.0, np.inf], [1 + 2**-8, 1 + 3 * 2**-8, np.nan]], np.float32)
    array: Any = zarr.create_array(
        tmp_path / "array", shape=(2, 3), chunks=(1, 3), dtype="float32", filters=[codec()], compressors=None
    )
    array[:] = numbers
    rounded = np.array([[1, -0.0, np.inf], [1, 1 + 2**-6, np.nan]], np.float32)  # ties go to the even neighbor
    np.testing.assert_array_equal(np.asarray(zarr.open_array(tmp_path / "array", mode="r")[:]), rounded)
    array[1] = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)  # NaN of other bits
    assert np.isnan(np.asarray(array[1])).all()
    assert (tmp_path / "array/c/0/0").stat().st_size == 3 * 2
    with pytest.raises(ValueError, match="expected float32"):
        zarr.create_array(tmp_path / "other", shape=(2,), dtype="int32", filters=[codec()])
    with pytest.raises(ValueError, match="expected none"):
        codec.from_dict({"name": name, "configuration": {"level": 3}})
