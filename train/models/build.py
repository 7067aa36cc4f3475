"""Models behind one call, ``denoiser(x, t, conditioning)``: which there are, what they take, how they are built.

Our DiT takes class labels, or captions of any encoder; the models of diffusers take captions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...datasets.errors import RecipeError
from ...datasets.format.schema import LatentSpec
from ...datasets.order.shuffle import keyed_hash
from ..config import TrainRecipe
from ..objective_recipe import ObjectiveSection, RoutingSection
from .activation_checkpointing import Mode, checkpoint_blocks
from .conditioning import Conditioning, Extras, ModelOutput
from .diffusers.adapters import add_adapters
from .diffusers.families import FAMILIES, TEXT_ROLES, diffusers_config, diffusers_names, family_of
from .diffusers.model import DiffusersModel
from .dit import PATCHES, SIZES, DiT, size_of
from .layers import DiTOptions
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
        labels, captions, mask = conditioning.labels, conditioning.captions, conditioning.caption_mask
        return self.net(x, t, labels, captions, mask, extras, conditioning.mean_tokens)

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


# ------------------------------------------------------------------------------------------------------- recipe keys


def options_of(recipe: TrainRecipe) -> DiTOptions:
    """The options of a DiT."""
    return DiTOptions(**{key: getattr(recipe.model, key) for key in DiTOptions.model_fields})


def dispersed_block(objective: ObjectiveSection, depth: int) -> int:
    """The block whose output disperses, from 1; 0: none does."""
    return (objective.dispersive_block or max(1, depth // 4)) if objective.dispersive_weight else 0


def routed_blocks(routing: RoutingSection, depth: int) -> tuple[int, int]:
    """The first and the last block that tokens skip, from 1; (0, 0) if none does.

    Raises: RecipeError: there are no such blocks.
    """
    if routing.kind == "none":
        return 0, 0
    behind = 3 if routing.kind == "tread" else 2  # TREAD's configuration of DiT-B: blocks 3 to 9 of 12
    first, last = routing.first_block, routing.last_block or max(0, depth - behind)
    if not first <= last <= depth:
        raise RecipeError(
            f"routing.first_block {first}, routing.last_block {last}: the model has {depth} blocks. Expected 1 <= "
            "first <= last <= the number of blocks."
        )
    return first, last


def check_model_keys(recipe: TrainRecipe) -> None:
    """Raise RecipeError if the recipe asks for something that its model does not have."""
    name, objective = recipe.model.name, recipe.objective
    check_model_name(name)
    if family := family_of(name):
        _check_no_keys_of_dit(recipe, family)
    else:
        _check_keys_of_dit(recipe)
    if recipe.conditioning.texts and family not in TEXT_ROLES:
        raise RecipeError(f"conditioning.texts: model '{name}' reads one text encoder at most, that of [text].")
    if recipe.model.time == "to_data" and objective.kind != "flow":
        raise RecipeError(f"model '{name}': model.time 'to_data' is for objective.kind 'flow', which has a velocity.")


def _check_no_keys_of_dit(recipe: TrainRecipe, family: str) -> None:
    name = recipe.model.name
    if options_of(recipe) != DiTOptions():
        raise RecipeError(f"model '{name}': model.{', model.'.join(DiTOptions.model_fields)} are options of DiT alone.")
    added = {"align": recipe.align, "self_align": recipe.self_align.weight, "routing": recipe.routing.kind != "none"}
    added["objective.dispersive_weight"] = recipe.objective.dispersive_weight
    if keys := [key for key, value in added.items() if value]:
        raise RecipeError(f"model '{name}': {', '.join(keys)} look into the blocks of a DiT. Use a DiT.")
    if recipe.run.residual != "float32" and not FAMILIES[family].has_narrow_residual:
        raise RecipeError(f"run.residual '{recipe.run.residual}': model '{name}' has float32 streams. Remove the key.")
    if recipe.conditioning.kind == "label":
        raise RecipeError(f"conditioning.kind 'label': model '{name}' takes captions. Use a DiT, or 'auto'.")


def _check_keys_of_dit(recipe: TrainRecipe) -> None:
    name, depth = recipe.model.name, size_of(recipe.model.name)[0]
    if recipe.lora.rank:
        raise RecipeError(
            f"lora.rank {recipe.lora.rank}: model '{name}' takes no adapters. Use one of "
            f"{', '.join(diffusers_names())}, or lora.rank 0."
        )
    first, last = routed_blocks(recipe.routing, depth)
    dispersed = dispersed_block(recipe.objective, depth)
    if dispersed and first <= dispersed <= last:
        raise RecipeError(
            f"objective.dispersive_block {dispersed}: its tokens are of other places in each image, since some skip "
            f"the blocks {first} to {last} (routing). Choose a block before or after them."
        )
    watched = {f"align.{key}.block": section.block for key, section in recipe.align.items()}
    if recipe.self_align.weight:
        watched |= {f"self_align.{key}": getattr(recipe.self_align, key) for key in ("block", "teacher_block")}
    watched["objective.dispersive_block"] = recipe.objective.dispersive_block
    if beyond := [key for key, block in watched.items() if block > depth]:
        raise RecipeError(f"{beyond[0]} {watched[beyond[0]]}: model '{name}' has {depth} blocks.")
