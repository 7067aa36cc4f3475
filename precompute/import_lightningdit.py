"""LightningDiT's safetensors shards: samples, those of the flipped pictures and labels, with statistics a channel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..datasets.errors import RecordRejected, SourceError
from ..datasets.writer import row_checksum
from .import_arrays import open_regular
from .import_config import ImportRecipe
from .import_source import Entry, Facts, Features, Reader, Seen, natural_order, rejecting, size_of
from .import_torch import read_tensors

LIGHTNING_DIT = Facts(
    latent="sample", is_scaled=False, vae="hustvl/vavae-imagenet256-f16d32-dinov2", downscale=16, scale=()
)
STATISTICS = "latents_stats.pt"
ARRAYS = ("latents", "latents_flip")
OPEN_SHARDS = 16
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "float32"}  # bfloat16 fits into float32 exactly


class LightningDit(Reader):
    """``*.safetensors`` with ``latents`` (N, C, H, W), ``latents_flip`` and ``labels`` (N,), and ``latents_stats.pt``.

    Raises: SourceError: there are no shards, or no statistics, without which the latents cannot be normalised.
    """

    facts = LIGHTNING_DIT

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        super().__init__(root, recipe)
        self._names = sorted((path.name for path in root.glob("*.safetensors")), key=natural_order)
        if not self._names:
            raise SourceError(f"source '{root}': no *.safetensors in it.")
        if not recipe.vae.scale:
            mean, std = read_statistics(root / STATISTICS)
            self.facts = replace(LIGHTNING_DIT, shift=mean, scale=tuple(1 / one for one in std))
        self._shard = lru_cache(maxsize=OPEN_SHARDS)(lambda name: Shard(root / name))

    def entries(self) -> Iterator[Entry]:
        """Rows of the shards in their order.

        Raises: SourceError: one cannot be opened, so nobody knows how many rows it had.
        """
        for name in self._names:
            stem, size = name.removesuffix(".safetensors"), size_of(self.root, name)
            try:
                rows = len(self._open(name))
            except RecordRejected as reject:
                raise SourceError(
                    f"source '{self.root}': shard '{name}' cannot be opened ({reject.detail}). Restore or remove it."
                ) from reject
            yield from (Entry(f"{stem}/{row}", name, row, size) for row in range(rows))

    def _open(self, name: str) -> Shard:
        with rejecting(name):
            return self._shard(name)

    def look(self, entry: Entry) -> Seen:
        """By the shard's header, and its labels."""
        shard = self._open(entry.path)
        return Seen(shard.shape, shard.dtype, has_flip=shard.has_flip, label=shard.label(entry.offset))

    def read(self, entry: Entry) -> Features:
        """A sample, and that of the flipped picture."""
        shard = self._open(entry.path)
        with rejecting(entry.path):
            arrays = shard.read(entry.offset)
        return Features(arrays, row_checksum(*arrays))


class Shard:
    """One file, opened; safetensors checks that its header fits the file.

    Raises: OSError, ValueError.
    """

    def __init__(self, path: Path) -> None:
        open_regular(path).close()  # anything else might never come to an end
        try:
            self._file: Any = safe_open(path, framework="pt")
            names = set(self._file.keys())
            self._arrays = [self._file.get_slice(name) for name in ARRAYS if name in names]
            if ARRAYS[0] not in names:
                raise ValueError(f"it has no tensor '{ARRAYS[0]}'")
            shapes = [tuple(array.get_shape()) for array in self._arrays]
            labels = self._file.get_tensor("labels").flatten() if "labels" in names else torch.empty(0)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        if len(set(shapes)) != 1 or len(shapes[0]) != 4 or len({array.get_dtype() for array in self._arrays}) != 1:
            raise ValueError(f"tensors of shapes {shapes}; needed (N, C, H, W)")
        self._rows, self.shape = shapes[0][0], shapes[0][1:]
        dtype: str = self._arrays[0].get_dtype()
        self.dtype, self.has_flip = DTYPES.get(dtype, dtype), len(shapes) == 2
        self._labels = labels.tolist() if not labels.is_floating_point() else []

    def __len__(self) -> int:
        return self._rows

    def label(self, row: int) -> int:
        """Of a row, -1 for none."""
        return self._labels[row] if len(self._labels) == self._rows else -1

    def read(self, row: int) -> list[np.ndarray]:
        """The arrays of a row, (C, H, W) each.

        Raises: ValueError.
        """
        try:
            found = [array[row : row + 1][0] for array in self._arrays]
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        return [(one.float() if one.dtype == torch.bfloat16 else one).numpy() for one in found]


def read_statistics(path: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel.

    Raises: SourceError: there are none.
    """
    try:
        loaded = read_tensors(path)
        mean, std = (loaded[name].double().flatten() for name in ("mean", "std"))
        if len(mean) != len(std) or not (torch.isfinite(mean).all() and torch.isfinite(std).all() and (std > 0).all()):
            raise ValueError(f"mean of {len(mean)} and std of {len(std)} numbers, or not finite and positive")
    except (OSError, RuntimeError, KeyError, TypeError, AttributeError, ValueError) as e:
        why = "there is none" if isinstance(e, FileNotFoundError) else f"{type(e).__name__}: {e}".splitlines()[0][:200]
        raise SourceError(
            f"source '{path.parent}': '{path.name}' cannot be read ({why}). The latents are normalised with its mean "
            "and std. Put it there, or say what to normalise with: --set vae.shift=[...] --set vae.scale=[...]."
        ) from e
    return tuple(mean.tolist()), tuple(std.tolist())
