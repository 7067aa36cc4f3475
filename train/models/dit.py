"""DiT: the diffusion transformer of Peebles and Xie 2023, with the parameter names of the published checkpoints.

Shapes: B batch, C latent channels, H W latent size, p patch, T = (H/p)(W/p) image tokens, E width, L caption tokens, D
caption width. H and W are multiples of p; checkpoints hold the position table of the base size only.

Without options it is the published model. With captions instead of labels, each block has cross-attention between
attention and feed-forward, as in PixArt (arXiv 2310.00426, section 2.3).

Source: "Scalable Diffusion Models with Transformers", arXiv 2212.09748, section 3 and table 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from ...datasets.batches.captions import Captions
from .conditioning import Extras, ModelOutput
from .cross_attention import CaptionLayout, arrange_captions
from .layers import (
    Attention,
    CaptionEmbedder,
    CrossAttention,
    DiTOptions,
    LabelEmbedder,
    Mlp,
    PatchEmbed,
    Rotation,
    SwiGLU,
    TimestepEmbedder,
    TokenNorm,
    add_gated,
    modulate,
    position_table,
    rotation_table,
)
from .numerics import at_least_float32, without_autocast
from .spec import ProjectorSpec
from .token_paths import (
    ClassToken,
    Fusion,
    projector,
    put_tokens,
    rows_kept,
    take_rotation,
    take_tokens,
    with_class_rotation,
)

# name -> depth, width, heads (table 1); the first is not published: for small pictures, and to compare recipes on a CPU
SIZES = {"Ti": (8, 128, 4), "S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}
PATCHES = (1, 2, 4, 8)
PUBLISHED = DiTOptions()


def size_of(name: str) -> tuple[int, int, int, int]:
    """Depth, width, heads and patch of "DiT-{size}/{patch}"."""
    size, patch = name.removeprefix("DiT-").split("/")
    return *SIZES[size], int(patch)


class DiTBlock(nn.Module):
    """Transformer block with adaLN-Zero conditioning (figure 3, right); cross-attention with captions."""

    def __init__(self, width: int, heads: int, options: DiTOptions, *, takes_text: bool) -> None:
        super().__init__()
        self.norm1 = TokenNorm(options.norm, width)
        self.attn = Attention(width, heads, options)
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
    ) -> Tensor:
        modulation = at_least_float32(self.adaLN_modulation(c))  # 1 + scale would round away a small scale in 16 bits
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, dim=1)
        x = add_gated(x, gate_msa, self.attn(modulate(self.norm1(x), shift_msa, scale_msa), rotation))
        if self.cross_attn is not None and self.norm_cross is not None:
            assert captions is not None
            assert layout is not None
            x = x + self.cross_attn(self.norm_cross(x), captions, layout).to(x.dtype)
        return add_gated(x, gate_mlp, self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp)))


class FinalLayer(nn.Module):
    """Tokens (B, T, E) to patches (B, T, p * p * out_channels)."""

    def __init__(self, width: int, patch: int, out_channels: int, options: DiTOptions) -> None:
        super().__init__()
        self.norm_final = TokenNorm(options.norm, width)
        self.linear = nn.Linear(width, patch * patch * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Patches, and the tokens they are computed from."""
        shift, scale = at_least_float32(self.adaLN_modulation(c)).chunk(2, dim=1)
        modulated = modulate(self.norm_final(x), shift, scale)
        return self.linear(modulated), modulated


