"""DiT^DH: a DiT for wide latents, such as those of representation autoencoders, with a wide shallow head.

The deep narrow part sees the noisy latents and the conditioning; the head, of two wide blocks, sees the noisy latents
again, and each of its tokens is modulated by the narrow part's token at its place. Names, shapes, first weights and
function are the published ones.

Shapes: B batch, C latent channels, T tokens, E width of the narrow part, D width of the head.

Source: Zheng et al. 2025, "Diffusion Transformers with Representation Autoencoders", arXiv 2510.11690, section 5.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .conditioning import Conditioning
from .dit import size_of
from .layers import (
    GainNorm,
    GridModel,
    LabelEmbedder,
    PatchEmbed,
    Rotation,
    SwiGLU,
    at_least_float32,
    position_table,
    residual_stream,
    rotation_table,
    without_autocast,
)
from .roles import RolePatterns, layers_of
from .spec import ModelSpec

HEAD = (2, 2048, 16)  # depth, width, heads
WAVES = 256  # of the time embedding
INIT_STD = 0.02  # of the embedders of time and labels


def is_dit_dh(name: str) -> bool:
    """Whether a model is a DiT^DH."""
    return name.startswith("DiTDH-")


class WaveEmbedder(nn.Module):
    """(B,) time from 0 at the data to 1 at the noise, to (B, E): sines and cosines of fixed random frequencies."""

    W: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("W", torch.randn(WAVES))
        self.mlp = nn.Sequential(nn.Linear(2 * WAVES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        angles = 2 * math.pi * at_least_float32(t)[:, None] * self.W
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=1).to(next(self.mlp.parameters()).dtype))


def pair_rotation(rows: int, columns: int, head_width: int, base: int) -> Rotation:
    """Angles of rotary positions whose pairs are neighbors: half of a head turns with the row, half with the column.

    Returns: cosines and sines, (T, head_width) float64 each.
    """
    parts = rotation_table(rows, columns, head_width, base)  # (T, 2, d / 4), the column first
    cos, sin = (part.flip(1).repeat_interleave(2, dim=2).flatten(1) for part in parts)
    return cos, sin


def rotate_pairs(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys (B, heads, T, d): a pair is two neighbors."""
    cos, sin = rotation
    x = at_least_float32(x)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack([-second, first], dim=-1).flatten(-2) * sin


class PairAttention(nn.Module):
    """Multi-head self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (rotate_pairs(part, rotation).to(v.dtype) for part in (q, k))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DHBlock(nn.Module):
    """Transformer block that is modulated by one vector an image, (B, 1, E), or by one a token, (B, T, E)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = GainNorm(width), GainNorm(width)
        self.attn, self.mlp = PairAttention(width, heads), SwiGLU(width, hidden=8 * width // 3)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor, rotation: Rotation) -> Tensor:
        modulation = at_least_float32(self.adaLN_modulation(c))
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, dim=2)
        attended = self.attn(self.norm1(x) * (1 + scale_msa) + shift_msa, rotation)
        x = (x + gate_msa * attended).to(x.dtype)
        return (x + gate_mlp * self.mlp(self.norm2(x) * (1 + scale_mlp) + shift_mlp)).to(x.dtype)


class DHFinalLayer(nn.Module):
    """Tokens (B, T, D) to latents (B, T, C), modulated by one vector a token."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.norm_final = GainNorm(width)
        self.linear = nn.Linear(width, channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = at_least_float32(self.adaLN_modulation(c)).chunk(2, dim=2)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class DiTDH(GridModel):
    """DiT^DH on class labels; a token is one position of the latent.

    Attributes:
      blocks: of the narrow part, then of the head, that are compiled, sharded and checkpointed one by one.
      roles: what its layers do: see ``roles.py``.
      residual: dtype of the residual streams under autocast to bfloat16; in any other precision they are float32.
    """

    roles: ClassVar[RolePatterns] = {
        "hidden": ("blocks.*.attn.*", "blocks.*.mlp.*"),
        "modulation": ("*.adaLN_modulation.1",),
        "embedding": ("x_embedder.proj", "s_embedder.proj", "t_embedder.*"),
        "head": ("final_layer.linear",),
        "projector": ("s_projector",),
    }
    residual: Literal["float32", "bf16"] = "float32"

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        (depth, width, heads, _), (head_depth, head_width, head_heads) = size_of(spec.name), HEAD
        self.depth, self.base_grid = depth, spec.base_size
        self.head_widths = width // heads, head_width // head_heads
        self.x_embedder = PatchEmbed(1, spec.channels, head_width)
        self.s_embedder = PatchEmbed(1, spec.channels, width)
        self.s_projector = nn.Linear(width, head_width)
        self.t_embedder = WaveEmbedder(width)
        self.y_embedder = LabelEmbedder(spec.num_classes, width)
        self.final_layer = DHFinalLayer(head_width, spec.channels)
        self.register_buffer("pos_embed", position_table(spec.base_size, spec.base_size, width, spec.base_size)[None])
        narrow = [DHBlock(width, heads) for _ in range(depth)]
        self.blocks = nn.ModuleList([*narrow, *(DHBlock(head_width, head_heads) for _ in range(head_depth))])
        self.initialize_weights()

    def initialize_weights(self) -> None:
        """Initialize as the published code does: torch's defaults but for embedders, and zeros for modulations."""
        parts: Any = self
        for patches in (parts.x_embedder.proj, parts.s_embedder.proj):
            nn.init.xavier_uniform_(patches.weight.view(len(patches.weight), -1))
            nn.init.zeros_(patches.bias)
        for layer in (parts.y_embedder.embedding_table, parts.t_embedder.mlp[0], parts.t_embedder.mlp[2]):
            nn.init.normal_(layer.weight, std=INIT_STD)
        for layer in layers_of(self, "modulation", "head").values():
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """(B, C, H, W) noisy latents, (B,) time in 0..1000 and labels to the velocity, (B, C, H, W)."""
        rows, columns = x.shape[2:]
        with without_autocast(x.device):
            time = self.t_embedder(t / 1000)
            c = F.silu(time + self.y_embedder(conditioning.labels))[:, None]
        s = residual_stream(self.s_embedder(x) + self.position_table(rows, columns), self.residual)
        turns, head_turns = (self.rotation(rows, columns, width, pair_rotation) for width in self.head_widths)
        for block in self.blocks[: self.depth]:
            s = block(s, c, turns)
        s = self.s_projector(F.silu(time[:, None] + s))
        tokens = residual_stream(self.x_embedder(x), self.residual)
        for block in self.blocks[self.depth :]:
            tokens = block(tokens, s, head_turns)
        return self.final_layer(tokens, s).mT.unflatten(2, (rows, columns))
