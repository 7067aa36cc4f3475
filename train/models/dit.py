"""DiT: the diffusion transformer of Peebles and Xie 2023, with the parameter names of the published checkpoints.

Without options it is the published model. With captions instead of labels, each block has cross-attention between
attention and feed-forward, as in PixArt (arXiv 2310.00426, section 2.3). Some recipes add tokens that skip blocks
(TREAD, arXiv 2501.04765; SPRINT, arXiv 2510.21986), projectors of tokens (REPA, arXiv 2410.06940) and a class token
that is denoised too, before the image tokens (REG, arXiv 2507.01467).

Shapes: B batch, C latent channels, H W latent size, p patch, T = (H/p)(W/p) image tokens, K of them kept, E width,
L caption tokens, D width of an image feature. H and W are multiples of p.

Source: "Scalable Diffusion Models with Transformers", arXiv 2212.09748, section 3 and table 1.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from .conditioning import NO_EXTRAS, Conditioning, Extras, ModelOutput
from .cross_attention import CaptionLayout, arrange_captions
from .layers import (
    NORM_EPS,
    Attention,
    CaptionEmbedder,
    CrossAttention,
    GainNorm,
    GridModel,
    LabelEmbedder,
    Mlp,
    PatchEmbed,
    Rotation,
    SwiGLU,
    TimestepEmbedder,
    TokenNorm,
    add_gated,
    at_least_float32,
    modulate,
    position_table,
    residual_stream,
    without_autocast,
)
from .roles import RolePatterns, layers_of
from .spec import DiTOptions, ModelSpec, ProjectorSpec

# name -> depth, width, heads (table 1); the first is not published: for small images, and to compare recipes on a CPU
SIZES = {"Ti": (8, 128, 4), "S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}
PATCHES = (1, 2, 4, 8)
INIT_STD = 0.02  # of the embedders of time, labels and captions


def size_of(name: str) -> tuple[int, int, int, int]:
    """Depth, width, heads and patch of "DiT-{size}/{patch}"; of the narrow part of "DiTDH-{size}/1"."""
    size, patch = name.partition("-")[2].split("/")
    return *SIZES[size], int(patch)


class DiTBlock(nn.Module):
    """Transformer block with adaLN-Zero conditioning (figure 3, right); cross-attention with captions.

    With a value residual the first block also returns its values, which the others take.
    """

    def __init__(self, width: int, heads: int, options: DiTOptions, *, takes_text: bool, is_first: bool) -> None:
        super().__init__()
        self.norm1 = TokenNorm(options.norm, width)
        self.attn = Attention(width, heads, options, is_first=is_first)
        self.gives_values = options.value_residual and is_first
        self.norm_cross = TokenNorm(options.norm, width) if takes_text else None
        self.cross_attn = CrossAttention(width, heads, options) if takes_text else None
        self.norm2 = TokenNorm(options.norm, width)
        self.mlp = SwiGLU(width) if options.mlp == "swiglu" else Mlp(width)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(
        self,
        x: Tensor,
        c: Tensor,
        rotation: Rotation | None = None,
        captions: Tensor | None = None,
        layout: CaptionLayout | None = None,
        first_values: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        modulation = at_least_float32(self.adaLN_modulation(c))  # 1 + scale would round away a small scale in 16 bits
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, dim=1)
        attended, values = self.attn(modulate(self.norm1(x), shift_msa, scale_msa), rotation, first_values)
        x = add_gated(x, gate_msa, attended)
        if self.cross_attn is not None and self.norm_cross is not None:
            assert captions is not None
            assert layout is not None
            x = x + self.cross_attn(self.norm_cross(x), captions, layout).to(x.dtype)
        x = add_gated(x, gate_mlp, self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp)))
        return (x, values) if self.gives_values else x


class FinalLayer(nn.Module):
    """Tokens (B, T, E) to patches (B, T, p * p * out_channels), and the modulated tokens."""

    def __init__(self, width: int, patch: int, out_channels: int, options: DiTOptions) -> None:
        super().__init__()
        self.norm_final = TokenNorm(options.norm, width)
        self.linear = nn.Linear(width, patch * patch * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale = at_least_float32(self.adaLN_modulation(c)).chunk(2, dim=1)
        modulated = modulate(self.norm_final(x), shift, scale)
        return self.linear(modulated), modulated


class DiT(GridModel):
    """The diffusion transformer, conditioned on classes or on captions.

    Attributes:
      blocks: that are compiled, sharded and checkpointed one by one.
      roles: what its layers do: see ``roles.py``.
      residual: dtype of the residual stream under autocast to bfloat16; in any other precision it is float32.
      routed: the first and the last block that routed tokens skip.
    """

    roles: ClassVar[RolePatterns] = {
        "hidden": ("blocks.*.attn.*", "blocks.*.cross_attn.*", "blocks.*.mlp.*"),
        "modulation": ("*.adaLN_modulation.1",),
        "embedding": ("x_embedder.proj", "t_embedder.*", "y_embedder.*", "class_token.embed"),
        "head": ("final_layer.linear", "class_token.velocity"),
        "projector": ("fusion.proj", "projectors.*"),
    }
    residual: Literal["float32", "bf16"] = "float32"
    routed: tuple[int, int] = (0, 0)

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        depth, width, heads, patch = size_of(spec.name)
        self.patch, self.out_channels, self.options = patch, spec.out_channels, spec.options
        self.head_width, self.base_grid = width // heads, spec.base_size // patch
        self.takes_text = spec.takes_text
        self.x_embedder = PatchEmbed(patch, spec.channels, width)
        self.t_embedder = TimestepEmbedder(width)
        if spec.takes_text:
            self.y_embedder = CaptionEmbedder(spec.caption_width, width)
        else:
            self.y_embedder = LabelEmbedder(spec.num_classes, width)
        grid = self.base_grid
        table = None if spec.options.positions == "rope" else position_table(grid, grid, width, grid)[None]
        self.register_buffer("pos_embed", table)  # of the base size alone, as in published checkpoints
        kind = {"takes_text": spec.takes_text}
        blocks = (DiTBlock(width, heads, spec.options, **kind, is_first=number == 0) for number in range(depth))
        self.blocks = nn.ModuleList(blocks)
        self.final_layer = FinalLayer(width, patch, spec.out_channels, spec.options)
        self.class_token = ClassToken(spec.class_width, width, spec.options) if spec.class_width else None
        self.fusion = Fusion(width) if spec.fused else None
        self.routed = spec.fused or self.routed
        self.projected = spec.projectors
        self.projectors = nn.ModuleDict({name: projector(one, width) for name, one in spec.projectors.items()})
        self.initialize_weights()

    def initialize_weights(self) -> None:
        """Initialize as the paper does: xavier, small embeddings, zeros that make each block the identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        patches = self.x_embedder.proj
        nn.init.xavier_uniform_(patches.weight.view(len(patches.weight), -1))
        assert patches.bias is not None
        nn.init.zeros_(patches.bias)
        for name, parameter in (*self.y_embedder.named_parameters(), *self.t_embedder.named_parameters()):
            if name.endswith("weight") and parameter.ndim > 1:  # not the gain of a norm
                nn.init.normal_(parameter, std=INIT_STD)
        zeroed = [*layers_of(self, "modulation", "head").values()]
        zeroed += [module.proj for module in self.modules() if isinstance(module, CrossAttention)]
        for layer in zeroed:
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
        if self.fusion is not None:
            self.fusion.initialize_weights()

    def forward(
        self, x: Tensor, t: Tensor, conditioning: Conditioning, extras: Extras | None = None
    ) -> Tensor | ModelOutput:
        """Predict noise (and variance), or velocity.

        Args:
          x: (B, C, H, W) noisy latents.
          t: (B,) time in 0..1000.
        Returns: (B, out_channels, H, W); with extras, it and what they ask for.
        Raises: ValueError: the model denoises a class token, and none is given.
        """
        rows, columns = x.shape[2] // self.patch, x.shape[3] // self.patch
        more, text, layout = extras or NO_EXTRAS, None, None
        tokens = self.x_embedder(x)
        if self.pos_embed is not None:
            tokens = tokens + self.position_table(rows, columns)
        tokens = residual_stream(tokens, self.residual)  # (B, T, E)
        rotation = None if self.options.positions == "sincos" else self.rotation(rows, columns, self.head_width)
        with without_autocast(x.device):
            c = self.t_embedder(self.embedded_time(t))  # (B, E)
            if not self.takes_text:
                c = c + self.y_embedder(conditioning.labels)
        if self.takes_text:
            text, layout = arrange_captions(conditioning.valid_captions, self.head_width)
            text = self.y_embedder(text)  # (n, E) or (B, L, E)
        if self.class_token is not None:
            if more.class_token is None:
                raise ValueError("the model denoises a class token, and none is given")
            tokens = torch.cat([self.class_token(more.class_token).to(tokens.dtype), tokens], dim=1)
            rotation = rotation and with_class_rotation(rotation)
        tokens, projected, watched = self.run_blocks(tokens, c, rotation, text, layout, more, (rows, columns))
        patches, modulated = self.final_layer(tokens, c)
        velocity = None
        if self.class_token is not None:
            velocity, patches = self.class_token.velocity(modulated[:, 0]), patches[:, 1:]
        patches = patches.unflatten(2, (self.patch, self.patch, -1)).unflatten(1, (rows, columns))
        output = patches.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)
        if self.options.time == "to_data":
            output, velocity = -output, None if velocity is None else -velocity
        return output if extras is None else ModelOutput(output, velocity, projected, watched)

    def run_blocks(
        self,
        x: Tensor,
        c: Tensor,
        rotation: Rotation | None,
        captions: Tensor | None,
        layout: CaptionLayout | None,
        extras: Extras,
        grid: tuple[int, int],
    ) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """The blocks, with only some tokens in the routed ones; projections of tokens, and the watched block's."""
        has_class = self.class_token is not None
        rows = extras.kept  # (B, K) places in the sequence, which the class token begins; it always stays
        if rows is not None and has_class:
            rows = torch.cat([rows.new_zeros(len(rows), 1), rows + 1], dim=1)
        before, kept_rotation, projected, watched = x, rotation, dict[str, Tensor](), None
        values = kept_values = None
        for number, block in enumerate(self.blocks, 1):
            if number == self.routed[0]:
                before = x
                if rows is not None:
                    x = x.take_along_dim(rows[:, :, None], 1)
                    if rotation is not None:  # (B, 1, K, 2, d/4) each, the same for all heads
                        kept_rotation = rotation[0][rows][:, None], rotation[1][rows][:, None]
                    if values is not None:  # (B, heads, K, d)
                        kept_values = values.take_along_dim(rows[:, None, :, None], 2)
            x = block(x, c, kept_rotation, captions, layout, kept_values)
            if isinstance(x, tuple):  # the first block with a value residual
                x, values = x
                kept_values = values
            for name, spec in self.projected.items():
                if extras.projected != 0 and spec.block == number:
                    projected[name] = _projected(self.projectors[name], x[:, : extras.projected], grid)
            watched = x[:, has_class:] if number == extras.watched else watched
            if number == self.routed[1]:
                if self.fusion is not None:
                    x = self.fusion(before, x, rows, extras.without_path)
                elif rows is not None:
                    x = put_tokens(before, rows, x)
                kept_rotation, kept_values = rotation, values
        return x, projected, watched

    def embedded_time(self, t: Tensor) -> Tensor:
        """(B,) time in 0..1000, from data to noise, as the time embedding takes it."""
        if self.options.time == "steps":
            return t
        share = at_least_float32(t) / 1000
        return 1 - share if self.options.time == "to_data" else share