class DiT(nn.Module):
    """The diffusion transformer, conditioned on classes or on captions.

    Args:
      depth, width, heads, patch: the size.
      channels: C of the latents.
      out_channels: 2C with learned variance, else C.
      num_classes: without the null class.
      base_size: latent height and width of the position table in the checkpoint.
      caption_width: D; 0: conditioned on classes.
      options: changes to the published model.
      projectors: of blocks' tokens to image features, by name.
      fused: blocks, from 1, around which the tokens before and after are fused (SPRINT).

    Attributes:
      residual: dtype of the residual stream under autocast to bfloat16; in any other precision it is float32.
      routed: the first and the last block that routed tokens skip.
    """

    residual: Literal["float32", "bf16"] = "float32"
    routed: tuple[int, int] = (0, 0)

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
        caption_width: int = 0,
        options: DiTOptions = PUBLISHED,
        projectors: Mapping[str, ProjectorSpec] = {},
        fused: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.patch, self.out_channels, self.num_classes = patch, out_channels, num_classes
        self.options = options
        self.head_width, self.base_grid = width // heads, base_size // patch
        self.x_embedder = PatchEmbed(patch, channels, width)
        self.t_embedder = TimestepEmbedder(width)
        self.takes_text = caption_width > 0
        self.y_embedder = CaptionEmbedder(caption_width, width) if caption_width else LabelEmbedder(num_classes, width)
        self.pos_embed: Tensor | None
        table = None
        if options.positions != "rope":
            table = position_table(self.base_grid, self.base_grid, width, self.base_grid)[None]
        self.register_buffer("pos_embed", table)
        self.blocks = nn.ModuleList(DiTBlock(width, heads, options, takes_text=self.takes_text) for _ in range(depth))
        self.final_layer = FinalLayer(width, patch, out_channels, options)
        self._projected = dict(projectors)
        class_width = max((one.feature_width for one in projectors.values() if one.has_class), default=0)
        self.class_token = ClassToken(class_width, width) if class_width else None
        self.fusion = Fusion(width) if fused else None
        self.routed = fused or self.routed
        self.projectors = nn.ModuleDict({name: projector(one, width) for name, one in projectors.items()})
        self._tables: dict[tuple[int, int, torch.device], Tensor] = {}
        self._rotations: dict[tuple[int, int, torch.device], Rotation] = {}
        self.initialize_weights()

    def initialize_weights(self) -> None:
        """Initialise as the paper does: xavier, small embeddings, zeros that make each block the identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        patch_weight = self.x_embedder.proj.weight
        nn.init.xavier_uniform_(patch_weight.view(patch_weight.shape[0], -1))
        assert self.x_embedder.proj.bias is not None
        nn.init.zeros_(self.x_embedder.proj.bias)
        for name, parameter in (*self.y_embedder.named_parameters(), *self.t_embedder.named_parameters()):
            if name.endswith("weight") and parameter.ndim > 1:  # not the gain of a norm
                nn.init.normal_(parameter, std=0.02)
        modulated = [module for module in self.modules() if isinstance(module, (DiTBlock, FinalLayer))]
        crossing = [module.proj for module in self.modules() if isinstance(module, CrossAttention)]
        for added in (self.class_token, self.fusion):
            if added is not None:
                added.reset()
        for zeroed in (*(module.adaLN_modulation for module in modulated), *crossing, self.final_layer.linear):
            for parameter in zeroed.parameters():
                nn.init.zeros_(parameter)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        captions: Captions | None = None,
        extras: Extras | None = None,
    ) -> Tensor | ModelOutput:
        """Predict noise (and variance), or velocity.

        Args:
          x: (B, C, H, W) noisy latents.
          t: (B,) time in 0..1000.
          y: (B,) int64 class index, ``num_classes`` for null.
          captions: of B images, instead of labels.
        Returns: (B, out_channels, H, W); with extras, it and what they ask for.
        Raises: ValueError: the model denoises a class token, and none is given.
        """
        rows, columns = x.shape[2] // self.patch, x.shape[3] // self.patch
        x, rotation = self.embed_patches(x, rows, columns)  # (B, T, E)
        text, layout = None, None
        with without_autocast(x.device):
            c = self.t_embedder(self.embedded_time(t))  # (B, E)
            if not self.takes_text:
                c = c + self.y_embedder(y)
        if self.takes_text:
            assert captions is not None
            text, layout = arrange_captions(captions, self.head_width)
            text = self.y_embedder(text)  # (n, E) or (B, L, E)
        more = extras or Extras()
        x, rotation = self.join_class_token(x, rotation, more.class_token)
        x, projected, watched = self.run_blocks(x, c, rotation, text, layout, more)
        patches, tokens = self.final_layer(x, c)
        velocity = None
        if self.class_token is not None:
            velocity, patches = self.class_token.velocity(tokens[:, 0]), patches[:, 1:]
        output = self.unpatchify(patches, rows, columns)
        if self.options.time == "to_data":
            output, velocity = -output, None if velocity is None else -velocity
        return output if extras is None else ModelOutput(output, velocity, projected, watched)

    def join_class_token(
        self, x: Tensor, rotation: Rotation | None, token: Tensor | None
    ) -> tuple[Tensor, Rotation | None]:
        """Put the noisy class token before the image tokens."""
        if self.class_token is None:
            return x, rotation
        if token is None:
            raise ValueError("the model denoises a class token, and none is given")
        x = torch.cat([self.class_token(token).to(x.dtype), x], dim=1)
        return x, rotation if rotation is None else with_class_rotation(rotation)

    def run_blocks(
        self,
        x: Tensor,
        c: Tensor,
        rotation: Rotation | None,
        captions: Tensor | None,
        layout: CaptionLayout | None,
        extras: Extras,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """The blocks, with only some tokens in the routed ones; projections of tokens, and the watched block's."""
        has_class = self.class_token is not None
        rows = None if extras.kept is None else rows_kept(extras.kept, has_class=has_class)
        before, turned, projected, watched = x, rotation, dict[str, Tensor](), None
        for number, block in enumerate(self.blocks, 1):
            if number == self.routed[0]:
                before = x
                if rows is not None:
                    x, turned = take_tokens(x, rows), rotation and take_rotation(rotation, rows)
            x = block(x, c, turned, captions, layout) if self.takes_text else block(x, c, turned)
            for name, spec in self._projected.items():
                if extras.projected != 0 and spec.block == number:
                    projected[name] = self.projectors[name](x[:, : extras.projected])
            watched = x[:, has_class:] if number == extras.watched else watched
            if number == self.routed[1]:
                if self.fusion is not None:
                    x = self.fusion(before, x, rows)
                elif rows is not None:
                    x = put_tokens(before, rows, x)
                turned = rotation
        return x, projected, watched

    def embedded_time(self, t: Tensor) -> Tensor:
        """(B,) time in 0..1000, from data to noise, as the time embedding takes it."""
        if self.options.time == "steps":
            return t
        share = at_least_float32(t) / 1000
        return 1 - share if self.options.time == "to_data" else share

    def embed_patches(self, x: Tensor, rows: int, columns: int) -> tuple[Tensor, Rotation | None]:
        """Tokens with their positions, in the dtype of the residual stream, and the rotation of queries and keys.

        The published code adds the position table in float32, so its stream is float32 under autocast too. A bfloat16
        stream halves the bytes that are read and written for it; float16 has too small a range for it.
        """
        embedded = self.x_embedder(x)
        narrow = self.residual == "bf16" and embedded.dtype == torch.bfloat16
        stream = torch.bfloat16 if narrow else at_least_float32(embedded).dtype
        rotation = self.rotation(rows, columns) if self.options.positions != "sincos" else None
        if self.pos_embed is not None:
            embedded = embedded + self.position_table(rows, columns)
        return embedded.to(stream), rotation

    def unpatchify(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """(B, T, p * p * out_channels) to (B, out_channels, H, W)."""
        p = self.patch
        x = x.view(-1, rows, columns, p, p, self.out_channels)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, self.out_channels, rows * p, columns * p)

    def position_table(self, rows: int, columns: int) -> Tensor:
        """Sine-cosine positions (1, T, E) of a grid of tokens; computed once for each size and device."""
        assert self.pos_embed is not None
        if rows == columns == self.base_grid:
            return self.pos_embed
        key = (rows, columns, self.pos_embed.device)
        if key not in self._tables:
            with torch.inference_mode(False):  # a table made while sampling may be used in training later
                table = position_table(rows, columns, self.pos_embed.shape[2], self.base_grid)
                self._tables[key] = table[None].to(self.pos_embed)
        return self._tables[key]

    def rotation(self, rows: int, columns: int) -> Rotation:
        """Rotary positions of a grid of tokens, likewise."""
        weight = self.x_embedder.proj.weight
        key = (rows, columns, weight.device)
        if key not in self._rotations:
            with torch.inference_mode(False):
                dtype = torch.promote_types(weight.dtype, torch.float32)
                cos, sin = rotation_table(rows, columns, self.head_width, self.base_grid)
                self._rotations[key] = cos.to(weight.device, dtype), sin.to(weight.device, dtype)
        return self._rotations[key]
