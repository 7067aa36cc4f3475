"""bfloat16 rows as numbers for zarr-python and xarray: a codec extension of Zarr v3, and a view of a store with it.

On disk a bfloat16 array is its bits in uint16, so that readers without leandit open it. ``NumbersStore`` presents the
same chunks as float32 through the codec ``leandit.bfloat16``, which the package registers with zarr-python. int8 tokens
stay integers: their scales are another array, which no codec of a chunk can see.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from zarr.abc.codec import ArrayArrayCodec
from zarr.dtype import Float32, UInt16
from zarr.registry import register_codec
from zarr.storage import LocalStore, WrapperStore

from .token_dtypes import BFLOAT16_NAN, StoredTokens, narrow, widen

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer, BufferPrototype, NDBuffer
    from zarr.core.chunk_grids import ChunkGrid
    from zarr.core.dtype.wrapper import ZDType

BFLOAT16 = "leandit.bfloat16"
METADATA = "zarr.json"


@dataclass(frozen=True)
class Bfloat16Codec(ArrayArrayCodec):
    """Stores float32 numbers as the bits of the nearest bfloat16, ties to even; read back, they are exact."""

    is_fixed_size = True

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Bfloat16Codec:
        """Of the JSON of an array. Raises: ValueError: it has a configuration."""
        if data.get("configuration"):
            raise ValueError(f"codec {BFLOAT16}: configuration {data['configuration']}, expected none")
        return cls()

    def to_dict(self) -> dict[str, Any]:
        """As in the JSON of an array."""
        return {"name": BFLOAT16}

    def validate(self, *, shape: tuple[int, ...], dtype: ZDType[Any, Any], chunk_grid: ChunkGrid) -> None:
        """Check the array. Raises: ValueError: its numbers are not float32."""
        if not isinstance(dtype, Float32):
            raise ValueError(f"codec {BFLOAT16}: data type {dtype}, expected float32")

    def resolve_metadata(self, chunk_spec: ArraySpec) -> ArraySpec:
        """The chunk as the next codec sees it: uint16."""
        fill_value = _bits_of(np.array([chunk_spec.fill_value], np.float32))[0]
        return replace(chunk_spec, dtype=UInt16(), fill_value=fill_value)

    def compute_encoded_size(self, input_byte_length: int, _chunk_spec: ArraySpec) -> int:
        """Bytes after encoding: half of them."""
        return input_byte_length // 2

    async def _decode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        bits = chunk_array.as_numpy_array()
        return type(chunk_array).from_numpy_array(widen(StoredTokens(bits, None), "bfloat16"))

    async def _encode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        return type(chunk_array).from_numpy_array(_bits_of(chunk_array.as_numpy_array()))


def _bits_of(numbers: np.ndarray) -> np.ndarray:
    """The bits of float32 numbers as bfloat16, uint16; any NaN is the quiet one, which rounding cannot change."""
    return np.where(np.isnan(numbers), np.uint16(BFLOAT16_NAN), narrow(numbers, "bfloat16").rows)


class NumbersStore(WrapperStore[LocalStore]):
    """The files of a store for zarr-python, with bfloat16 arrays as float32.

    Args:
      root: the store.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(LocalStore(root, read_only=True))
        register_codec(BFLOAT16, Bfloat16Codec)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Bytes of a file; of the metadata of a bfloat16 array, those of a float32 array with the codec."""
        content = await super().get(key, prototype, byte_range)
        if content is None or key.rpartition("/")[2] != METADATA:
            return content
        metadata = json.loads(content.to_bytes())
        if metadata.get("attributes", {}).get("bits_of") != "bfloat16":
            return content
        sharding = metadata["codecs"][0]["configuration"]
        sharding["codecs"] = [{"name": BFLOAT16}, *sharding["codecs"]]
        metadata |= {"data_type": "float32", "fill_value": "NaN", "attributes": {}}
        return prototype.buffer.from_bytes(json.dumps(metadata).encode())
