"""FLUX.2 (Black Forest Labs 2025): as FLUX.1, with modulations that all blocks share, and a language model's captions.

Its trainer is not published: first weights are as DiT's.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...objectives.shift import TimeShift
from ..conditioning import Conditioning
from ..spec import ModelSpec, TextInput
from .flux1 import Flux1, size
from .model import TWO_STREAMS, Config, initialize, stream_projections

AXES = (32, 32, 32, 32)  # numbers of a head that turn with time, row, column and place in the caption
REFERENCE_STEP = 10  # between the positions of images, along the axis of time


class Flux2(Flux1):
    """FLUX.2, which reads its encoder's padding, and whose VAE packs 2 x 2 positions itself."""

    transformer_class = "transformer_flux2.Flux2Transformer2DModel"
    family, recipe = "flux2", "flux2-klein-1024"
    sizes = {  # noqa: RUF012
        "flux2-klein-4b": size(5, 20, 24, AXES),
        "flux2-klein-9b": size(8, 24, 32, AXES),
        "flux2-dev": size(8, 48, 48, AXES, distilled=True),
        "flux2-tiny": size(2, 4, 4, (8, 8, 8, 8)),
    }
    text_classes = ({"causal_lm": ("Qwen3ForCausalLM", "Qwen2TokenizerFast")},)
    downscale, vae, normalisation = 16, "AutoencoderKLFlux2", "batch norm"
    texts = (TextInput(name="Qwen3", tokens=512, width=7680),)
    roles = {  # noqa: RUF012
        "hidden": ("transformer_blocks.*", "single_transformer_blocks.*"),
        "modulation": ("*_stream_modulation*.linear", "norm_out.linear"),
        "embedding": ("x_embedder", "context_embedder", "time_guidance_embed.*"),
        "head": ("proj_out",),
    }
    resolution_shift = TimeShift(rule="tokens and steps")
    guidance_argument = "guidance_scale=G"
    adapted = (*TWO_STREAMS, "attn.to_qkv_mlp_proj")

    @classmethod
    def pipeline(cls, spec: ModelSpec) -> str:
        return "Flux2Pipeline" if spec.name == "flux2-dev" else "Flux2KleinPipeline"

    @classmethod
    def needs(cls, spec: ModelSpec) -> Config:
        widths = {"in_channels": spec.channels, "out_channels": spec.out_channels}
        return widths | {"joint_attention_dim": spec.caption_width}

    def initialize_weights(self) -> None:
        """Zeros for modulations and the output."""
        net = cast(Any, self.net)
        fused = stream_projections(net.transformer_blocks)
        initialize(net, fused, net.x_embedder, [net.time_guidance_embed], self.zeroed)

    @classmethod
    def patch_side(cls, spec: ModelSpec) -> int:
        return spec.config.get("patch_size", cls.patch)

    def inputs(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Config:
        captions: Any = conditioning.captions
        rows, columns = (torch.arange(side, device=x.device) for side in x.shape[2:])
        zero, places = rows.new_zeros(1), torch.arange(captions.shape[1], device=x.device)
        images = conditioning.images(x)
        numbers = [rows.new_full((1,), REFERENCE_STEP * number) for number in range(len(images))]
        return {
            "hidden_states": torch.cat([image.flatten(2) for image in images], dim=2).transpose(1, 2),
            "timestep": t / 1000,
            "guidance": torch.full_like(t, self.guidance) if self.net.config.guidance_embeds else None,
            "encoder_hidden_states": captions,
            "img_ids": torch.cat([torch.cartesian_prod(number, rows, columns, zero) for number in numbers]),
            "txt_ids": torch.cartesian_prod(zero, zero, zero, places),
        }

    def velocity(self, output: Any, x: Tensor) -> Tensor:
        return output[:, : x.shape[2:].numel()].transpose(1, 2).unflatten(2, x.shape[2:])
