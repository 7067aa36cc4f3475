"""Weights of a DiT for another patch size.

Both layers that know the patch are linear maps of its pixels, so they are resized with the bilinear map B from the old
patch to the new one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

INPUT, OUTPUT = "x_embedder.proj.weight", "final_layer.linear"


def with_patches(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with patch embedding and output layer of the sizes of the model; all others are left as they are.

    Args:
      weights: of a DiT in the official layout.
      wanted: tensors of the model, of which only shapes are used.
    Source: Beyer et al. 2022 (FlexiViT), arXiv 2212.08013, section 3.4: a token of a resized patch stays what it was.
      The output patch is resized with the same map.
    """
    if not all(name in weights and name in wanted for name in (INPUT, f"{OUTPUT}.weight", f"{OUTPUT}.bias")):
        return dict(weights)
    old, new = weights[INPUT].shape[-1], wanted[INPUT].shape[-1]
    if old == new:
        return dict(weights)
    resize = bilinear_map(old, new)  # (new * new, old * old)
    embedding = weights[INPUT].double().flatten(2) @ torch.linalg.pinv(resize)  # (E, C, new * new)
    resized = {INPUT: embedding.unflatten(2, (new, new))}
    for name in (f"{OUTPUT}.weight", f"{OUTPUT}.bias"):
        rows = weights[name].double().unflatten(0, (old * old, -1))  # the channel last
        resized[name] = torch.tensordot(resize, rows, dims=1).flatten(0, 1)
    return {**weights, **{name: tensor.to(weights[name].dtype) for name, tensor in resized.items()}}


def bilinear_map(old: int, new: int) -> Tensor:
    """(new * new, old * old) float64: the bilinear resize of a patch, with antialiasing where it shrinks."""
    pixels = torch.eye(old * old, dtype=torch.float64).view(1, old * old, old, old)
    resized = F.interpolate(pixels, (new, new), mode="bilinear", antialias=new < old, align_corners=False)
    return resized[0].flatten(1).T
