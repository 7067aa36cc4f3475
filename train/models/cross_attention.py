"""Cross-attention of image tokens to the real tokens of their captions; padding is ignored.

Two forms of one function. ``Padded``: a boolean mask that all heads share. ``Packed``: the real tokens of all captions
one after the other, for variable-length flash attention, which computes nothing for padding. Shapes: B batch, T image
tokens, L caption tokens, h heads, d width of a head, D width of the captions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_HEAD_WIDTH = 256  # of flash attention
USUAL_TOKENS = 512  # text encoders give at most so many for a caption
Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]


class Padded(NamedTuple):
    """Captions followed by padding.

    Args:
      mask: (B, 1, 1, L) bool, true for real tokens.
    """

    mask: Tensor

    @property
    def ndim(self) -> int:
        """Of the mask: diffusers turns masks of two dimensions into a bias, and leaves others alone."""
        return self.mask.ndim

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of (B, T, h, d) to (B, L, h, d); (B, T, h, d)."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2)


class Packed(NamedTuple):
    """Captions with the real tokens of the whole batch first.

    Args:
      offsets: (B + 1,) int32 where each caption starts, and where the last one ends.
      longest: no caption has more tokens; the exact maximum would wait for the GPU.
    """

    offsets: Tensor
    longest: int

    @property
    def ndim(self) -> int:
        """Of the offsets; see ``Padded.ndim``."""
        return self.offsets.ndim

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, varlen: Varlen | None = None) -> Tensor:
        """Attention of (B, T, h, d) to the first ``offsets[-1]`` of B * K keys and values, (B, K, h, d).

        Args:
          varlen: variable-length attention; None: torch's.
        Returns: (B, T, h, d).
        """
        if varlen is None:
            from torch.nn.attention.varlen import varlen_attn

            varlen = cast(Varlen, varlen_attn)
        batch, tokens = q.shape[:2]
        k, v = k.flatten(0, 1), v.flatten(0, 1)  # (B * K, h, d)
        # The backward kernel leaves gradients of padding uninitialised: they must not reach the projection.
        real = (torch.arange(len(k), device=k.device) < self.offsets[-1])[:, None, None]
        k, v = torch.where(real, k, 0), torch.where(real, v, 0)
        q_offsets = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=q.device)
        attended: Tensor = varlen(q.flatten(0, 1), k, v, q_offsets, self.offsets, tokens, self.longest)
        return attended.view(q.shape)


CaptionLayout = Padded | Packed


def arrange_captions(
    captions: Tensor, mask: Tensor, *, head_width: int, mean_tokens: int | None = None
) -> tuple[Tensor, CaptionLayout]:
    """Captions in the fastest layout of their device.

    Args:
      captions: (B, L, D).
      mask: (B, L) true for real tokens; at least one in each row.
      head_width: d of the cross-attention.
      mean_tokens: at least the mean of the captions' real tokens; None: unknown.
    Returns: captions (B, L, D), or (B, mean_tokens, D) with the real tokens first if packed; their layout.
    """
    mask = mask.bool()
    if has_varlen(captions, head_width):
        return pack_captions(captions, mask, mean_tokens)
    return captions, Padded(mask[:, None, None, :])


def has_varlen(x: Tensor, head_width: int) -> bool:
    """Whether variable-length flash attention is available: a GPU from Ampere on, and 16 bits."""
    if x.device.type != "cuda" or head_width > MAX_HEAD_WIDTH or not torch.cuda.is_available():
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(x.device) >= (8, 0)


def pack_captions(captions: Tensor, mask: Tensor, mean_tokens: int | None = None) -> tuple[Tensor, Packed]:
    """Move the real tokens of all captions to the front, in order; what is beyond ``mean_tokens`` an image is padding.

    The shape does not depend on the mask, so nothing waits for the device.

    Returns: (B, mean_tokens, D), to be read as rows of D; the layout.
    """
    images, length, width = captions.shape
    tokens = min(mean_tokens or length, length)
    order = torch.argsort((~mask).flatten().byte(), stable=True)[: images * tokens]
    ends = mask.sum(1).cumsum(0).int()
    packed = captions.flatten(0, 1).index_select(0, order).view(images, tokens, width)
    longest = max(USUAL_TOKENS, 1 << (length - 1).bit_length())  # few values, since each is compiled
    return packed, Packed(F.pad(ends, (1, 0)), longest)
