"""The frozen weights that adapters belong to: recorded by source and hash, and merged with the adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ...datasets.disk.hashing import xxh3_parts
from ..models.diffusers.adapters import DOWN, UP


class FrozenWeights(BaseModel):
    """Which weights adapters were trained on.

    Args:
      source: as ``model.init_from``: a snapshot of a run, a folder, or a hub id.
      xxh3_128: of all names, shapes and values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    xxh3_128: str


def hash_of(weights: Mapping[str, Tensor]) -> str:
    """XXH3-128 of weights on the CPU, with their names and shapes."""

    def parts() -> Iterator[bytes | np.ndarray]:
        for name, tensor in sorted(weights.items()):
            yield f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
            yield np.ascontiguousarray(tensor.numpy())

    return xxh3_parts(parts())[1]


def merge(weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Weights with the products of adapters added: W + scale * B A.

    Args:
      weights: by name, in a model without adapters.
      adapters: A and B, by the names of a model with them.
    """
    merged = dict(weights)
    for name, down in adapters.items():
        if name.endswith(DOWN):
            layer = name.removesuffix(DOWN)
            merged[f"{layer}.weight"] = weights[f"{layer}.weight"] + scale * (adapters[layer + UP] @ down)
    return merged
