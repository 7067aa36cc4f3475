"""PixArt-Sigma (arXiv 2403.04692), and PixArt-alpha (arXiv 2310.00426) to fine-tune.

First weights: ``initialize`` in PixArt-sigma's ``PixArtMS.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....datasets.format.buckets import published_ratio
from ..conditioning import Conditioning
from ..spec import ModelSpec
from .adaln_single import AdaLNSingle
from .model import Config

DOWNSCALE = 8  # pixels a latent pixel, of the VAEs that PixArt is trained with
SIGMA_BASE = 64  # side in latent pixels whose positions PixArt-Sigma does not scale: 512 px


def size(depth: int, heads: int, head_width: int) -> Config:
    """The arguments of a size."""
    return {
        "num_layers": depth,
        "num_attention_heads": heads,
        "attention_head_dim": head_width,
        "cross_attention_dim": heads * head_width,
        "use_additional_conditions": False,  # PixArt-Sigma dropped them
    }


class PixArt(AdaLNSingle):
    """PixArt."""

    transformer_class = "pixart_transformer_2d.PixArtTransformer2DModel"
    family, recipe, patch = "pixart", "pixart-512", 2
    sizes = {"pixart-sigma": size(28, 16, 72), "pixart-tiny": size(6, 4, 32)}  # noqa: RUF012
    text_width, samples_flows = 4096, False
    embed_name, time_name, zeros = "pos_embed", "adaln_single", ("proj_out", "attn2.to_out.0")

    @classmethod
    def pipeline(cls, spec: ModelSpec) -> str:
        return "PixArtAlphaPipeline" if spec.takes_sizes else "PixArtSigmaPipeline"

    @classmethod
    def config(cls, spec: ModelSpec) -> Config:
        # Positions of all resolutions share one span, so that 256 px are trained on to 512 (pe_interpolation).
        scale = spec.base_size / SIGMA_BASE if spec.name == "pixart-sigma" else None
        return super().config(spec) | {"sample_size": spec.base_size, "interpolation_scale": scale}

    def embed_time(self, x: Tensor, t: Tensor, conditioning: Conditioning, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        sizes = self.size_conditions(x, conditioning)
        return self.net.adaln_single(t, sizes, batch_size=len(x), hidden_dtype=dtype)

    def size_conditions(self, x: Tensor, conditioning: Conditioning) -> dict[str, Tensor | None]:
        """Inputs of PixArt-alpha at 1024 px: (B, 2) height and width of the source image, and (B, 1) aspect ratio.

        Without a source, as in sampling, the size is that of the image itself.

        Source: Chen et al. 2023, appendix; as in its trainer, the ratio is the key of the bucket in PixArt's table.
          Without a bucket in the table it is height over width.
        """
        if not self.net.config.use_additional_conditions:
            return {"resolution": None, "aspect_ratio": None}
        height, width = (side * DOWNSCALE for side in x.shape[2:])
        sizes = conditioning.source_sizes
        if sizes is None:
            sizes = torch.tensor([height, width], device=x.device).float().expand(len(x), 2)
        ratio = published_ratio(height, width)
        return {"resolution": sizes, "aspect_ratio": torch.full((len(x), 1), ratio, device=x.device)}
