"""The block of diffusers' PixArt and Sana, computed our way. Shapes as in ``cross_attention.py``."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from ..cross_attention import CaptionLayout
from ..layers import add_gated, modulate
from ..numerics import at_least_float32, without_autocast


def compute_our_way(block: nn.Module) -> None:
    """Replace the forward of a block; its parameters keep their names."""
    block.__class__ = _with_forward(type(block))


@functools.cache
def _with_forward(plain: type[nn.Module]) -> type[nn.Module]:
    return type(plain.__name__, (plain,), {"forward": text_block})


def text_block(
    block: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: CaptionLayout | None = None,
    timestep: Tensor | None = None,
    height: int | None = None,
    width: int | None = None,
    **unused: Any,
) -> Tensor:
    """Self-attention, cross-attention without a norm before it, feed-forward; modulated by time.

    diffusers' function. Its residual stream becomes float32 at the first gate, because the table is; here it keeps the
    dtype that it has, and each sum is rounded once.

    Args:
      hidden_states: (B, T, E).
      encoder_hidden_states, encoder_attention_mask: captions (B, L, E) and their layout.
      timestep: (B, 6E) shifts, scales and gates of attention and of the feed-forward, before the block's own table.
      height, width: of the grid of tokens, for a feed-forward of convolutions (Sana).
    Returns: (B, T, E).
    Source: Chen et al. 2023, arXiv 2310.00426, section 2.3 (adaLN-single).
    """
    assert timestep is not None
    x = hidden_states
    modulation = block.scale_shift_table + at_least_float32(timestep).unflatten(1, (6, -1))  # (B, 6, E)
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation.unbind(1)
    x = add_gated(x, gate_msa, block.attn1(modulate(_norm(block.norm1, x), shift_msa, scale_msa)))
    x = x + block.attn2(x, encoder_hidden_states, encoder_attention_mask).to(x.dtype)
    modulated = modulate(_norm(block.norm2, x), shift_mlp, scale_mlp)
    if height is None or width is None:
        return add_gated(x, gate_mlp, block.ff(modulated))
    images = block.ff(modulated.unflatten(1, (height, width)).permute(0, 3, 1, 2))  # (B, E, rows, columns)
    return add_gated(x, gate_mlp, images.flatten(2).transpose(1, 2))


def _norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """In the dtype of the stream, unless the norm has weights: see ``TokenNorm``."""
    if norm.weight is not None:
        return norm(x)
    with without_autocast(x.device):
        return norm(x)
