"""The layers of our DiT: embeddings, positions, attention, feed-forward. Published layers keep their names.

Shapes: B batch, C latent channels, p patch, T image tokens, L caption tokens, D caption width, E model width.

Source: "Scalable Diffusion Models with Transformers", arXiv 2212.09748; other sources are named in place.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cross_attention import CaptionLayout
from .spec import DiTOptions

TableT = TypeVar("TableT")
MLP_RATIO = 4
FREQUENCIES = 256  # of the time embedding, cosines then sines
NORM_EPS = 1e-6
ROTARY_BASE = 10_000.0  # Su et al. 2021 (RoFormer), section 3.3
SWIGLU_STEP = 64  # the hidden width is a multiple of it, so that its matrices have whole tiles

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of each token, (T, 2, d/4) each: two axes, d the width of a head."""

# ---------------------------------------------------------------------------------------------------------- precision


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Compute in the dtype of the inputs; a no-op on meta, which has no autocast."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def at_least_float32(x: Tensor) -> Tensor:
    """Widen 16 bits, leave float64."""
    return x if x.dtype == torch.float64 else x.float()


def residual_stream(tokens: Tensor, residual: Literal["float32", "bf16"]) -> Tensor:
    """Embedded tokens in the dtype of the residual stream: at least float32, or bfloat16 under autocast to it.

    The published codes add positions in float32, so their streams are float32 under autocast too. A bfloat16 stream
    halves the bytes that are read and written for it; float16 has too small a range for it.
    """
    device = tokens.device.type
    narrow = residual == "bf16" and device != "meta" and torch.is_autocast_enabled(device)
    narrow = narrow and torch.get_autocast_dtype(device) == torch.bfloat16
    tokens = at_least_float32(tokens).contiguous()  # else each norm would transpose
    return tokens.bfloat16() if narrow else tokens


# --------------------------------------------------------------------------------------------------------- modulation


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale tokens (B, T, E) by one vector an image (B, E)."""
    return _multiply_add(shift.unsqueeze(1), x, 1 + scale.unsqueeze(1))


def add_gated(x: Tensor, gate: Tensor, y: Tensor) -> Tensor:
    """Add gated tokens to the residual stream (B, T, E), rounded once to its dtype."""
    return _multiply_add(x, gate.unsqueeze(1), y).to(x.dtype)


def _multiply_add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x + y * z, in one pass if the dtypes are equal; otherwise addcmul copies the narrower ones, and keeps them."""
    return torch.addcmul(x, y, z) if x.dtype == y.dtype == z.dtype else x + y * z


# ---------------------------------------------------------------------------------------------------------- embedding


class PatchEmbed(nn.Module):
    """(B, C, H, W) to (B, T, E): one linear map a patch, written as a strided convolution."""

    def __init__(self, patch: int, channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class TimestepEmbedder(nn.Module):
    """(B,) time in 0..1000 to (B, E), in the dtype of its weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(time_features(t).to(next(self.mlp.parameters()).dtype))


def time_features(t: Tensor) -> Tensor:
    """Cosines, then sines, of a time at 128 frequencies from 1 to 1/10000; (B,) to (B, 256).

    The exponent divides by 128, as in DiT; diffusers' DiT class divides by 127, which is another function.
    """
    half = FREQUENCIES // 2
    t = at_least_float32(t)  # 16 bits cannot represent 1000 distinct times
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


class GainNorm(nn.RMSNorm):
    """RMS norm over the last axis with a gain, in at least float32."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = at_least_float32(x)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), NORM_EPS)


class CaptionEmbedder(nn.Module):
    """Features (..., D) to (..., E): PixArt's two linear maps after a norm, since encoders have outliers."""

    def __init__(self, caption_width: int, width: int) -> None:
        super().__init__()
        self.norm = GainNorm(caption_width)
        self.fc1 = nn.Linear(caption_width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, captions: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(captions)), approximate="tanh"))


# ---------------------------------------------------------------------------------------------------------- positions


def grid_coordinates(rows: int, columns: int, base: int) -> tuple[Tensor, Tensor]:
    """Row and column of each token, (T,) float64 each.

    Both run from 0 to ``base`` whatever the grid, as in PixArt, so all buckets share them; on a base x base grid they
    are integers.
    """
    y = torch.arange(rows, dtype=torch.float64) * base / rows
    x = torch.arange(columns, dtype=torch.float64) * base / columns
    y, x = torch.meshgrid(y, x, indexing="ij")
    return y.flatten(), x.flatten()


