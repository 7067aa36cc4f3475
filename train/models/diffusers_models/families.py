"""The transformers of diffusers that can be trained: their classes, and their arguments by name of the model.

diffusers takes seconds to import and brings its own optional libraries: only for the models that need it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

Family = Literal["pixart", "sana", "sd3"]


class TextRole(NamedTuple):
    """What a model reads of one text encoder, and its published sizes.

    Args:
      encoder: for people.
      tokens: of each caption, padding included; 0: the pooled vector alone is read.
      width: of a token.
      pooled_width: 0: the pooled vector is not read.
      beside: its tokens are joined to those of the role before by their features, not after them.
    """

    encoder: str
    tokens: int
    width: int
    pooled_width: int = 0
    beside: bool = False


# Of models that read several text encoders, and their padding; other models read the valid tokens of one.
TEXT_ROLES: dict[Family, tuple[TextRole, ...]] = {
    "sd3": (
        TextRole("CLIP-L", 77, 768, pooled_width=768),
        TextRole("CLIP-G", 77, 1280, pooled_width=1280, beside=True),
        TextRole("T5", 256, 4096),
    )
}
# name -> depth, heads, width of a head, patch; the first as published (PixArt-Sigma, arXiv 2403.04692)
PIXART_SIZES = {"pixart-sigma": (28, 16, 72, 2), "pixart-tiny": (6, 4, 32, 2)}
# name -> depth, heads and width of a head of linear attention, the same of cross-attention; the first two as published
# (Sana, arXiv 2410.10629, table 1)
SANA_SIZES = {
    "sana-600m": (28, 36, 32, 16, 72),
    "sana-1600m": (20, 70, 32, 20, 112),
    "sana-tiny": (4, 8, 32, 4, 64),
}
SANA_PATCH, SANA_MLP_RATIO = 1, 2.5
# Side of the base grid in tokens -> scale of positions, as Sana's configurations have them; smaller ones have none.
SANA_POSITIONS = {64: 1.0, 128: 2.0}


class Sd3Size(NamedTuple):
    """Depth, heads, width of a head, side of the table of positions in tokens, first blocks with two attentions, and
    whether queries and keys are normed."""

    depth: int
    heads: int
    head_width: int
    positions: int
    dual: int
    qk_norm: bool


# name -> size; the first three as published (SD3, arXiv 2403.03206; their configurations)
SD3_SIZES = {
    "sd3-medium": Sd3Size(24, 24, 64, positions=192, dual=0, qk_norm=False),
    "sd3.5-medium": Sd3Size(24, 24, 64, positions=384, dual=13, qk_norm=True),
    "sd3.5-large": Sd3Size(38, 38, 64, positions=192, dual=0, qk_norm=True),
    "sd3-tiny": Sd3Size(6, 6, 32, positions=96, dual=2, qk_norm=True),
}
SD3_PATCH = 2
SD3_BASE = 128  # side in latent pixels that the positions span, of all published sizes
SIGMA_BASE = 64  # side in latent pixels whose positions PixArt-Sigma does not scale: 512 px

# Ends of the names of the linear layers that get adapters by default.
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
JOINT_ATTENTION = tuple(f"attn.{name}" for name in (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"))
ADAPTED: dict[Family, tuple[str, ...]] = {"pixart": ATTENTION, "sana": ATTENTION, "sd3": JOINT_ATTENTION}

# Precompute recipes whose stores fit the published sizes; for another resolution there is a recipe beside it.
PRECOMPUTED: dict[Family, str] = {"pixart": "pixart-512", "sana": "sana-512", "sd3": "sd3-512"}


def diffusers_names() -> list[str]:
    """Names of all models of diffusers."""
    return [*PIXART_SIZES, *SANA_SIZES, *SD3_SIZES]


def family_of(name: str) -> Family | None:
    """Family of diffusers' models, or None for a DiT."""
    if name in PIXART_SIZES:
        return "pixart"
    if name in SD3_SIZES:
        return "sd3"
    return "sana" if name in SANA_SIZES else None


def transformer_class(family: Family) -> Any:
    """The class of diffusers."""
    with without_warnings():
        if family == "pixart":
            from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

            return PixArtTransformer2DModel
        if family == "sd3":
            from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

            return SD3Transformer2DModel
        from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel

        return SanaTransformer2DModel


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Silence what diffusers' optional libraries log during their import."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def published_config(
    name: str, *, channels: int, out_channels: int, caption_width: int, base_size: int, pooled_width: int = 0
) -> dict:
    """Arguments of diffusers' class for a model of a given name."""
    shared: dict[str, Any] = {"in_channels": channels, "out_channels": out_channels}
    if name in SD3_SIZES:
        size = SD3_SIZES[name]
        return shared | {
            "num_layers": size.depth,
            "num_attention_heads": size.heads,
            "attention_head_dim": size.head_width,
            "caption_projection_dim": size.heads * size.head_width,
            "joint_attention_dim": caption_width,
            "pooled_projection_dim": pooled_width,
            "patch_size": SD3_PATCH,
            "sample_size": SD3_BASE,
            "pos_embed_max_size": size.positions,
            "dual_attention_layers": list(range(size.dual)),
            "qk_norm": "rms_norm" if size.qk_norm else None,
        }
    shared |= {"caption_channels": caption_width, "sample_size": base_size}
    if name in PIXART_SIZES:
        depth, heads, head_width, patch = PIXART_SIZES[name]
        return shared | {
            "num_layers": depth,
            "num_attention_heads": heads,
            "attention_head_dim": head_width,
            "cross_attention_dim": heads * head_width,
            "patch_size": patch,
            "use_additional_conditions": False,  # PixArt-Sigma dropped them
            # Positions of all resolutions share one span, so that 256 px are trained on to 512 (pe_interpolation).
            "interpolation_scale": base_size / SIGMA_BASE if name == "pixart-sigma" else None,
        }
    depth, heads, head_width, cross_heads, cross_head_width = SANA_SIZES[name]
    return shared | {
        "num_layers": depth,
        "num_attention_heads": heads,
        "attention_head_dim": head_width,
        "num_cross_attention_heads": cross_heads,
        "cross_attention_head_dim": cross_head_width,
        "cross_attention_dim": heads * head_width,
        "patch_size": SANA_PATCH,
        "mlp_ratio": SANA_MLP_RATIO,
        "interpolation_scale": SANA_POSITIONS.get(base_size),
    }
