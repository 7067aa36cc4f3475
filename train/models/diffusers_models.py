"""PixArt-Sigma and Sana: diffusers' transformers behind the common call, initialised for training from scratch.

diffusers takes seconds to import and brings its own optional libraries: only for the models that need it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...datasets.format.buckets import published_ratio
from .activation_checkpointing import Mode, checkpoint_blocks
from .conditioning import Conditioning
from .cross_attention import CaptionProcessor, LinearProcessor, arrange_captions
from .numerics import at_least_float32

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
FUSED_QKV, FUSED_KV = 2**-0.5, (2 / 3) ** 0.5  # xavier of three or two square matrices in one, of xavier of each
CAPTION_NORM_GAIN = 0.01  # of Sana's norm of captions at the start (y_norm_scale_factor of its configurations)
EMBEDDING_STD = 0.02  # as DiT's embeddings
SIGMA_BASE = 64  # side in latent pixels whose positions PixArt-Sigma does not scale: 512 px
PIXART_DOWNSCALE = 8  # pixels a latent pixel, of the VAEs that PixArt is trained with


def family_of(name: str) -> Family | None:
    """Family of diffusers' models, or None for a DiT."""
    if name in PIXART_SIZES:
        return "pixart"
    return "sana" if name in SANA_SIZES else None


def transformer_class(family: Family) -> Any:
    """The class of diffusers."""
    with _without_warnings():
        if family == "pixart":
            from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

            return PixArtTransformer2DModel
        from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel

        return SanaTransformer2DModel


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
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


class CachedPatchEmbed(nn.Module):
    """diffusers' patch embedding, with a position table that is computed once for each size.

    Args:
      plain: the original, whose weights it shares under the same names.
    """

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.proj, self.base_size, self.scale = plain.proj, plain.base_size, plain.interpolation_scale
        self._tables: dict[tuple[int, int, torch.device], Tensor] = {}

    def forward(self, latent: Tensor) -> Tensor:
        """(B, C, H, W) to (B, T, E)."""
        tokens = self.proj(latent)
        grid = (tokens.shape[2], tokens.shape[3])
        tokens = tokens.flatten(2).transpose(1, 2)
        return tokens + self.table(*grid, tokens.device)

    def table(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Positions of a grid, (1, T, E) float32."""
        key = (rows, columns, device)
        if key not in self._tables:
            from diffusers.models.embeddings import get_2d_sincos_pos_embed

            with torch.inference_mode(False):  # a table made while sampling may be used in training later
                table: Any = get_2d_sincos_pos_embed(
                    embed_dim=self.proj.out_channels,
                    grid_size=(rows, columns),
                    base_size=self.base_size,
                    interpolation_scale=self.scale,
                    output_type="pt",
                )
                self._tables[key] = table.float().unsqueeze(0).to(device)
        return self._tables[key]


class TextDenoiser(nn.Module):
    """A transformer of diffusers behind the common call.

    Args:
      family: which class.
      config: its arguments.
    """

    def __init__(self, family: Family, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.family = family
        self.net = transformer_class(family)(**config)
        name = "pos_embed" if family == "pixart" else "patch_embed"
        embed = getattr(self.net, name)
        if embed.pos_embed is not None:
            setattr(self.net, name, CachedPatchEmbed(embed))
        getattr(self.net, name).register_forward_hook(_start_stream)
        blocks: list[Any] = list(self.blocks)
        for block in blocks:
            block.attn2.set_processor(CaptionProcessor())
            if family == "sana":
                block.attn1.set_processor(LinearProcessor())
        self.cross_head_width = blocks[0].attn2.inner_dim // blocks[0].attn2.heads
        initialize_weights(self.net, family)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """(B, C, H, W), (B,) time in 0..1000, captions to (B, out_channels, H, W).

        Time 1000 is pure noise in both. Sana's trainer rounds it down to whole numbers; here it stays as drawn.
        """
        assert conditioning.captions is not None
        assert conditioning.caption_mask is not None
        captions, layout = arrange_captions(
            conditioning.captions, conditioning.caption_mask, head_width=self.cross_head_width
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


def _start_stream(embed: nn.Module, inputs: Any, tokens: Tensor) -> Tensor:
    """Tokens (B, T, E), contiguous and at least float32, as the blocks return them.

    Otherwise the first block would be compiled separately, and each norm would transpose.
    """
    return at_least_float32(tokens).contiguous()


def initialize_weights(net: Any, family: Family) -> None:
    """Initialise as the published code does, unlike diffusers.

    Both: xavier for linear layers and patches, with queries, keys and values as one matrix, and a standard deviation
    of 0.02 for embedders of time, sizes and captions. PixArt: zeros for the output of the model and of cross-attention.
    Sana: xavier for the output, a gain of 0.01 for the caption norm. Sana's convolutions, and the modulation tables of
    both, keep the defaults of torch and diffusers, which are the published ones.

    Source: ``initialize`` in PixArt-sigma's and NVlabs/Sana's ``PixArtMS.py`` and ``sana_multi_scale.py``.
    """
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for block in net.transformer_blocks:
        for linear in (block.attn1.to_q, block.attn1.to_k, block.attn1.to_v):
            nn.init.xavier_uniform_(linear.weight, gain=FUSED_QKV)
        for linear in (block.attn2.to_k, block.attn2.to_v):
            nn.init.xavier_uniform_(linear.weight, gain=FUSED_KV)
    patch_weight = (net.pos_embed if family == "pixart" else net.patch_embed).proj.weight
    nn.init.xavier_uniform_(patch_weight.view(patch_weight.shape[0], -1))
    times = net.adaln_single if family == "pixart" else net.time_embed
    for module in (*times.modules(), *net.caption_projection.modules()):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=EMBEDDING_STD)
    if family == "sana":
        nn.init.constant_(net.caption_norm.weight, CAPTION_NORM_GAIN)
        return
    for linear in (net.proj_out, *(block.attn2.to_out[0] for block in net.transformer_blocks)):
        nn.init.zeros_(linear.weight)
