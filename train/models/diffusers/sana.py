"""Sana: linear attention over the latents of an autoencoder that shrinks 32 times (arXiv 2410.10629).

Its code rounds the time down to whole numbers, in training too. Here training keeps it as drawn, and the sampler "dpm",
with which its pipeline draws, rounds it. First weights: NVlabs/Sana's ``sana_multi_scale.py``.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from ..spec import ModelSpec
from .adaln_single import AdaLNSingle, LinearProcessor
from .model import Config

# Side of the base grid in tokens -> scale of positions, as in Sana's configurations; smaller ones have none.
POSITIONS = {64: 1.0, 128: 2.0}
CAPTION_NORM_GAIN = 0.01  # of the norm of captions at the start (y_norm_scale_factor of its configurations)


def size(depth: int, heads: int, head_width: int, cross_heads: int, cross_head_width: int) -> Config:
    """The arguments of a size (table 1)."""
    return {
        "num_layers": depth,
        "num_attention_heads": heads,
        "attention_head_dim": head_width,
        "num_cross_attention_heads": cross_heads,
        "cross_attention_head_dim": cross_head_width,
        "cross_attention_dim": heads * head_width,
        "mlp_ratio": 2.5,
    }


class Sana(AdaLNSingle):
    """Sana."""

    transformer_class, pipeline_class = "sana_transformer.SanaTransformer2DModel", "SanaPipeline"
    family, recipe, patch = "sana", "sana-512", 1
    sizes = {  # noqa: RUF012
        "sana-600m": size(28, 36, 32, 16, 72),
        "sana-1600m": size(20, 70, 32, 20, 112),
        "sana-tiny": size(4, 8, 32, 4, 64),
    }
    text_width, downscale, vae = 2304, 32, "AutoencoderDC"
    rounds_times = True
    roles = {  # noqa: RUF012
        "hidden": ("*.attn1.to_*", "*.attn2.to_*", "*.ff.conv_*"),
        "modulation": ("time_embed.linear",),
        "embedding": ("patch_embed.proj", "time_embed.*_embedder.*", "caption_projection.*"),
        "head": ("proj_out",),
    }
    embed_name, time_name, has_convolutions = "patch_embed", "time_embed", True
    binned_sides = (16, 32, 64, 128)

    @classmethod
    def config(cls, spec: ModelSpec) -> Config:
        scale = POSITIONS.get(spec.base_size)
        return super().config(spec) | {"sample_size": spec.base_size, "interpolation_scale": scale}

    def optimize(self) -> None:
        super().optimize()
        for block in cast(Any, self.blocks):
            block.attn1.set_processor(LinearProcessor())

    def embed_captions(self, captions: Tensor) -> Tensor:
        return self.net.caption_norm(super().embed_captions(captions))

    def initialize_weights(self) -> None:
        """Initialize like PixArt, but the output too is Xavier, and the norm of captions has a small gain."""
        super().initialize_weights()
        nn.init.constant_(self.net.caption_norm.weight, CAPTION_NORM_GAIN)
