"""Tensors as a file of safetensors, in consecutive buffers: no copy of all of them is made.

Source: the README of safetensors, "Format". The bytes are those of ``safetensors.torch.save``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

BLOCK_BYTES = 16 << 20  # smaller tensors are joined up to it
HEADER_UNIT = 8  # bytes; the header is padded to a multiple


def parts_of(tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    """Consecutive buffers of a file; tensors that are not on the CPU are copied there one at a time.

    A buffer holds until the next one is asked for.
    """
    names_of_dtypes = _dtypes({tensor.dtype for tensor in tensors.values()})
    order = list(names_of_dtypes)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    entries, end = {}, 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        dtype = names_of_dtypes[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % HEADER_UNIT)
    block = bytearray(len(header).to_bytes(8, "little") + header)
    for name in names:
        content = _bytes_of(tensors[name])
        if len(block) + len(content) > BLOCK_BYTES:
            yield block
            block = bytearray()
        if len(content) < BLOCK_BYTES:
            block += content
        else:
            yield content
    if block:
        yield block


def _dtypes(dtypes: set[torch.dtype]) -> dict[torch.dtype, str]:
    """Dtypes in the order of their tensors in a file, with their names in its header."""
    by_name = {str(dtype): dtype for dtype in dtypes}
    sample = save({name: torch.zeros(1, dtype=dtype) for name, dtype in by_name.items()})
    header = json.loads(sample[8 : 8 + int.from_bytes(sample[:8], "little")])
    return {by_name[name]: entry["dtype"] for name, entry in header.items()}


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
