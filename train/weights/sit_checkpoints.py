"""Checkpoints of SiT and LightningDiT, whose layout is DiT's but for what is converted here.

Source: SiT, arXiv 2401.08740; LightningDiT, arXiv 2501.01423, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...datasets.errors import RunError
from ..models.dit import size_of
from ..models.spec import ModelSpec

OUTPUT = "final_layer.linear"
MODULATED_NORMS = {"norm1": 1, "norm2": 4, "norm_final": 1}  # to the place of their scale in the modulation


def without_variance(weights: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Weights without the outputs that SiT computes for a variance and never uses.

    The output layer has (p * p * 2C) rows, the channel last; the second C are left out.
    """
    kept = dict(weights)
    for name in (f"{OUTPUT}.weight", f"{OUTPUT}.bias"):
        rows = weights[name].unflatten(0, (-1, 2 * spec.channels)) if _is_doubled(weights, name, spec) else None
        if rows is not None:
            kept[name] = rows[:, : spec.channels].flatten(0, 1)
    return kept


def _is_doubled(weights: Mapping[str, Tensor], name: str, spec: ModelSpec) -> bool:
    """Whether an output layer is twice as large as that of the patch embedding's inputs."""
    if name not in weights or "x_embedder.proj.weight" not in weights:
        return False
    return spec.out_channels == spec.channels and len(weights[name]) == 2 * weights["x_embedder.proj.weight"][0].numel()


def from_lightningdit(weights: Mapping[str, Tensor], spec: ModelSpec, source: str) -> dict[str, Tensor]:
    """The same function without gains of norms and with our order of rotated pairs; other DiTs are left as they are.

    A gain g before a modulation is part of it: g * x * (1 + s) + b = x * (1 + (g * (1 + s) - 1)) + b. Queries and keys
    are rotated in pairs of neighbours there, rows first; here in pairs of halves, columns first. A permutation of both
    changes no product of the two.

    Only its RMS norms have gains, so a file without them is of one with layer norms.

    Raises: RunError: the model has other norms or positions, or its modulations no shift.
    """
    _check_shift(weights, source)
    has_rotation = any(name.startswith("feat_rope.") for name in weights)
    has_gains = any(name.endswith("norm1.weight") for name in weights)
    if not has_rotation and not has_gains:
        return dict(weights)
    norm, positions = "rms" if has_gains else "layer", "both" if has_rotation else "sincos"
    if (spec.options.norm, spec.options.positions) != (norm, positions):
        raise RunError(
            f"model.init_from '{source}': a LightningDiT with {'RMS' if has_gains else 'layer'} norms and "
            f"{'rotary' if has_rotation else 'added'} positions. Use --set model.norm={norm} --set "
            f"model.positions={positions} --set model.time=to_data; the recipe lightningdit-xl-1-256 has the rest."
        )
    num_heads = size_of(spec.name)[2]
    converted = {name: tensor for name, tensor in weights.items() if not name.startswith("feat_rope.")}
    for name in list(converted):
        module, _, part = name.rpartition(".")
        parent, _, norm = module.rpartition(".")
        if norm in MODULATED_NORMS and part == "weight":
            _fold_gain(converted, parent, converted.pop(name), MODULATED_NORMS[norm])
        elif has_rotation and ".attn." in name and module.endswith(("qkv", "q_norm", "k_norm")):
            converted[name] = _in_our_order(converted[name], num_heads, fused=module.endswith("qkv"))
    return converted


def _check_shift(weights: Mapping[str, Tensor], source: str) -> None:
    """Raise RunError if the modulations of a block are scale and gate alone (LightningDiT's ``wo_shift``)."""
    modulation, embedding = weights.get("blocks.0.adaLN_modulation.1.bias"), weights.get("x_embedder.proj.bias")
    if modulation is not None and embedding is not None and len(modulation) == 4 * len(embedding):
        raise RunError(
            f"model.init_from '{source}': a LightningDiT with wo_shift = true, whose blocks have modulations of 4 "
            "vectors, scale and gate. Only blocks with 6 are supported: shift, scale and gate (wo_shift = false)."
        )


def _fold_gain(weights: dict[str, Tensor], parent: str, gain: Tensor, scale: int) -> None:
    """Multiply the scale of a modulation, and the 1 that is added to it, by the gain of the norm before it."""
    for part in ("weight", "bias"):
        name = f"{parent}.adaLN_modulation.1.{part}"
        chunks = list(weights[name].float().unflatten(0, (-1, len(gain))).unbind())
        if part == "weight":
            chunks[scale] = gain.float()[:, None] * chunks[scale]
        else:
            chunks[scale] = gain.float() * (1 + chunks[scale]) - 1
        weights[name] = torch.cat(chunks)


def _in_our_order(tensor: Tensor, num_heads: int, *, fused: bool) -> Tensor:
    """Permute the entries of each head of queries and keys: (row, column) x pair x 2 to (column, row) x 2 x pair.

    Args:
      tensor: rows of the fused projection of queries, keys and values, or the gain of a head.
    """
    width = len(tensor) // (3 * num_heads if fused else 1)
    order = torch.arange(width).view(2, -1, 2).flip(0).transpose(1, 2).flatten()
    if not fused:
        return tensor[order]
    heads = tensor.unflatten(0, (3, num_heads, width))
    return torch.stack([heads[0][:, order], heads[1][:, order], heads[2]]).flatten(0, 2)
