"""A DiT written directly from the paper, as plain training scripts have it: what ours must compute.

Peebles and Xie 2023, section 3: patches, sine-cosine positions, blocks with adaLN-Zero, a linear head. Eager
modules; the training loop drops labels. Shapes: B batch, T tokens, E width.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PlainAttention(nn.Module):
    """Self-attention by torch's ``scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.to_qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # (B, heads, T, E/heads)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(x.transpose(1, 2).reshape(batch, tokens, width))


class PlainBlock(nn.Module):
    """One block with adaLN-Zero."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attention = PlainAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        hidden = self.norm1(x) * (1 + scale1.unsqueeze(1)) + shift1.unsqueeze(1)
        x = x + gate1.unsqueeze(1) * self.attention(hidden)
        hidden = self.norm2(x) * (1 + scale2.unsqueeze(1)) + shift2.unsqueeze(1)
        return x + gate2.unsqueeze(1) * self.mlp(hidden)


class PlainDiT(nn.Module):
    """Latents (B, C, H, W), time (B,) in 0..1000 and labels (B,) to (B, out_channels, H, W)."""

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
        side: int,
    ) -> None:
        super().__init__()
        self.patch, self.out_channels, self.side = patch, out_channels, side // patch
        self.to_tokens = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions: Tensor
        self.register_buffer("positions", _positions(self.side, width))
        self.time_mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.label_table = nn.Embedding(num_classes + 1, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, patch * patch * out_channels)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.to_tokens(x).flatten(2).transpose(1, 2) + self.positions  # (B, T, E)
        frequencies = torch.exp(-math.log(10000) * torch.arange(128, device=t.device) / 128)
        angles = t[:, None].float() * frequencies
        c = self.time_mlp(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.label_table(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c).chunk(2, dim=1)
        x = self.head(self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1))
        x = x.reshape(len(x), self.side, self.side, self.patch, self.patch, self.out_channels)
        return torch.einsum("bhwpqc->bchpwq", x).reshape(len(x), self.out_channels, *[self.side * self.patch] * 2)


def _positions(side: int, width: int) -> Tensor:
    """(1, T, E) sines and cosines: half of the width for the column, half for the row."""
    place = torch.arange(side, dtype=torch.float64)
    angles = place[:, None] * 10000 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    table = torch.cat([angles.sin(), angles.cos()], dim=1)  # (side, E/2)
    columns, rows = table.repeat(side, 1), table.repeat_interleave(side, 0)
    return torch.cat([columns, rows], dim=1)[None].float()


MODELS = """
from torch import nn
MADE = []
class Model(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.table = nn.Embedding(num_classes + 1, 8)
    def forward(self, x, t, y):
        return x.repeat(1, 2, 1, 1) * (self.table(y) + t[:, None])[:, :, None, None]
def DiT_S_8(input_size, num_classes):
    assert input_size == 8
    MADE.append(Model(num_classes))
    return MADE[-1]
"""
DIFFUSION = """
STEPS = []
class Diffusion:
    num_timesteps = 10
    def training_losses(self, model, x, t, model_kwargs):
        assert model.training and t.max() < self.num_timesteps
        STEPS.append(tuple(x.shape))
        return {"loss": model(x, t, **model_kwargs).square().mean((1, 2, 3))}
def create_diffusion(timestep_respacing):
    return Diffusion()
"""


def made_up_fast_dit(folder: Path) -> Path:
    """A checkout with what is called of fast-DiT's: ``models`` and ``diffusion``, tiny."""
    checkout = folder / "fast-DiT"
    (checkout / "diffusion").mkdir(parents=True)
    (checkout / "models.py").write_text(MODELS)
    (checkout / "diffusion/__init__.py").write_text(DIFFUSION)
    return checkout
