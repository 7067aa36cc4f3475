"""FLUX.1 (Black Forest Labs 2024): blocks of two streams, then of one over captions and image.

First weights: those of torchtitan's Flux trainer, with which MLPerf trains schnell's architecture from scratch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ...objectives.shift import TimeShift
from ..conditioning import Conditioning
from ..spec import ModelSpec, TextInput
from .model import (
    T5,
    TWO_STREAMS,
    Config,
    DiffusersModel,
    initialize,
    keep_streams,
    pack_all,
    stream_projections,
    unpack,
)

# Of a block of one stream: queries, keys, values and the first layer of the feed-forward, one matrix as published.
SINGLE_INPUTS = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")


def size(depth: int, single_depth: int, heads: int, axes: tuple[int, ...], *, distilled: bool = False) -> Config:
    """The arguments of a size.

    Args:
      single_depth: blocks of one stream.
      axes: numbers of a head that turn with each axis of its positions; their sum is the width of a head.
      distilled: it takes the guidance as an input.
    """
    return {
        "num_layers": depth,
        "num_single_layers": single_depth,
        "num_attention_heads": heads,
        "attention_head_dim": sum(axes),
        "axes_dims_rope": list(axes),
        "guidance_embeds": distilled,
    }


class Flux1(DiffusersModel):
    """FLUX.1, which reads T5's padding."""

    transformer_class, pipeline_class = "transformer_flux.FluxTransformer2DModel", "FluxPipeline"
    family, recipe, patch, is_flow, takes_guidance = "flux1", "flux1-1024", 1, True, True
    sizes = {  # noqa: RUF012
        "flux1-dev": size(19, 38, 24, (16, 56, 56), distilled=True),
        "flux1-schnell": size(19, 38, 24, (16, 56, 56)),
        "flux1-tiny": size(2, 4, 4, (8, 12, 12)),
    }
    text_classes = ({"clip": ("CLIPTextModel", "CLIPTokenizer")}, T5)
    texts = (
        TextInput(name="CLIP-L", tokens=0, width=768, pooled_width=768),
        TextInput(name="T5", tokens=512, width=4096),
    )
    roles = {  # noqa: RUF012
        "hidden": ("*.attn.*", "*.ff.*", "*.ff_context.*", "*.proj_mlp", "single_transformer_blocks.*.proj_out"),
        "modulation": ("*.norm1.linear", "*.norm1_context.linear", "*.norm.linear", "norm_out.linear"),
        "embedding": ("x_embedder", "context_embedder", "time_text_embed.*"),
        "head": ("proj_out",),
    }
    adapted, takes_reference = TWO_STREAMS, True
    resolution_shift = TimeShift(rule="tokens")
    guidance_argument = 'true_cfg_scale=G, negative_prompt=""'

    @classmethod
    def needs(cls, spec: ModelSpec) -> Config:
        channels = {"in_channels": 4 * spec.channels, "out_channels": 4 * spec.out_channels}
        return channels | {"joint_attention_dim": spec.caption_width, "pooled_projection_dim": spec.pooled_width}

    @classmethod
    def patch_side(cls, spec: ModelSpec) -> int:
        return 2  # squares of latent pixels are packed before the class sees them

    def optimize(self) -> None:
        keep_streams(self, self.net.x_embedder, self.net.context_embedder)

    def initialize_weights(self) -> None:
        """Zeros for modulations and the output."""
        net = cast(Any, self.net)
        fused = stream_projections(net.transformer_blocks)
        for block in net.single_transformer_blocks:
            fused += [(block, SINGLE_INPUTS)]
        initialize(net, fused, net.x_embedder, [net.time_text_embed], self.zeroed)

    def inputs(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Config:
        captions: Any = conditioning.captions
        rows, columns = (torch.arange(side // 2, device=x.device) for side in x.shape[2:])
        images = conditioning.images(x)  # Kontext numbers the image to edit 1
        ids = [torch.cartesian_prod(rows.new_full((1,), number), rows, columns) for number in range(len(images))]
        return {
            "hidden_states": pack_all(images),
            "timestep": t / 1000,
            "guidance": torch.full_like(t, self.guidance) if self.net.config.guidance_embeds else None,
            "encoder_hidden_states": captions,
            "pooled_projections": conditioning.pooled,
            "img_ids": torch.cat(ids),
            "txt_ids": rows.new_zeros(captions.shape[1], 3),
        }

    def velocity(self, output: Any, x: Tensor) -> Tensor:
        return unpack(output, x)

    @property
    def blocks(self) -> nn.ModuleList:
        return nn.ModuleList([*self.net.transformer_blocks, *self.net.single_transformer_blocks])
