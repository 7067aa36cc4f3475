"""Stable Diffusion 3 and 3.5, in which captions are a stream of their own (Esser et al. 2024, arXiv 2403.03206).

Its trainer is not published: first weights are as DiT's (``initialize_weights`` in its ``models.py``).
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from ....errors import RecipeError
from ...objectives.shift import TimeShift
from ..conditioning import Conditioning
from ..spec import ModelSpec, TextInput
from .model import (
    ATTENTION,
    T5,
    TEXT_ATTENTION,
    TWO_STREAMS,
    Config,
    DiffusersModel,
    add_positions,
    initialize,
    keep_streams,
)

CLIP = {"clip": ("CLIPTextModelWithProjection", "CLIPTokenizer")}


def size(depth: int, heads: int, head_width: int, *, positions: int, dual: int = 0, qk_norm: bool = True) -> Config:
    """The arguments of a size.

    Args:
      positions: side of the table of positions, in tokens.
      dual: so many of the first blocks have two attentions.
    """
    return {
        "num_layers": depth,
        "num_attention_heads": heads,
        "attention_head_dim": head_width,
        "caption_projection_dim": heads * head_width,
        "sample_size": 128,  # side in latent pixels that the positions span
        "pos_embed_max_size": positions,
        "dual_attention_layers": list(range(dual)),
        "qk_norm": "rms_norm" if qk_norm else None,
    }


class SD3(DiffusersModel):
    """A transformer of two streams.

    The last block gives no captions, and some have two attentions, so that they compile to two or three graphs.
    """

    transformer_class, pipeline_class = "transformer_sd3.SD3Transformer2DModel", "StableDiffusion3Pipeline"
    family, recipe, patch = "sd3", "sd3-512", 2
    sizes = {  # noqa: RUF012
        "sd3-medium": size(24, 24, 64, positions=192, qk_norm=False),
        "sd3.5-medium": size(24, 24, 64, positions=384, dual=13),
        "sd3.5-large": size(38, 38, 64, positions=192),
        "sd3-tiny": size(6, 6, 32, positions=96, dual=2),
    }
    text_classes = (CLIP, CLIP, T5)
    texts = (
        TextInput(name="CLIP-L", tokens=77, width=768, pooled_width=768),
        TextInput(name="CLIP-G", tokens=77, width=1280, pooled_width=1280, beside=True),
        TextInput(name="T5", tokens=256, width=4096),
    )
    roles = {  # noqa: RUF012
        "hidden": ("*.attn.*", "*.attn2.*", "*.ff.*", "*.ff_context.*"),
        "modulation": ("*.norm1.linear", "*.norm1_context.linear", "norm_out.linear"),
        "embedding": ("pos_embed.proj", "context_embedder", "time_text_embed.*"),
        "head": ("proj_out",),
    }
    resolution_shift = TimeShift(rule="tokens", most=1.16)
    adapted, drawn_px = TWO_STREAMS, 0

    @classmethod
    def needs(cls, spec: ModelSpec) -> Config:
        widths = {"joint_attention_dim": spec.caption_width, "pooled_projection_dim": spec.pooled_width}
        return {"in_channels": spec.channels, "out_channels": spec.out_channels} | widths

    @classmethod
    def config_to_draw(cls, config: Config, side: int) -> Config:
        """Positions are a table among the weights, so that sample_size is only drawn."""
        return config | {"sample_size": side // config["patch_size"] * config["patch_size"]}

    @classmethod
    def most_tokens(cls, spec: ModelSpec) -> int:
        return (spec.config or cls.sizes[spec.name])["pos_embed_max_size"]

    def optimize(self) -> None:
        add_positions(self.net.pos_embed)
        keep_streams(self, self.net.pos_embed, self.net.context_embedder)

    def initialize_weights(self) -> None:
        """Queries, keys and values of a stream as one matrix; zeros for modulations and the output."""
        net = cast(Any, self.net)
        fused = []
        for block in net.transformer_blocks:
            fused += [(block.attn, ATTENTION[:3]), (block.attn, TEXT_ATTENTION)]
            fused += [(block.attn2, ATTENTION[:3])] if block.attn2 is not None else []
        initialize(net, fused, net.pos_embed.proj, [net.time_text_embed], self.zeroed)

    def inputs(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Config:
        """Raises RecipeError if an image is larger than the table of positions."""
        rows, columns = (side // self.net.config.patch_size for side in x.shape[2:])
        if max(rows, columns) > (most := self.net.config.pos_embed_max_size):
            raise RecipeError(f"{rows} x {columns} tokens: the model's table has positions for {most} a side.")
        text = {"encoder_hidden_states": conditioning.captions, "pooled_projections": conditioning.pooled}
        return {"hidden_states": x, "timestep": t} | text
