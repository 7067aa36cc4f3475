"""Stable Diffusion 3 and 3.5, in which captions are a stream of their own (Esser et al. 2024, arXiv 2403.03206).

Its trainer is not published: first weights are as DiT's (``initialize_weights`` in its ``models.py``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ....datasets.errors import RecipeError
from ..conditioning import Conditioning
from ..spec import ModelSpec
from .attention import JointProcessor
from .model import (
    ATTENTION,
    Config,
    DiffusersModel,
    TextRole,
    initialize_embedders,
    initialize_fused,
    initialize_linear,
    initialize_patches,
)

TEXT_ATTENTION = ("add_q_proj", "add_k_proj", "add_v_proj")


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

    family, recipe, patch = "sd3", "sd3-512", 2
    sizes = {  # noqa: RUF012
        "sd3-medium": size(24, 24, 64, positions=192, qk_norm=False),
        "sd3.5-medium": size(24, 24, 64, positions=384, dual=13),
        "sd3.5-large": size(38, 38, 64, positions=192),
        "sd3-tiny": size(6, 6, 32, positions=96, dual=2),
    }
    texts = (
        TextRole("CLIP-L", 77, 768, pooled_width=768),
        TextRole("CLIP-G", 77, 1280, pooled_width=1280, beside=True),
        TextRole("T5", 256, 4096),
    )
    adapted = tuple(f"attn.{name}" for name in (*ATTENTION, *TEXT_ATTENTION, "to_add_out"))

    @staticmethod
    def transformer() -> Any:
        from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

        return SD3Transformer2DModel

    @classmethod
    def needs(cls, spec: ModelSpec) -> Config:
        widths = {"joint_attention_dim": spec.caption_width, "pooled_projection_dim": spec.pooled_width}
        return {"in_channels": spec.channels, "out_channels": spec.out_channels} | widths

    @classmethod
    def most_tokens(cls, spec: ModelSpec) -> int:
        return (spec.config or cls.sizes[spec.name])["pos_embed_max_size"]

    def optimize(self) -> None:
        self.net.pos_embed = CroppedPatchEmbed(self.net.pos_embed)
        for embed in (self.net.pos_embed, self.net.context_embedder):
            embed.register_forward_hook(lambda _, inputs, tokens: self.start_stream(tokens))
        for block in self.net.transformer_blocks:
            for attention in (block.attn, block.attn2):
                if attention is not None:
                    attention.set_processor(JointProcessor())

    def initialize(self) -> None:
        """Queries, keys and values of a stream as one matrix; zeros for modulations and the output."""
        initialize_linear(self.net)
        for block in self.net.transformer_blocks:
            initialize_fused(block.attn, *ATTENTION[:3])
            initialize_fused(block.attn, *TEXT_ATTENTION)
            if block.attn2 is not None:
                initialize_fused(block.attn2, *ATTENTION[:3])
            nn.init.zeros_(block.norm1.linear.weight)
            nn.init.zeros_(block.norm1_context.linear.weight)
        initialize_patches(self.net.pos_embed.proj)
        initialize_embedders(self.net.time_text_embed)
        nn.init.zeros_(self.net.norm_out.linear.weight)
        nn.init.zeros_(self.net.proj_out.weight)

    def inputs(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> dict[str, Any]:
        text = {"encoder_hidden_states": conditioning.captions, "pooled_projections": conditioning.pooled}
        return {"hidden_states": x, "timestep": t} | text


class CroppedPatchEmbed(nn.Module):
    """diffusers' patch embedding with the center of a table of positions, of which all sizes take their part.

    diffusers rounds the sum to the dtype of the convolution.

    Args:
      plain: the original, whose weights and table it shares under the same names.
    """

    pos_embed: Tensor

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.proj, self.side = plain.proj, plain.pos_embed_max_size
        self.register_buffer("pos_embed", plain.pos_embed)

    def forward(self, latent: Tensor) -> Tensor:
        """(B, C, H, W) to (B, T, E).

        Raises: RecipeError: the grid is larger than the table.
        """
        tokens = self.proj(latent)
        rows, columns = tokens.shape[2:]
        if max(rows, columns) > self.side:
            raise RecipeError(f"{rows} x {columns} tokens: the model's table has positions for {self.side} a side.")
        top, left = (self.side - rows) // 2, (self.side - columns) // 2
        table = self.pos_embed.view(1, self.side, self.side, -1)[:, top : top + rows, left : left + columns]
        return tokens.flatten(2).transpose(1, 2) + table.flatten(1, 2)
