"""Models behind one call, ``denoiser(x, t, conditioning)``: which there are, what they take, how they are built.

Our DiT takes class labels, or captions of any encoder; the models of diffusers take captions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...datasets.errors import RecipeError
from ...datasets.format.schema import LatentSpec
from ...datasets.order.shuffle import keyed_hash
from .activation_checkpointing import Mode, checkpoint_blocks
from .conditioning import Conditioning, Extras, ModelOutput
from .diffusers.adapters import add_adapters
from .diffusers.families import FAMILIES, diffusers_config, diffusers_names, family_of
from .diffusers.model import DiffusersModel
from .dit import PATCHES, SIZES, DiT, size_of
from .spec import ModelSpec


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
        return self.net(x, t, conditioning.labels, conditioning.captions, extras)

    def checkpoint_activations(self, mode: Mode = "blocks") -> None:
        """See ``checkpoint_blocks``."""
        checkpoint_blocks(self.blocks, mode)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks that are compiled, sharded and checkpointed one by one."""
        return self.net.blocks


Denoiser = DiTDenoiser | DiffusersModel


def build_model(spec: ModelSpec, *, seed: int) -> Denoiser:
    """Build a model with weights that depend on the seed alone; float32, on the CPU."""
    family = family_of(spec.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_hash(seed) % 2**63)
        model = FAMILIES[family](diffusers_config(spec)) if family else DiTDenoiser(spec)
    if spec.adapter:
        add_adapters(model, spec.adapter, seed=seed)
    return model


# ------------------------------------------------------------------------------------------------------------ by name


def check_model_name(name: str) -> None:
    """Raise RecipeError if the model name is unknown."""
    known = [*(f"DiT-{size}/{patch}" for size in SIZES for patch in PATCHES), *diffusers_names()]
    if name not in known:
        raise RecipeError(f"model.name '{name}': expected one of {', '.join(known)}.")


def patch_of(spec: ModelSpec) -> int:
    """Side of a patch, in latent pixels."""
    if spec.config:
        return spec.config["patch_size"]
    family = family_of(spec.name)
    return FAMILIES[family].patch if family else size_of(spec.name)[-1]


def pixels_per_token(spec: ModelSpec, latent: LatentSpec) -> int:
    """Side of a patch, in pixels of the image."""
    return patch_of(spec) * latent.downscale


def most_tokens_a_side(spec: ModelSpec) -> int | None:
    """Side of the largest grid of tokens that the model has positions for; None: any."""
    family = family_of(spec.name)
    return FAMILIES[family].most_tokens(spec) if family else None
