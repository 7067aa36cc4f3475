"""The supported vision transformers, of a checkpoint of two towers its vision part alone, and their positions.

Trained positions are resampled for grids of other sizes: bicubic with antialiasing, as timm's
``resample_abs_pos_embed``, which REPA uses; transformers' own resampling differs from one model to another.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import interpolate

from ....errors import EncoderError

PREPROCESSOR = "preprocessor_config.json"
GREY_LEVELS = 255


@dataclass(frozen=True)
class Family:
    """A kind of vision model.

    Args:
      class_name: in transformers; for a checkpoint of two towers, that of its vision part.
      has_class_token: before all other tokens.
      positions: name of the trained positions in its embeddings; empty if they are rotary.
      options: of a forward, so that positions are resampled.
    """

    class_name: str
    has_class_token: bool
    positions: str
    options: dict[str, Any] = field(default_factory=dict)


RESAMPLED = {"interpolate_pos_encoding": True}
CLIP = Family("CLIPVisionModel", True, "position_embedding.weight", RESAMPLED)
# Its embeddings lie in the space that CLIP's images and captions share; CMMD is defined on them.
CLIP_EMBEDDING = replace(CLIP, class_name="CLIPVisionModelWithProjection")
SIGLIP = Family("SiglipVisionModel", False, "position_embedding.weight", RESAMPLED)
FAMILIES = {  # by the model_type of config.json
    "dinov2": Family("Dinov2Model", True, "position_embeddings"),
    "dinov2_with_registers": Family("Dinov2WithRegistersModel", True, "position_embeddings"),
    "dinov3_vit": Family("DINOv3ViTModel", True, ""),
    "siglip": SIGLIP,
    "siglip_vision_model": SIGLIP,
    "clip": CLIP,
    "clip_vision_model": CLIP,
}


def family_of(config: dict[str, Any], where: str) -> Family:
    """The family of a model by its config.json.

    Raises: EncoderError: no vision model that is supported here.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise EncoderError(f"{where}: its config.json says '{str(kind)[:80]}', expected one of {', '.join(FAMILIES)}.")
    if not isinstance(config.get("vision_config", {}), dict):
        raise EncoderError(f"{where}: 'vision_config' of its config.json is not an object. Fetch the model again.")
    return FAMILIES[kind]


def blocks_of(model: Any) -> Any:
    """The blocks of a vision transformer, in order: its outermost list of modules."""
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


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
        raise EncoderError(f"{where}: its {len(trained)} positions do not form a square grid.")
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


def normalisation(preprocessor: dict[str, Any], where: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, for pixels from 0 to 1.

    Args:
      preprocessor: of its preprocessor_config.json.
    Raises: EncoderError: absent, or pixels have another range.
    """
    numbers = []
    for key in ("image_mean", "image_std"):
        values = preprocessor.get(key)
        if not isinstance(values, list) or len(values) != 3 or not all(map(_is_finite, values)):
            raise EncoderError(
                f"{where}: '{key}' of its {PREPROCESSOR} is {str(values)[:80]}, expected three numbers: the ones that "
                "it was trained with."
            )
        numbers.append([float(value) for value in values])
    if min(numbers[1]) <= 0:
        raise EncoderError(f"{where}: 'image_std' of its {PREPROCESSOR} is {numbers[1]}, expected numbers above 0.")
    factor = preprocessor.get("rescale_factor", 1 / GREY_LEVELS)
    if not _is_finite(factor) or not math.isclose(factor, 1 / GREY_LEVELS, rel_tol=1e-3):
        raise EncoderError(
            f"{where}: 'rescale_factor' of its {PREPROCESSOR} is {str(factor)[:80]}, expected 1/255. Models that take "
            "pixels in another range are not supported."
        )
    if off := [key for key in ("do_rescale", "do_normalize") if preprocessor.get(key, True) is not True]:
        raise EncoderError(
            f"{where}: '{off[0]}' of its {PREPROCESSOR} is {str(preprocessor[off[0]])[:80]}, expected true."
        )
    return numbers[0], numbers[1]


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # an int may be larger than any float
