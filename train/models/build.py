"""Build the models behind one call: ``denoiser(x, t, conditioning)``.

Our DiT takes class labels, or captions of any encoder; diffusers' PixArt, Sana and Stable Diffusion 3 take captions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...datasets.errors import RecipeError
from ...datasets.format.schema import LatentSpec
from ...datasets.order.shuffle import keyed_hash
from .activation_checkpointing import Mode, checkpoint_blocks
from .conditioning import Conditioning, Extras, ModelOutput
from .diffusers_models.adapters import add_adapters
from .diffusers_models.families import (
    PIXART_SIZES,
    SANA_PATCH,
    SD3_PATCH,
    SD3_SIZES,
    diffusers_names,
    family_of,
    published_config,
)
from .diffusers_models.joint_denoiser import JointDenoiser
from .diffusers_models.text_denoiser import TextDenoiser
from .dit import PATCHES, SIZES, DiT, size_of
from .spec import ModelSpec


def dit_names() -> list[str]:
    """Names of all published DiT sizes."""
    return [f"DiT-{size}/{patch}" for size in SIZES for patch in PATCHES]


def check_model_name(name: str) -> None:
    """Raise RecipeError if the model name is unknown."""
    known = [*dit_names(), *diffusers_names()]
    if name not in known:
        raise RecipeError(f"model.name '{name}': needed one of {', '.join(known)}.")


def pixels_per_token(spec: ModelSpec, latent: LatentSpec) -> int:
    """Side of a patch, in pixels of the picture."""
    return patch_of(spec) * latent.downscale


def patch_of(spec: ModelSpec) -> int:
    """Side of a patch, in latent pixels."""
    if spec.config:
        return spec.config["patch_size"]
    family = family_of(spec.name)
    if family == "pixart":
        return PIXART_SIZES[spec.name][3]
    return {"sana": SANA_PATCH, "sd3": SD3_PATCH}[family] if family else size_of(spec.name)[-1]


def most_tokens_a_side(spec: ModelSpec) -> int | None:
    """Side of the largest grid of tokens that the model has positions for; None: any."""
    if family_of(spec.name) != "sd3":
        return None
    return spec.config["pos_embed_max_size"] if spec.config else SD3_SIZES[spec.name].positions


class DiTDenoiser(nn.Module):
    """Our DiT behind the common call."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        depth, width, heads, patch = size_of(spec.name)
        self.net = DiT(
            depth=depth,
            width=width,
            heads=heads,
            patch=patch,
            channels=spec.channels,
            out_channels=spec.out_channels,
            num_classes=spec.num_classes,
            base_size=spec.base_size,
            caption_width=spec.caption_width,
            options=spec.options,
            projectors=spec.projectors,
            fused=spec.fused,
        )

    def forward(
        self, x: Tensor, t: Tensor, conditioning: Conditioning, extras: Extras | None = None
    ) -> Tensor | ModelOutput:
        """(B, C, H, W), (B,) time in 0..1000, labels or captions to (B, out_channels, H, W), and more with extras."""
        labels, captions, mask = conditioning.labels, conditioning.captions, conditioning.caption_mask
        return self.net(x, t, labels, captions, mask, extras, conditioning.mean_tokens)

    def checkpoint_activations(self, mode: Mode = "blocks") -> None:
        """See ``checkpoint_blocks``."""
        checkpoint_blocks(self.blocks, mode)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks that are compiled, sharded and checkpointed one by one."""
        return self.net.blocks


Denoiser = DiTDenoiser | TextDenoiser | JointDenoiser


def build_model(spec: ModelSpec, *, seed: int) -> Denoiser:
    """Build a model with weights that depend on the seed alone; float32, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_hash(seed) % 2**63)
        family = family_of(spec.name)
        if family is None:
            return DiTDenoiser(spec)
        config = diffusers_config(spec)
        model = JointDenoiser(config) if family == "sd3" else TextDenoiser(family, config)
    if spec.adapter:
        add_adapters(model, spec.adapter, seed=seed)
    return model


def diffusers_config(spec: ModelSpec) -> dict[str, Any]:
    """Arguments of diffusers' class, for a model of diffusers."""
    return spec.config or published_config(
        spec.name,
        channels=spec.channels,
        out_channels=spec.out_channels,
        caption_width=spec.caption_width,
        base_size=spec.base_size,
        pooled_width=spec.pooled_width,
    )
