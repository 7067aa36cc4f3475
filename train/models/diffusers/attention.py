"""Attention of diffusers' blocks, computed our way. Shapes as in ``cross_attention.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..cross_attention import CaptionLayout
from ..numerics import at_least_float32, product_dtype

LINEAR_EPS = 1e-15  # of the sums of linear attention, as in diffusers


def _project(attn: Any, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of x, keys and values of the source, normed over all heads where the model does so (Sana 1.5)."""
    if source is x:
        q, k, v = products(x, attn.to_q, attn.to_k, attn.to_v)
    else:
        q, (k, v) = attn.to_q(x), products(source, attn.to_k, attn.to_v)
    return _normed(attn.norm_q, q), _normed(attn.norm_k, k), v


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def products(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """What several linear layers make of the same tokens: one product of their joined matrices in compiled code.

    Where autocast casts float32 weights, the copy that joins them is the one that casts them, and the gradients of x
    need no sum. Elsewhere it would be a copy more, which stays until the backward pass: as of 16-bit weights that FSDP
    gathers. Layers that something has replaced, as adapters do, are called one by one.
    """
    joined = [one for one in layers if type(one) is nn.Linear and one.weight.dtype == torch.float32]
    casts = torch.compiler.is_compiling() and product_dtype(x.device) is not None
    if not casts or len(joined) < len(layers):
        return [one(x) for one in layers]
    biases: list[Tensor] = [one.bias for one in joined if one.bias is not None]
    weights: list[Tensor] = [one.weight for one in joined]
    together = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
    return list(together.split([one.out_features for one in joined], dim=-1))


class CaptionProcessor:
    """Cross-attention of diffusers' PixArt and Sana in these layouts.

    diffusers turns the mask into a bias of -10000 for each head, which rules out flash attention.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: CaptionLayout | None = None,
    ) -> Tensor:
        """(B, T, E), and captions (n, E) or (B, L, E), to (B, T, E)."""
        assert encoder_hidden_states is not None
        assert attention_mask is not None
        q, k, v = _project(attn, hidden_states, encoder_hidden_states)
        q, k, v = (x.to(v.dtype).unflatten(-1, (attn.heads, -1)) for x in (q, k, v))
        attended = attention_mask.attend(q, k, v).flatten(2)
        return attn.to_out[1](attn.to_out[0](attended)) / attn.rescale_output_factor


class LinearProcessor:
    """Sana's linear self-attention (Xie et al. 2024, equation 2), with matrix products in 16 bits under autocast.

    Keys are divided by their sum over the tokens, and queries, multiplied by it, by theirs over the features: the same
    function. The sums are in float32, and both products are weighted means of values: a sum over all tokens, as
    diffusers computes it, overflows float16 and rounds in bfloat16.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        q, k, v = _project(attn, hidden_states, hidden_states)
        q, k, v = (x.transpose(1, 2).unflatten(1, (attn.heads, -1)) for x in (q, k, v))  # (B, h, d, T)
        q, k = at_least_float32(F.relu(q)), at_least_float32(F.relu(k))
        sums = k.sum(3, keepdim=True)
        q = q * sums
        k, q = k / (sums + LINEAR_EPS), q / (q.sum(2, keepdim=True) + LINEAR_EPS)
        attended = v @ k.to(v.dtype).transpose(2, 3) @ q.to(v.dtype)  # (B, h, d, d), then (B, h, d, T)
        attended = attn.to_out[1](attn.to_out[0](attended.flatten(1, 2).transpose(1, 2)))
        return attended.clip(-65504, 65504) if attended.dtype == torch.float16 else attended


class JointProcessor:
    """Self-attention of PixArt, and of Stable Diffusion 3 over both streams, pictures before captions."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(B, T, E), and (B, L, E) or None, to the same; padding is attended to, as in the published model."""
        assert attention_mask is None
        x, heads = hidden_states, (attn.heads, -1)
        q, k, v = (y.unflatten(-1, heads).transpose(1, 2) for y in products(x, attn.to_q, attn.to_k, attn.to_v))
        q, k = _normed(attn.norm_q, q), _normed(attn.norm_k, k)
        if encoder_hidden_states is not None:
            added = products(encoder_hidden_states, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            text_q, text_k, text_v = (y.unflatten(-1, heads).transpose(1, 2) for y in added)
            text_q, text_k = _normed(attn.norm_added_q, text_q), _normed(attn.norm_added_k, text_k)
            q, k, v = torch.cat([q, text_q], 2), torch.cat([k, text_k], 2), torch.cat([v, text_v], 2)
        attended = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v).transpose(1, 2).flatten(2)
        images = attn.to_out[1](attn.to_out[0](attended[:, : x.shape[1]]))
        if encoder_hidden_states is None:
            return images
        text = attended[:, x.shape[1] :]
        return images, text if attn.context_pre_only else attn.to_add_out(text)
