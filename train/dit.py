"""DiT: the diffusion transformer of Peebles and Xie 2023, with the parameter names of the published checkpoints.

Shapes: B batch, C latent channels, H W latent size, p patch, T = (H/p)(W/p) image tokens, E width. Any H and W that are
multiples of p; the position table of the base size is part of the checkpoint, those of other sizes are computed.

Source: "Scalable Diffusion Models with Transformers", arXiv 2212.09748, section 3 and table 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# name -> depth, width, heads (table 1)
SIZES = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}
PATCHES = (2, 4, 8)
MLP_RATIO = 4
FREQUENCIES = 256  # of the time embedding, cosines then sines
NORM_EPS = 1e-6


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale tokens (B, T, E) by one vector an image (B, E)."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


# ---------------------------------------------------------------------------------------------------------- embedding


class PatchEmbed(nn.Module):
    """(B, C, H, W) to (B, T, E): one linear map a patch, written as a strided convolution."""

    def __init__(self, patch: int, channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class TimestepEmbedder(nn.Module):
    """(B,) time in 0..1000 to (B, E)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(time_features(t))


def time_features(t: Tensor) -> Tensor:
    """Cosines, then sines, of a time at 128 frequencies from 1 to 1/10000; (B,) to (B, 256).

    The exponent divides by 128, as in DiT; diffusers' DiT class divides by 127, which is another function.
    """
    half = FREQUENCIES // 2
    t = t if t.dtype == torch.float64 else t.float()  # also under autocast: 16 bits do not tell 1000 times apart
    exponent = torch.arange(half, dtype=t.dtype, device=t.device) / half
    angles = t[:, None] * torch.exp(-math.log(10_000) * exponent)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class LabelEmbedder(nn.Module):
    """(B,) class index to (B, E); the index ``num_classes`` is the null class of classifier-free guidance."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, width)

    def forward(self, y: Tensor) -> Tensor:
        return self.embedding_table(y)


# --------------------------------------------------------------------------------------------------------------- core


class Attention(nn.Module):
    """Multi-head self-attention with a fused projection of queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, e = x.shape
        q, k, v = (
            self.qkv(x).view(b, t, 3, self.heads, e // self.heads).permute(2, 0, 3, 1, 4)
        )  # (B, heads, T, E/heads)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, e))


class Mlp(nn.Module):
    """Two linear maps with GELU (tanh form) between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, MLP_RATIO * width)
        self.fc2 = nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class DiTBlock(nn.Module):
    """Transformer block with adaLN-Zero conditioning (figure 3, right)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=NORM_EPS)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=NORM_EPS)
        self.mlp = Mlp(width)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        return x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class FinalLayer(nn.Module):
    """Tokens (B, T, E) to patches (B, T, p * p * out_channels)."""

    def __init__(self, width: int, patch: int, out_channels: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=NORM_EPS)
        self.linear = nn.Linear(width, patch * patch * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT(nn.Module):
    """The class-conditional diffusion transformer.

    Args:
      depth, width, heads, patch: the size.
      channels: C of the latents.
      out_channels: 2C with learned variance, else C.
      num_classes: of the label table, the null class not counted.
      base_size: latent height and width of the position table in the checkpoint.
    """

    def __init__(
        self,
        *,
        depth: int,
        width: int,
        heads: int,
        patch: int,
        channels: int,
        out_channels: int,
        num_classes: int,
        base_size: int,
    ) -> None:
        super().__init__()
        self.patch, self.out_channels, self.num_classes = patch, out_channels, num_classes
        self.base_grid = base_size // patch
        self.x_embedder = PatchEmbed(patch, channels, width)
        self.t_embedder = TimestepEmbedder(width)
        self.y_embedder = LabelEmbedder(num_classes, width)
        self.pos_embed: Tensor
        self.register_buffer("pos_embed", position_table(self.base_grid, self.base_grid, width, self.base_grid)[None])
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.final_layer = FinalLayer(width, patch, out_channels)
        self.activation_checkpointing = False
        self._positions: dict[tuple[int, int, torch.device], Tensor] = {}
        self.initialize_weights()

    def initialize_weights(self) -> None:
        """Initialise as the paper does: xavier, small embeddings, and zeros so that each block begins as identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        patch_weight = self.x_embedder.proj.weight
        nn.init.xavier_uniform_(patch_weight.view(patch_weight.shape[0], -1))
        assert self.x_embedder.proj.bias is not None
        nn.init.zeros_(self.x_embedder.proj.bias)
        for name, parameter in (*self.y_embedder.named_parameters(), *self.t_embedder.named_parameters()):
            if name.endswith("weight"):
                nn.init.normal_(parameter, std=0.02)
        modulated = [module for module in self.modules() if isinstance(module, (DiTBlock, FinalLayer))]
        for zeroed in (*(module.adaLN_modulation for module in modulated), self.final_layer.linear):
            for parameter in zeroed.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predict noise (and variance), or velocity.

        Args:
          x: (B, C, H, W) noisy latents.
          t: (B,) time in 0..1000.
          y: (B,) int64 class index, ``num_classes`` for null.
        Returns: (B, out_channels, H, W).
        """
        rows, columns = x.shape[2] // self.patch, x.shape[3] // self.patch
        x = self.x_embedder(x) + self.positions(rows, columns)  # (B, T, E)
        c = self.t_embedder(t) + self.y_embedder(y)  # (B, E)
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, c, use_reentrant=False)
            else:
                x = block(x, c)
        return self.unpatchify(self.final_layer(x, c), rows, columns)

    def unpatchify(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """(B, T, p * p * out_channels) to (B, out_channels, H, W)."""
        p = self.patch
        x = x.view(-1, rows, columns, p, p, self.out_channels)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, self.out_channels, rows * p, columns * p)

    def positions(self, rows: int, columns: int) -> Tensor:
        """Position table of a grid of tokens, (1, T, E); computed once for each size and device."""
        if rows == columns == self.base_grid:
            return self.pos_embed
        key = (rows, columns, self.pos_embed.device)
        if key not in self._positions:
            table = position_table(rows, columns, self.pos_embed.shape[2], self.base_grid)
            self._positions[key] = table[None].to(self.pos_embed)
        return self._positions[key]


def position_table(rows: int, columns: int, width: int, base: int) -> Tensor:
    """Sine-cosine positions of a grid of tokens: half the width for the column, half for the row.

    Coordinates run from 0 to ``base`` along both axes whatever the grid, as in PixArt, so all buckets share them; on a
    base x base grid they are the integers of the published table, which puts the column first.

    Returns: (rows * columns, width) float32.
    """
    y = torch.arange(rows, dtype=torch.float64) * base / rows
    x = torch.arange(columns, dtype=torch.float64) * base / columns
    y, x = torch.meshgrid(y, x, indexing="ij")
    return torch.cat([_sincos(x.flatten(), width // 2), _sincos(y.flatten(), width // 2)], dim=1).float()


def _sincos(position: Tensor, width: int) -> Tensor:
    frequency = 10_000.0 ** -(torch.arange(width // 2, dtype=torch.float64) / (width / 2))
    angles = position[:, None] * frequency
    return torch.cat([angles.sin(), angles.cos()], dim=1)
