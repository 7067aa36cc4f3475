"""Models by name, behind one call ``model(x, t, conditioning)``: which there are, and how they are built.

Our DiT takes class labels, or captions of any encoder; the models of diffusers take captions.
"""

from __future__ import annotations

from typing import Any

import torch

from ...datasets.format.schema import LatentSpec
from ...datasets.order.shuffle import keyed_hash
from ...errors import RecipeError
from .diffusers.adapters import add_adapters
from .diffusers.flux1 import Flux1
from .diffusers.flux2 import Flux2
from .diffusers.model import DiffusersModel, without_warnings
from .diffusers.pixart import PixArt
from .diffusers.qwen_image import QwenImage
from .diffusers.sana import Sana
from .diffusers.sd3 import SD3
from .diffusers.z_image import ZImage
from .dit import PATCHES, SIZES, DiT, size_of
from .dit_dh import DiTDH, is_dit_dh
from .spec import ModelSpec

Denoiser = DiT | DiTDH | DiffusersModel
FAMILIES: dict[str, type[DiffusersModel]] = {
    model.family: model for model in (PixArt, Sana, SD3, Flux1, Flux2, QwenImage, ZImage)
}


def build_model(spec: ModelSpec, *, seed: int) -> Denoiser:
    """Build a model with weights that depend on the seed alone; float32, on the CPU."""
    family = family_of(spec.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_hash(seed) % 2**63)
        ours = DiTDH if is_dit_dh(spec.name) else DiT
        model = FAMILIES[family](diffusers_config(spec)) if family else ours(spec)
    if isinstance(model, DiffusersModel):
        model.guidance = spec.guidance
    if spec.adapter:
        add_adapters(model, spec.adapter, seed=seed)
    return model


def family_of(name: str) -> str | None:
    """Family of a model of diffusers, or None for a DiT or DiT^DH."""
    return next((family for family, one in FAMILIES.items() if name in one.sizes), None)


def diffusers_names() -> list[str]:
    """Names of all models of diffusers."""
    return [name for family in FAMILIES.values() for name in family.sizes]


def transformer_class(family: str) -> Any:
    """The class of diffusers."""
    with without_warnings():
        return FAMILIES[family].transformer()


def diffusers_config(spec: ModelSpec) -> dict[str, Any]:
    """Arguments of diffusers' class: of the weights to fine-tune, else for training from scratch."""
    return spec.config or FAMILIES[family_of(spec.name) or ""].config(spec)


def takes_guidance(spec: ModelSpec) -> bool:
    """Whether a model is distilled and takes the scale of the guidance as an input."""
    return family_of(spec.name) is not None and bool(diffusers_config(spec).get("guidance_embeds"))


def check_model_name(name: str) -> None:
    """Raise RecipeError if the model name is unknown."""
    known = [f"DiT-{size}/{patch}" for size in SIZES for patch in PATCHES]
    known += ["DiTDH-S/1", "DiTDH-XL/1", *diffusers_names()]
    if name not in known:
        raise RecipeError(f"model.name '{name}': expected one of {', '.join(known)}.")


def patch_of(spec: ModelSpec) -> int:
    """Side of a patch, in latent pixels."""
    family = family_of(spec.name)
    return FAMILIES[family].patch_side(spec) if family else size_of(spec.name)[-1]


def caption_multiple(spec: ModelSpec) -> int:
    """Captions of a model that reads valid tokens are padded to a multiple of so many tokens."""
    family = family_of(spec.name)
    return FAMILIES[family].caption_multiple if family else 1


def has_convolutions(spec: ModelSpec) -> bool:
    """Whether the blocks have convolutions."""
    family = family_of(spec.name)
    return family is not None and FAMILIES[family].has_convolutions


def pixels_per_token(spec: ModelSpec, latent: LatentSpec) -> int:
    """Side of a patch, in pixels of the image."""
    return patch_of(spec) * latent.downscale


def most_tokens_a_side(spec: ModelSpec) -> int | None:
    """Side of the largest grid of tokens that the model has positions for; None: any."""
    family = family_of(spec.name)
    return FAMILIES[family].most_tokens(spec) if family else None
