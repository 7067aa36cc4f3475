"""What PixArt and Sana share: blocks with cross-attention to captions, all modulated from one table of the time.

Source: Chen et al. 2023 (PixArt-alpha), arXiv 2310.00426, section 2.3 (adaLN-single).
"""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..conditioning import Conditioning
from ..cross_attention import CaptionLayout, arrange_captions
from ..layers import add_gated, at_least_float32, modulate, residual_stream, without_autocast
from .model import Config, DiffusersModel, add_positions, initialize

LINEAR_EPS = 1e-15  # of the sums of linear attention, as in diffusers


class AdaLNSingle(DiffusersModel):
    """A transformer of one stream.

    Attributes:
      embed_name, time_name: of the embeddings of patches and of time.
      zeros: ends of the names of layers whose weights begin at zero.
    """

    embed_name: str
    time_name: str
    zeros: tuple[str, ...] = ()
    normalisation = "scale"

    @classmethod
    def positions_scale(cls, config: Config) -> float | None:
        """The class's divisor of positions, which count in tokens of its grid of sample_size; None: it adds none."""
        return config["interpolation_scale"]

    @classmethod
    def config_to_draw(cls, config: Config, side: int) -> Config:
        """The class divides positions by their grid's side and by a scale, so the scale follows the side."""
        patch, scale = config["patch_size"], cls.positions_scale(config)
        learned, drawn = config["sample_size"] // patch, side // patch
        if drawn == learned:
            return config
        drawn_scale = None if scale is None else scale * drawn / learned
        return config | {"sample_size": drawn * patch, "interpolation_scale": drawn_scale}

    def optimize(self) -> None:
        embed = getattr(self.net, self.embed_name)
        if embed.pos_embed is not None:
            add_positions(embed)
        for block in self.blocks:
            block.forward = MethodType(block_forward, block)
            block.attn2.set_processor(CaptionProcessor())  # pyright: ignore

    def initialize_weights(self) -> None:
        """Convolutions and tables of modulation keep the defaults of torch and diffusers, which are as published."""
        blocks = cast(Any, self.blocks)
        fused = [
            pair for one in blocks for pair in ((one.attn1, ("to_q", "to_k", "to_v")), (one.attn2, ("to_k", "to_v")))
        ]
        embedders = (getattr(self.net, self.time_name), self.net.caption_projection)
        zeros = [module for name, module in self.net.named_modules() if self.zeros and name.endswith(self.zeros)]
        initialize(self.net, fused, getattr(self.net, self.embed_name).proj, embedders, zeros)

    def embed_captions(self, captions: Tensor) -> Tensor:
        """(..., D) to (..., E)."""
        return self.net.caption_projection(captions)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The forward of diffusers, which reads (B, L, D) captions alone."""
        net, patch = cast(Any, self.net), self.net.config.patch_size
        rows, columns = x.shape[2] // patch, x.shape[3] // patch
        tokens = residual_stream(getattr(net, self.embed_name)(x), self.residual)
        # Of all blocks (B, 6E), and the embedding of the time (B, E).
        modulation, time = getattr(net, self.time_name)(t, batch_size=len(x), hidden_dtype=tokens.dtype)
        attention: Any = self.blocks[0].attn2
        captions, layout = arrange_captions(conditioning.valid_captions, attention.inner_dim // attention.heads)
        captions = self.embed_captions(captions)
        for block in self.blocks:
            tokens = block(tokens, modulation, captions, layout, (rows, columns) if self.has_convolutions else None)
        shift, scale = (net.scale_shift_table + time[:, None]).chunk(2, dim=1)
        norm = getattr(net.norm_out, "norm", net.norm_out)
        patches = net.proj_out(norm(tokens) * (1 + scale) + shift)
        images = patches.view(len(x), rows, columns, patch, patch, -1).permute(0, 5, 1, 3, 2, 4)
        return images.reshape(len(x), -1, rows * patch, columns * patch)


def block_forward(
    block: Any,
    x: Tensor,
    modulation: Tensor,
    captions: Tensor,
    layout: CaptionLayout,
    grid: tuple[int, int] | None,
) -> Tensor:
    """diffusers' block, whose residual stream keeps its dtype, and rounds each sum once.

    In diffusers the stream becomes float32 at the first gate, because the table of modulation is.

    Args:
      x: (B, T, E).
      modulation: (B, 6E) shifts, scales and gates of attention and of the feed-forward, before the block's own table.
      captions, layout: (n, E) or (B, L, E), as ``arrange_captions`` has them.
      grid: rows and columns of the tokens, for a feed-forward of convolutions (Sana).
    Returns: (B, T, E).
    """
    table = block.scale_shift_table + at_least_float32(modulation).unflatten(1, (6, -1))  # (B, 6, E)
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = table.unbind(1)
    x = add_gated(x, gate_msa, block.attn1(modulate(_norm(block.norm1, x), shift_msa, scale_msa)))
    x = x + block.attn2(x, captions, layout).to(x.dtype)
    modulated = modulate(_norm(block.norm2, x), shift_mlp, scale_mlp)
    if grid is None:
        return add_gated(x, gate_mlp, block.ff(modulated))
    images = block.ff(modulated.unflatten(1, grid).permute(0, 3, 1, 2))  # (B, E, rows, columns)
    return add_gated(x, gate_mlp, images.flatten(2).transpose(1, 2))


def _norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """In the dtype of the stream, unless the norm has weights: see ``TokenNorm``."""
    if norm.weight is not None:
        return norm(x)
    with without_autocast(x.device):
        return norm(x)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    """Queries or keys, over all heads, where the model norms them (Sana 1.5)."""
    return x if norm is None else norm(x)


class CaptionProcessor:
    """Cross-attention to packed or padded captions.

    diffusers turns the mask into a bias of -10000 for each head, which rules out flash attention.
    """

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, attention_mask: CaptionLayout
    ) -> Tensor:
        """(B, T, E), and captions (n, E) or (B, L, E), to (B, T, E)."""
        q, k = _normed(attn.norm_q, attn.to_q(hidden_states)), _normed(attn.norm_k, attn.to_k(encoder_hidden_states))
        v = attn.to_v(encoder_hidden_states)
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
        x = hidden_states
        q, k, v = _normed(attn.norm_q, attn.to_q(x)), _normed(attn.norm_k, attn.to_k(x)), attn.to_v(x)
        q, k, v = (one.transpose(1, 2).unflatten(1, (attn.heads, -1)) for one in (q, k, v))  # (B, h, d, T)
        q, k = at_least_float32(F.relu(q)), at_least_float32(F.relu(k))
        sums = k.sum(3, keepdim=True)
        q = q * sums
        k, q = k / (sums + LINEAR_EPS), q / (q.sum(2, keepdim=True) + LINEAR_EPS)
        attended = v @ k.to(v.dtype).transpose(2, 3) @ q.to(v.dtype)  # (B, h, d, d), then (B, h, d, T)
        attended = attn.to_out[1](attn.to_out[0](attended.flatten(1, 2).transpose(1, 2)))
        return attended.clip(-65504, 65504) if attended.dtype == torch.float16 else attended