def position_table(rows: int, columns: int, width: int, base: int) -> Tensor:
    """Sine-cosine positions of a grid of tokens: half the width for the column, half for the row.

    On a base x base grid they are the published table, which puts the column first.

    Returns: (rows * columns, width) float32.
    """
    y, x = grid_coordinates(rows, columns, base)
    return torch.cat([_sincos(x, width // 2), _sincos(y, width // 2)], dim=1).float()


def _sincos(position: Tensor, width: int) -> Tensor:
    frequency = 10_000.0 ** -(torch.arange(width // 2, dtype=torch.float64) / (width / 2))
    angles = position[:, None] * frequency
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def rotation_table(rows: int, columns: int, head_width: int, base: int) -> Rotation:
    """Angles of the rotary positions of a grid, axial: half of a head turns with the column, half with the row.

    Returns: cosines and sines, (rows * columns, 2, head_width / 4) float64 each.
    Source: Su et al. 2021, equation 15, along each axis.
    """
    y, x = grid_coordinates(rows, columns, base)
    pairs = head_width // 4
    frequency = ROTARY_BASE ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    angles = torch.stack([x, y], dim=1)[:, :, None] * frequency
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys (B, heads, T, d): pair i of an axis is its entries i and i + d/4."""
    cos, sin = rotation
    first, second = at_least_float32(x).unflatten(-1, (2, 2, -1)).unbind(-2)  # (B, heads, T, 2, d/4)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-2).flatten(-3)


class GridModel(nn.Module):
    """A model with tables of positions, each computed once for a grid of tokens and a device.

    Attributes:
      x_embedder: embedding of the latents.
      base_grid: side of the grid whose tokens are one position apart.
      pos_embed: (1, T, E) added positions of that grid, in the state dict as published; None: none are added.
    """

    x_embedder: PatchEmbed
    base_grid: int
    pos_embed: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self._tables: dict[tuple[Any, ...], Any] = {}

    def position_table(self, rows: int, columns: int) -> Tensor:
        """Sine-cosine positions (1, T, E) of a grid of tokens."""
        base = self.pos_embed
        assert base is not None
        if rows == columns == self.base_grid:
            return base
        make = lambda: position_table(rows, columns, base.shape[2], self.base_grid)[None].to(base)  # noqa: E731
        return self.cached(("positions", rows, columns, base.device), make)

    def rotation(
        self, rows: int, columns: int, head_width: int, make: Callable[[int, int, int, int], Rotation] = rotation_table
    ) -> Rotation:
        """Rotary positions of a grid of tokens that ``make`` computes, on the model's device in at least float32."""
        weight = self.x_embedder.proj.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)

        def moved() -> Rotation:
            cos, sin = make(rows, columns, head_width, self.base_grid)
            return cos.to(weight.device, dtype), sin.to(weight.device, dtype)

        return self.cached(("rotation", rows, columns, head_width, weight.device), moved)

    def cached(self, key: tuple[Any, ...], make: Callable[[], TableT]) -> TableT:
        """A table that is computed once for each key."""
        if key not in self._tables:
            with torch.inference_mode(False):  # a table made while sampling may be used in training later
                self._tables[key] = make()
        return self._tables[key]


# --------------------------------------------------------------------------------------------------------------- core


class TokenNorm(nn.Module):
    """Norm of tokens (B, T, E) without parameters, in their own dtype.

    Autocast would make a float32 copy of 16-bit tokens, and keep it for the backward pass; the kernel computes its
    sums in float32 anyway.
    """

    def __init__(self, kind: Literal["layer", "rms"], width: int) -> None:
        super().__init__()
        self.kind, self.shape = kind, (width,)

    def forward(self, x: Tensor) -> Tensor:
        with without_autocast(x.device):
            return (F.layer_norm if self.kind == "layer" else F.rms_norm)(x, self.shape, eps=NORM_EPS)


class Attention(nn.Module):
    """Multi-head self-attention with a fused projection of queries, keys and values.

    QK-norm is an RMS norm with a gain over each head (Esser et al. 2024, section 5.3.2). With a value residual (Zhou et
    al. 2024, arXiv 2410.17897) all blocks but the first mix their values with its own, half of each to begin with.
    """

    def __init__(self, width: int, heads: int, options: DiTOptions, *, is_first: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = GainNorm(width // heads) if options.qk_norm else nn.Identity()
        self.k_norm = GainNorm(width // heads) if options.qk_norm else nn.Identity()
        self.proj = nn.Linear(width, width)
        mixes = options.value_residual and not is_first
        self.value_share = nn.Parameter(torch.full((1,), 0.5)) if mixes else None  # FSDP shards no scalar

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, first_values: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(B, T, E) to the same, and its own values (B, heads, T, E/heads)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, T, E/heads) each
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        values = v
        if self.value_share is not None and first_values is not None:
            values = v.lerp(first_values, self.value_share.to(v.dtype))
        attended = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), values)
        return self.proj(attended.transpose(1, 2).flatten(2)), v


class CrossAttention(nn.Module):
    """Attention of image tokens (B, T, E) to the tokens of their captions, (n, E) or (B, L, E) as in their layout."""

    def __init__(self, width: int, heads: int, options: DiTOptions) -> None:
        super().__init__()
        self.heads = heads
        self.q_linear = nn.Linear(width, width)
        self.kv_linear = nn.Linear(width, 2 * width)
        self.q_norm = GainNorm(width // heads) if options.qk_norm else nn.Identity()
        self.k_norm = GainNorm(width // heads) if options.qk_norm else nn.Identity()
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, captions: Tensor, layout: CaptionLayout) -> Tensor:
        q = self.q_norm(self.q_linear(x).unflatten(-1, (self.heads, -1)))
        k, v = self.kv_linear(captions).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        return self.proj(layout.attend(q.to(v.dtype), self.k_norm(k).to(v.dtype), v).flatten(2))


class Mlp(nn.Module):
    """Two linear maps with GELU (tanh form) between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, MLP_RATIO * width)
        self.fc2 = nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """Gated feed-forward of as many parameters as ``Mlp``: two thirds of its hidden width (Shazeer 2020, section 2).

    Args:
      hidden: width between the two maps; 0: those two thirds, rounded up to whole tiles.
    """

    def __init__(self, width: int, hidden: int = 0) -> None:
        super().__init__()
        hidden = hidden or math.ceil(2 * MLP_RATIO * width / 3 / SWIGLU_STEP) * SWIGLU_STEP
        self.w12 = nn.Linear(width, 2 * hidden)  # gate, then value
        self.w3 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)
