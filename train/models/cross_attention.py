"""Cross-attention of image tokens to the real tokens of their captions; padding is never looked at.

Two forms of one function. Padded: a boolean mask that all heads share. Packed: the real tokens of all captions one
after the other, for variable-length flash attention, which computes nothing for padding. Which one it is stands in
``where``: a mask (B, 1, 1, L), or offsets (B + 1,). Shapes: B batch, T image tokens, L caption tokens, h heads, d width
of a head, D width of the captions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .numerics import at_least_float32, without_autocast

MAX_HEAD_WIDTH = 256  # of flash attention
LINEAR_EPS = 1e-15  # of the sums of linear attention, as diffusers has it
Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]


def arrange_captions(captions: Tensor, mask: Tensor, *, head_width: int) -> tuple[Tensor, Tensor]:
    """Captions in the form that the device is fastest with, and where their real tokens are.

    Args:
      captions: (B, L, D), as the model is given them.
      mask: (B, L) true for real tokens; at least one in each row.
      head_width: d of the attention that will look at them.
    Returns: captions (B, L, D), in the packed form with the real tokens first; ``where`` for ``attend``.
    """
    mask = mask.bool()
    if has_varlen(captions, head_width):
        return pack_captions(captions, mask)
    return captions, mask[:, None, None, :]


def has_varlen(x: Tensor, head_width: int) -> bool:
    """Variable-length flash attention is to be had: a GPU from Ampere on, and 16 bits."""
    if x.device.type != "cuda" or head_width > MAX_HEAD_WIDTH or not torch.cuda.is_available():
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(x.device) >= (8, 0)


def pack_captions(captions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Put the real tokens of all captions first, in order; the shape stays, so that nothing waits for their number.

    Returns: (B, L, D), to be read as (B * L, D); (B + 1,) int32 where each caption begins, and the last ends.
    """
    order = torch.argsort((~mask).flatten().byte(), stable=True)
    ends = mask.sum(1).cumsum(0).int()
    packed = captions.flatten(0, 1).index_select(0, order).view_as(captions)
    return packed, F.pad(ends, (1, 0))


def attend(q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    """Attention of (B, T, h, d) to (B, L, h, d); ``where`` says in which form."""
    return attend_padded(q, k, v, where) if where.ndim == 4 else attend_packed(q, k, v, where)


def attend_padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """With a mask (B, 1, 1, L), true for real tokens; (B, T, h, d)."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, varlen: Varlen | None = None) -> Tensor:
    """With keys and values of which the first ``offsets[-1]`` of B * L are real; (B, T, h, d).

    Args:
      varlen: variable-length attention; torch's own if None.
    """
    if varlen is None:
        from torch.nn.attention.varlen import varlen_attn

        varlen = cast(Varlen, varlen_attn)
    batch, tokens = q.shape[:2]
    k_longest = k.shape[1]  # an upper bound is enough, and nobody waits for the GPU to know the longest
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # (B * L, h, d)
    # Nobody looks at the rest, so the backward kernel leaves its gradient unset: it must not reach the projection.
    real = (torch.arange(len(k), device=k.device) < offsets[-1])[:, None, None]
    k, v = torch.where(real, k, 0), torch.where(real, v, 0)
    q_offsets = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=q.device)
    attended: Tensor = varlen(q.flatten(0, 1), k, v, q_offsets, offsets, tokens, k_longest)
    return attended.view(q.shape)


class CaptionProcessor:
    """Cross-attention of diffusers' PixArt and Sana in these forms.

    diffusers makes a bias of -10000 of the mask and repeats it for each head, which keeps flash attention away.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """(B, T, E) and (B, L, E) to (B, T, E)."""
        assert encoder_hidden_states is not None
        assert attention_mask is not None
        q, k, v = attn.to_q(hidden_states), attn.to_k(encoder_hidden_states), attn.to_v(encoder_hidden_states)
        if attn.norm_q is not None:  # over all heads, as in Sana 1.5
            q = attn.norm_q(q)
        if attn.norm_k is not None:
            k = attn.norm_k(k)
        q, k, v = (x.to(v.dtype).unflatten(-1, (attn.heads, -1)) for x in (q, k, v))
        attended = attend(q, k, v, attention_mask).flatten(2)
        return attn.to_out[1](attn.to_out[0](attended)) / attn.rescale_output_factor


class LinearProcessor:
    """Sana's linear self-attention (Xie et al. 2024, equation 2), its sums in float32 under autocast too.

    diffusers casts to float32 as well, but autocast would take the products back to 16 bits: a sum over all tokens
    overflows float16 there.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        if attn.norm_q is not None:
            q = attn.norm_q(q)
        if attn.norm_k is not None:
            k = attn.norm_k(k)
        dtype = v.dtype
        q, k, v = (
            at_least_float32(x).transpose(1, 2).unflatten(1, (attn.heads, -1)) for x in (q, k, v)
        )  # (B, h, d, T)
        q, k = F.relu(q), F.relu(k)
        with without_autocast(q.device):
            weighted = F.pad(v, (0, 0, 0, 1), value=1.0) @ k.transpose(2, 3)  # (B, h, d + 1, d), the last row the sums
            attended = weighted @ q  # (B, h, d + 1, T)
        attended = attended[:, :, :-1] / (attended[:, :, -1:] + LINEAR_EPS)
        attended = attn.to_out[1](attn.to_out[0](attended.flatten(1, 2).transpose(1, 2).to(dtype)))
        return attended.clip(-65504, 65504) if attended.dtype == torch.float16 else attended
