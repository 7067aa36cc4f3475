"""Keys of a recipe that only some models have."""

from __future__ import annotations

from ...datasets.errors import RecipeError
from ..config import TrainRecipe
from ..objective_recipe import ObjectiveSection
from .build import check_model_name, routed_blocks
from .diffusers_models.families import TEXT_ROLES, diffusers_names, family_of
from .dit import size_of
from .layers import DiTOptions


def check_model_keys(recipe: TrainRecipe) -> None:
    """Raise if the recipe asks for something that its model does not have.

    Raises: RecipeError.
    """
    check_model_name(recipe.model.name)
    if family_of(recipe.model.name):
        _check_no_keys_of_dit(recipe)
    else:
        _check_keys_of_dit(recipe)
    if recipe.conditioning.texts and family_of(recipe.model.name) not in TEXT_ROLES:
        raise RecipeError(
            f"conditioning.texts: model '{recipe.model.name}' reads one text encoder at most, that of [text]."
        )
    if recipe.model.time == "to_data" and recipe.objective.kind != "flow":
        raise RecipeError(
            f"model '{recipe.model.name}': model.time 'to_data' is for objective.kind 'flow', which has a velocity."
        )


def dispersed_block(objective: ObjectiveSection, depth: int) -> int:
    """The block whose output disperses, from 1; 0: none does."""
    return (objective.dispersive_block or max(1, depth // 4)) if objective.dispersive_weight else 0


def options_of(recipe: TrainRecipe) -> DiTOptions:
    """The options of a DiT."""
    return DiTOptions(**{key: getattr(recipe.model, key) for key in DiTOptions.model_fields})


def _check_no_keys_of_dit(recipe: TrainRecipe) -> None:
    name = recipe.model.name
    if options_of(recipe) != DiTOptions():
        raise RecipeError(f"model '{name}': model.{', model.'.join(DiTOptions.model_fields)} are options of DiT alone.")
    added = {"align": recipe.align, "self_align": recipe.self_align.weight, "routing": recipe.routing.kind != "none"}
    added["objective.dispersive_weight"] = recipe.objective.dispersive_weight
    if keys := [key for key, value in added.items() if value]:
        raise RecipeError(f"model '{name}': {', '.join(keys)} look into the blocks of a DiT. Use a DiT.")
    if recipe.run.residual != "float32" and family_of(name) == "sd3":
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
            f"the blocks {first} to {last} (routing). Needed a block before or after them."
        )
    watched = {f"align.{key}.block": section.block for key, section in recipe.align.items()}
    if recipe.self_align.weight:
        watched |= {f"self_align.{key}": getattr(recipe.self_align, key) for key in ("block", "teacher_block")}
    watched["objective.dispersive_block"] = recipe.objective.dispersive_block
    if beyond := [key for key, block in watched.items() if block > depth]:
        raise RecipeError(f"{beyond[0]} {watched[beyond[0]]}: model '{name}' has {depth} blocks.")
