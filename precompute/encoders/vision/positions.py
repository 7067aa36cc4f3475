"""Trained positions of a vision transformer, resampled for grids of other sizes.

Bicubic with antialiasing, as timm's ``resample_abs_pos_embed``, which REPA uses; transformers' own resampling differs
from one model to another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import interpolate

from ....datasets.errors import EncoderError
from .families import Family


def resample_positions(model: Any, family: Family, where: str) -> None:
    """Make a model resample its positions as ``resampled`` does, whatever its own class does.

    Raises: EncoderError: the trained positions are not a square.
    """
    embeddings = next(module for module in model.modules() if hasattr(module, "interpolate_pos_encoding"))
    trained = embeddings.get_parameter(family.positions)
    # On a CPU, so that positions do not depend on the device.
    trained = trained.detach().float().cpu().reshape(-1, trained.shape[-1])  # (prefix + T, D)
    num_prefix, patch_px = int(family.has_class_token), model.config.patch_size
    if math.isqrt(len(trained) - num_prefix) ** 2 != len(trained) - num_prefix:
        raise EncoderError(f"{where}: its {len(trained)} positions are not those of a square, which is needed.")
    embeddings.interpolate_pos_encoding = _resampler(trained, num_prefix, patch_px)


def _resampler(trained: torch.Tensor, num_prefix: int, patch_px: int) -> Callable[..., torch.Tensor]:
    by_grid: dict[tuple[int, int], torch.Tensor] = {}

    def positions(embeddings: torch.Tensor, height_px: int, width_px: int) -> torch.Tensor:
        grid = (height_px // patch_px, width_px // patch_px)
        if grid not in by_grid:
            by_grid[grid] = resampled(trained, num_prefix, grid)[None].to(embeddings.device)
        return by_grid[grid].to(embeddings.dtype)

    return positions


def resampled(trained: torch.Tensor, num_prefix: int, grid: tuple[int, int]) -> torch.Tensor:
    """Positions of another grid: bicubic with antialiasing; those before the patches stay.

    Args:
      trained: (num_prefix + S * S, D) float32.
      grid: rows and columns.
    Returns: (num_prefix + rows * columns, D) float32.
    """
    side = math.isqrt(len(trained) - num_prefix)
    square = trained[num_prefix:].T.reshape(1, -1, side, side)
    other = interpolate(square, grid, mode="bicubic", antialias=True)
    return torch.cat([trained[:num_prefix], other[0].flatten(1).T])
