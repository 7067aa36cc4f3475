"""The transformers of diffusers that can be trained: their classes, and their arguments by name of the model.

diffusers takes seconds to import and brings its own optional libraries: only for the models that need it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Literal

Family = Literal["pixart", "sana"]
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
SIGMA_BASE = 64  # side in latent pixels whose positions PixArt-Sigma does not scale: 512 px

# Ends of the names of the linear layers that get adapters by default.
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
ADAPTED: dict[Family, tuple[str, ...]] = {"pixart": ATTENTION, "sana": ATTENTION}


def family_of(name: str) -> Family | None:
    """Family of diffusers' models, or None for a DiT."""
    if name in PIXART_SIZES:
        return "pixart"
    return "sana" if name in SANA_SIZES else None


def transformer_class(family: Family) -> Any:
    """The class of diffusers."""
    with without_warnings():
        if family == "pixart":
            from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

            return PixArtTransformer2DModel
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


def published_config(name: str, *, channels: int, out_channels: int, caption_width: int, base_size: int) -> dict:
    """Arguments of diffusers' class for a model of a given name."""
    shared = {
        "in_channels": channels,
        "out_channels": out_channels,
        "caption_channels": caption_width,
        "sample_size": base_size,
    }
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
