"""Pictures as the input of a network: squares of one side, as float32 from 0 to 255.

"antialiased" is bicubic, with the filter as wide as the picture is reduced, as Pillow has it; values are not rounded.
"tensorflow" is the bilinear resize of TensorFlow 1, without a filter and with corners that do not correspond: it is
part of the Inception graph that ADM's evaluator and the original FID run.

Source: Parmar et al. 2022, "On Aliased Resizing and Surprising Subtleties in GAN Evaluation" (clean-fid).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

Resize = Literal["antialiased", "tensorflow"]
WHITE = 255.0


def squares(
    pictures: Sequence[np.ndarray], side_px: int, device: torch.device, *, resize: Resize = "antialiased"
) -> Tensor:
    """Pictures squeezed to squares; (B, 3, side_px, side_px) float32, 0 to 255.

    Each picture is resized alone, so it does not depend on the batch that it is in.

    Args:
      pictures: (height, width, 3) uint8 each, of any sizes.
    """
    resized = antialiased if resize == "antialiased" else tensorflow_bilinear
    planes = (torch.from_numpy(np.array(picture)).to(device).permute(2, 0, 1).float() for picture in pictures)
    return torch.stack([resized(picture, side_px) for picture in planes])


def antialiased(picture: Tensor, side_px: int) -> Tensor:
    """Bicubic with antialiasing; (3, height, width) to (3, side_px, side_px)."""
    size = (side_px, side_px)
    return interpolate(picture[None], size, mode="bicubic", antialias=True, align_corners=False)[0].clamp(0, WHITE)


def tensorflow_bilinear(picture: Tensor, side_px: int) -> Tensor:
    """TensorFlow 1's ``resize_bilinear`` with ``align_corners=False``; (3, height, width) to (3, side_px, side_px)."""
    for axis in (1, 2):
        length = picture.shape[axis]
        places = torch.arange(side_px, dtype=torch.float32, device=picture.device) * (length / side_px)
        low = places.long()
        high = (low + 1).clamp(max=length - 1)
        share = (places - low).unsqueeze(1) if axis == 1 else places - low
        first, second = picture.index_select(axis, low), picture.index_select(axis, high)
        picture = first + (second - first) * share
    return picture


def centre_square(picture: np.ndarray) -> np.ndarray:
    """The largest square in the middle of a picture (height, width, 3)."""
    height, width = picture.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return picture[top : top + side, left : left + side]
