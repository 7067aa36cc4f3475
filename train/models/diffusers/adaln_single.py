"""What PixArt and Sana share: blocks with cross-attention to captions, all modulated from one table of the time.

Source: Chen et al. 2023 (PixArt-alpha), arXiv 2310.00426, section 2.3 (adaLN-single).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ....datasets.batches.captions import Captions
from ..activation_checkpointing import replace_forward
from ..conditioning import Conditioning
from ..cross_attention import CaptionLayout, arrange_captions
from ..layers import add_gated, modulate
from ..numerics import at_least_float32, without_autocast
from .attention import CaptionProcessor
from .model import DiffusersModel, initialize_embedders, initialize_fused, initialize_linear, initialize_patches


class AdaLNSingle(DiffusersModel):
    """A transformer of one stream.

    Attributes:
      embed_name, time_name: of the embeddings of patches and of time.
      self_attention: processor of the first attention of a block.
      has_grid: blocks take the number of rows and columns, for a feed-forward of convolutions.
    """

    has_narrow_residual = True
    embed_name: str
    time_name: str
    self_attention: type
    has_grid = False

    def optimize(self) -> None:
        embed = getattr(self.net, self.embed_name)
        if embed.pos_embed is not None:
            setattr(self.net, self.embed_name, CachedPatchEmbed(embed))
        for block in self.blocks:
            replace_forward(block, block_forward)
            block.attn2.set_processor(CaptionProcessor())  # pyright: ignore
            block.attn1.set_processor(self.self_attention())  # pyright: ignore

    def initialize(self) -> None:
        """Xavier for linear layers and patches, with queries, keys and values as one matrix; small embedders.

        Convolutions and tables of modulation keep the defaults of torch and diffusers, which are the published ones.
        """
        initialize_linear(self.net)
        for block in self.net.transformer_blocks:
            initialize_fused(block.attn1, "to_q", "to_k", "to_v")
            initialize_fused(block.attn2, "to_k", "to_v")
        initialize_patches(getattr(self.net, self.embed_name).proj)
        initialize_embedders(getattr(self.net, self.time_name), self.net.caption_projection)

    def embed_time(self, x: Tensor, t: Tensor, conditioning: Conditioning, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Modulation of all blocks (B, 6E), and the embedding of the time (B, E)."""
        return getattr(self.net, self.time_name)(t, batch_size=len(x), hidden_dtype=dtype)

    def embed_captions(self, captions: Tensor) -> Tensor:
        """(..., D) to (..., E)."""
        return self.net.caption_projection(captions)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The forward of diffusers, which reads (B, L, D) captions alone."""
        assert isinstance(conditioning.captions, Captions)
        net, patch = cast(Any, self.net), self.net.config.patch_size
        rows, columns = x.shape[2] // patch, x.shape[3] // patch
        tokens = self.start_stream(getattr(net, self.embed_name)(x))
        modulation, time = self.embed_time(x, t, conditioning, tokens.dtype)
        attention: Any = self.blocks[0].attn2
        captions, layout = arrange_captions(conditioning.captions, attention.inner_dim // attention.heads)
        captions = self.embed_captions(captions)
        grid = (rows, columns) if self.has_grid else None
        for block in self.blocks:
            tokens = block(tokens, modulation, captions, layout, grid)
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


class CachedPatchEmbed(nn.Module):
    """diffusers' patch embedding, with a table of float32 positions that is computed once for each size.

    Args:
      plain: the original, whose weights it shares under the same names.
    """

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.proj, self.base_size, self.scale = plain.proj, plain.base_size, plain.interpolation_scale
        self._tables: dict[tuple[int, int, torch.device], Tensor] = {}

    def forward(self, latent: Tensor) -> Tensor:
        """(B, C, H, W) to (B, T, E)."""
        tokens = self.proj(latent)
        rows, columns = tokens.shape[2:]
        return tokens.flatten(2).transpose(1, 2) + self.table(rows, columns, tokens.device)

    def table(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Positions of a grid, (1, T, E) float32."""
        key = (rows, columns, device)
        if key not in self._tables:
            from diffusers.models.embeddings import get_2d_sincos_pos_embed

            with torch.inference_mode(False):  # a table made while sampling may be used in training later
                table: Any = get_2d_sincos_pos_embed(
                    embed_dim=self.proj.out_channels,
                    grid_size=(rows, columns),
                    base_size=self.base_size,
                    interpolation_scale=self.scale,
                    output_type="pt",
                )
                self._tables[key] = table.float().unsqueeze(0).to(device)
        return self._tables[key]
