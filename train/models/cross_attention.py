"""Cross-attention of image tokens to the tokens of their captions, in two forms of one function.

``Packed``: the tokens of all captions one after the other, as batches bring them, for variable-length flash attention.
``Padded``, where that is missing: a boolean mask that all heads share.

Shapes: B batch, T image tokens, n caption tokens of the batch, L of its longest caption, h heads, d width of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...datasets.batches.captions import Captions

MAX_HEAD_WIDTH = 256  # of flash attention
USUAL_TOKENS = 512  # text encoders give at most so many for a caption


class Padded(NamedTuple):
    """Captions followed by padding; ``mask`` (B, 1, 1, L) bool is true for real tokens."""

    mask: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of (B, T, h, d) to (B, L, h, d); (B, T, h, d)."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2)


class Packed(NamedTuple):
    """Captions one after the other.

    Args:
      offsets: (B + 1,) int32 where each caption begins, then the end.
      longest: no caption has more tokens.
    """

    offsets: Tensor
    longest: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of (B, T, h, d) to (n, h, d); (B, T, h, d)."""
        from torch.nn.attention import varlen

        batch, tokens = q.shape[:2]
        q_offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * tokens
        attended: Any = varlen.varlen_attn(q.flatten(0, 1), k, v, q_offsets, self.offsets, tokens, self.longest)
        return attended.view(q.shape)


CaptionLayout = Padded | Packed


def arrange_captions(captions: Captions, head_width: int) -> tuple[Tensor, CaptionLayout]:
    """Captions of at least one token each, in the fastest form of their device.

    Args:
      head_width: d of the cross-attention.
    Returns: tokens (n, D), or (B, L, D) padded; their layout.
    """
    if not has_varlen(captions.tokens, head_width):
        return captions.padded, Padded(captions.mask[:, None, None])
    longest = 1 << (max(captions.lengths) - 1).bit_length()  # few values, since each is compiled
    return captions.tokens, Packed(captions.offsets, max(USUAL_TOKENS, longest))


def has_varlen(x: Tensor, head_width: int) -> bool:
    """Whether variable-length flash attention is available: a GPU from Ampere on, and 16 bits."""
    if x.device.type != "cuda" or head_width > MAX_HEAD_WIDTH or not torch.cuda.is_available():
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(x.device) >= (8, 0)
