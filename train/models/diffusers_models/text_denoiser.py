"""PixArt-Sigma and Sana: diffusers' transformers behind the common call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ....datasets.format.buckets import published_ratio
from ..activation_checkpointing import Mode, checkpoint_blocks
from ..conditioning import Conditioning
from ..cross_attention import arrange_captions
from ..numerics import product_dtype
from .blocks import compute_our_way
from .families import Family, transformer_class
from .initial_weights import initialize_weights
from .patch_embed import CachedPatchEmbed, start_stream
from .processors import CaptionProcessor, JointProcessor, LinearProcessor

PIXART_DOWNSCALE = 8  # pixels a latent pixel, of the VAEs that PixArt is trained with


class TextDenoiser(nn.Module):
    """A transformer of diffusers behind the common call.

    Args:
      family: which class.
      config: its arguments.

    Attributes:
      residual: dtype of the residual stream under autocast to bfloat16; in any other precision it is float32.
    """

    residual: Literal["float32", "bf16"] = "float32"

    def __init__(self, family: Family, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.family = family
        self.net = transformer_class(family)(**config)
        name = "pos_embed" if family == "pixart" else "patch_embed"
        embed = getattr(self.net, name)
        if embed.pos_embed is not None:
            setattr(self.net, name, CachedPatchEmbed(embed))
        getattr(self.net, name).register_forward_hook(self._start_stream)
        blocks: list[Any] = list(self.blocks)
        for block in blocks:
            compute_our_way(block)
            block.attn2.set_processor(CaptionProcessor())
            block.attn1.set_processor(LinearProcessor() if family == "sana" else JointProcessor())
        self.cross_head_width = blocks[0].attn2.inner_dim // blocks[0].attn2.heads
        initialize_weights(self.net, family)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """(B, C, H, W), (B,) time in 0..1000, captions to (B, out_channels, H, W).

        Time 1000 is pure noise in both. Sana's trainer rounds it down to whole numbers; here it stays as drawn.
        """
        assert conditioning.captions is not None
        assert conditioning.caption_mask is not None
        captions, layout = arrange_captions(
            conditioning.captions,
            conditioning.caption_mask,
            head_width=self.cross_head_width,
            mean_tokens=conditioning.mean_tokens,
        )
        more = {"added_cond_kwargs": self.size_conditions(x, conditioning)} if self.family == "pixart" else {}
        return self.net(
            hidden_states=x,
            encoder_hidden_states=captions,
            encoder_attention_mask=layout,
            timestep=t,
            return_dict=False,
            **more,
        )[0]

    def _start_stream(self, embed: nn.Module, inputs: Any, tokens: Tensor) -> Tensor:
        tokens = start_stream(embed, inputs, tokens)
        narrow = self.residual == "bf16" and product_dtype(tokens.device) == torch.bfloat16
        return tokens.bfloat16() if narrow else tokens

    def size_conditions(self, x: Tensor, conditioning: Conditioning) -> dict[str, Tensor | None]:
        """Inputs of PixArt-alpha at 1024 px: (B, 2) height and width of the source picture, and (B, 1) aspect ratio.

        Without a source, as in sampling, the size is that of the picture itself.

        Source: Chen et al. 2023, arXiv 2310.00426, appendix; as in its trainer, the ratio is the key of the bucket in
        PixArt's table. Without a bucket in the table it is height over width.
        """
        if not self.net.config.use_additional_conditions:
            return {"resolution": None, "aspect_ratio": None}
        height, width = (side * PIXART_DOWNSCALE for side in x.shape[2:])
        sizes = conditioning.source_sizes
        if sizes is None:
            sizes = torch.tensor([height, width], device=x.device).float().expand(len(x), 2)
        ratio = published_ratio(height, width)
        return {"resolution": sizes, "aspect_ratio": torch.full((len(x), 1), ratio, device=x.device)}

    def checkpoint_activations(self, mode: Mode = "blocks") -> None:
        """See ``checkpoint_blocks``."""
        checkpoint_blocks(self.blocks, mode)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks that are compiled, sharded and checkpointed one by one."""
        return self.net.transformer_blocks