# ------------------------------------------------------------------------------------------------- tokens that skip


def put_tokens(x: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """(B, T, E) with the tokens (B, K, E) in their rows, as a new tensor."""
    return x.scatter(1, rows[:, :, None].expand(-1, -1, x.shape[2]), tokens)


def with_class_rotation(rotation: Rotation) -> Rotation:
    """Rotation of a sequence whose first token, the class token, stays as it is."""
    cos, sin = rotation
    return torch.cat([torch.ones_like(cos[:1]), cos]), torch.cat([torch.zeros_like(sin[:1]), sin])


class Fusion(nn.Module):
    """Fuses all tokens before the routed blocks with those after them; a mask token stands for skipped ones.

    It begins as the mean of both.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(2 * width, width)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Zeros, and half of each side."""
        self.mask.zero_()
        eye = torch.eye(self.proj.out_features)
        self.proj.weight.copy_(torch.cat([eye, eye], dim=1) / 2)
        self.proj.bias.zero_()

    def forward(self, before: Tensor, after: Tensor, rows: Tensor | None, without_path: Tensor | None = None) -> Tensor:
        """(B, T, E) and (B, T or K, E) to (B, T, E); images of ``without_path`` (B,) have the mask token alone."""
        mask = self.mask.to(after.dtype).expand(before.shape)
        # Without skipped tokens the mask has a gradient too, zero: ranks reduce the same ones at every step.
        after = after + 0 * mask if rows is None else put_tokens(mask, rows, after)
        if without_path is not None:
            after = torch.where(without_path[:, None, None], mask, after)
        return self.proj(torch.cat([before.to(after.dtype), after], dim=2)).to(before.dtype)


# ------------------------------------------------------------------------------------------------- image features


class ClassToken(nn.Module):
    """The noisy class token of an image feature as a token of the sequence, and its velocity from there."""

    def __init__(self, feature_width: int, width: int, options: DiTOptions) -> None:
        super().__init__()
        self.embed = nn.Linear(feature_width, width)
        self.norm = GainNorm(width) if options.norm == "rms" else nn.LayerNorm(width, eps=NORM_EPS)
        self.velocity = nn.Linear(width, feature_width)

    def forward(self, token: Tensor) -> Tensor:
        """(B, D) to (B, 1, E)."""
        return self.norm(self.embed(token)).unsqueeze(1)


def _projected(layer: nn.Module, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """(B, T, E) to (B, T, D); a convolution sees the tokens in their grid, or in a row if they are not all there."""
    if not isinstance(layer, nn.Conv2d):
        return layer(tokens)
    count = tokens.shape[1]
    image = tokens.mT.unflatten(2, grid if count == grid[0] * grid[1] else (1, count))
    return layer(image).flatten(2).mT


def projector(spec: ProjectorSpec, width: int) -> nn.Module:
    """Three linear maps with SiLU between, (..., E) to (..., D); or a convolution of 3 x 3 tokens."""
    if spec.kind == "conv":
        return nn.Conv2d(width, spec.feature_width, 3, padding=1)
    widths = (width, spec.width, spec.width, spec.feature_width)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.SiLU())]
    return nn.Sequential(*layers[:-1])
