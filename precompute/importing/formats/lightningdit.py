"""LightningDiT's safetensors shards: samples, those of the flipped images and labels, with statistics a channel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from ....datasets.revisions.writer import row_checksum
from ....errors import SourceError
from ...images.faults import open_regular
from ..recipe import ImportRecipe
from ..source import UNREADABLE, Entry, Features, FormatDefaults, Reader, RecordHeader, natural_order
from ..untrusted import read_tensors

STATISTICS = "latents_stats.pt"
ARRAYS = ("latents", "latents_flip")
OPEN_SHARDS = 16
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "float32"}  # bfloat16 fits into float32 exactly


class TensorFile(NamedTuple):
    """An open file: slices of its arrays, (N, C, H, W), and a label for each row, or none."""

    arrays: list[Any]
    rows: int
    shape: tuple[int, ...]
    dtype: str
    labels: list[int]


class LightningDit(Reader):
    """``*.safetensors`` with ``latents`` (N, C, H, W), ``latents_flip`` and ``labels`` (N,), and ``latents_stats.pt``.

    Raises: SourceError: no shards, or no statistics to normalize the latents with.
    """

    kind = "lightningdit"
    defaults = FormatDefaults("sample", is_scaled=False, vae="hustvl/vavae-imagenet256-f16d32-dinov2", downscale=16)

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        super().__init__(root, recipe)
        self._names = sorted((path.name for path in root.glob("*.safetensors")), key=natural_order)
        if not self._names:
            raise SourceError(f"source '{root}': it contains no *.safetensors.")
        if not recipe.vae.scale:
            mean, std = _statistics(root / STATISTICS)
            self.defaults = replace(self.defaults, shift=tuple(mean), scale=tuple(1 / one for one in std))
        self._open = lru_cache(maxsize=OPEN_SHARDS)(lambda name: _open(root / name))

    def entries(self) -> Iterator[Entry]:
        """Rows of the shards in order.

        Raises: SourceError: a shard cannot be opened, so its number of rows is unknown.
        """
        for name in self._names:
            with self.needing(name, "Restore or remove it."):
                rows = self._open(name).rows
            stem, num_bytes = name.removesuffix(".safetensors"), self.file_entry(name).num_bytes
            yield from (Entry(f"{stem}/{row}", name, row, num_bytes) for row in range(rows))

    def _header(self, entry: Entry) -> RecordHeader:
        shard = self._open(entry.path)
        label = shard.labels[entry.offset] if shard.labels else -1
        return RecordHeader(shard.shape, shard.dtype, has_flip=len(shard.arrays) == 2, label=label)

    def _values(self, entry: Entry) -> Features:
        row = entry.offset
        tensors = [array[row : row + 1][0] for array in self._open(entry.path).arrays]
        arrays = [(tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy() for tensor in tensors]
        return arrays, row_checksum(*arrays)


def _open(path: Path) -> TensorFile:
    """Open a file; safetensors checks that its header fits it. Raises OSError, SafetensorError, ValueError."""
    open_regular(path).close()
    file: Any = safe_open(path, framework="pt")
    names = set(file.keys())
    if ARRAYS[0] not in names:
        raise ValueError(f"it has no tensor '{ARRAYS[0]}'")
    arrays = [file.get_slice(name) for name in ARRAYS if name in names]
    shapes, dtypes = [tuple(array.get_shape()) for array in arrays], {str(array.get_dtype()) for array in arrays}
    if len(set(shapes)) != 1 or len(shapes[0]) != 4 or len(dtypes) != 1:
        raise ValueError(f"tensors of shapes {shapes}; expected (N, C, H, W)")
    (rows, *shape), dtype = shapes[0], dtypes.pop()
    labels = file.get_tensor("labels").flatten() if "labels" in names else torch.empty(0)
    has_labels = len(labels) == rows and not labels.is_floating_point()
    return TensorFile(arrays, rows, tuple(shape), DTYPES.get(dtype, dtype), labels.tolist() if has_labels else [])


def _statistics(path: Path) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel; raises SourceError."""
    try:
        loaded = read_tensors(path)
        mean, std = (loaded[name].double().flatten() for name in ("mean", "std"))
        if len(mean) != len(std) or not (torch.isfinite(mean).all() and torch.isfinite(std).all() and (std > 0).all()):
            raise ValueError(f"mean of {len(mean)} and std of {len(std)} numbers, or not finite and positive")
    except (*UNREADABLE, TypeError, AttributeError) as e:
        why = "it is missing" if isinstance(e, FileNotFoundError) else f"{type(e).__name__}: {e}".splitlines()[0][:200]
        raise SourceError(
            f"source '{path.parent}': '{path.name}' cannot be read ({why}). The latents are normalized with its mean "
            "and std. Put it there: LightningDiT's ImgLatentDataset writes it when it first opens the folder. Or say "
            "what to normalize with: --set vae.shift=[MEAN, ...] --set vae.scale=[1/STD, ...], one number per channel, "
            "or [0.0] and [1.0] for raw latents, which a run normalizes with --set latent.normalise=store."
        ) from e
    return mean.tolist(), std.tolist()
