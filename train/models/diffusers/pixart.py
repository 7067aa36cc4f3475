"""PixArt-Sigma (arXiv 2403.04692), and PixArt-alpha (arXiv 2310.00426) up to 512 px to fine-tune.

First weights: ``initialize`` in PixArt-sigma's ``PixArtMS.py``.
"""

from __future__ import annotations

from ..spec import ModelSpec
from .adaln_single import AdaLNSingle
from .model import Config

SIGMA_BASE = 64  # side in latent pixels whose positions PixArt-Sigma does not scale: 512 px


def size(depth: int, heads: int, head_width: int) -> Config:
    """The arguments of a size."""
    return {
        "num_layers": depth,
        "num_attention_heads": heads,
        "attention_head_dim": head_width,
        "cross_attention_dim": heads * head_width,
        "use_additional_conditions": False,  # sizes of source images, which PixArt-alpha has at 1024 px alone
    }


class PixArt(AdaLNSingle):
    """PixArt."""

    transformer_class, pipeline_class = "pixart_transformer_2d.PixArtTransformer2DModel", "PixArtSigmaPipeline"
    family, recipe, patch = "pixart", "pixart-512", 2
    sizes = {"pixart-sigma": size(28, 16, 72), "pixart-tiny": size(6, 4, 32)}  # noqa: RUF012
    text_width, samples_flows = 4096, False
    roles = {  # noqa: RUF012
        "hidden": ("*.attn1.to_*", "*.attn2.to_*", "*.ff.net.*"),
        "modulation": ("adaln_single.linear",),
        "embedding": ("pos_embed.proj", "adaln_single.emb.*", "caption_projection.*"),
        "head": ("proj_out",),
    }
    drawn_px, binned_sides = 0, (32, 64, 128, 256)
    embed_name, time_name, zeros = "pos_embed", "adaln_single", ("proj_out", "attn2.to_out.0")

    @classmethod
    def config(cls, spec: ModelSpec) -> Config:
        # Positions of all resolutions share one span, so that 256 px are trained on to 512 (pe_interpolation).
        scale = spec.base_size / SIGMA_BASE if spec.name == "pixart-sigma" else None
        return super().config(spec) | {"sample_size": spec.base_size, "interpolation_scale": scale}

    @classmethod
    def positions_scale(cls, config: Config) -> float:
        scale = config["interpolation_scale"]
        return max(config["sample_size"] // SIGMA_BASE, 1) if scale is None else scale
