"""The model of a recipe, with the sizes of its stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ...datasets.errors import RunError
from ...datasets.format.buckets import bucket_size
from ...datasets.format.schema import LatentSpec, StoreSpec
from ...datasets.order.alike import check_alike
from ...datasets.store import LatentStore
from ..config import TrainRecipe
from ..models.build import check_model_keys, most_tokens_a_side, options_of, pixels_per_token, routed_blocks
from ..models.diffusers.families import FAMILIES, family_of
from ..models.dit import size_of
from ..models.spec import AdapterSpec, ModelSpec, ProjectorSpec
from ..objective_recipe import SELF
from ..objectives.losses import num_outputs
from ..weights.sources import position_grid, read_config
from .texts_for_store import caption_inputs, caption_lacks


def model_for_stores(recipe: TrainRecipe, stores: Sequence[LatentStore]) -> tuple[ModelSpec, LatentStore]:
    """The model that trains on all stores, and the store of the largest pictures, for whose resolution it is made.

    Raises: RunError: recipe and stores do not fit.
    """
    specs = [(store.path, store.spec) for store in stores]
    check_alike(specs, captions=recipe.takes_captions, classes=not recipe.takes_captions)
    largest = max(stores, key=lambda store: store.spec.images.resolution_px)
    spec = model_spec(recipe, largest.spec, str(largest.path))
    for store in stores:
        if (found := projectors(recipe, store.spec, str(store.path))) != spec.projectors:
            raise RunError(
                f"stores '{largest.path}' and '{store.path}' cannot be mixed: their image features are "
                f"{_widths(spec.projectors)} and {_widths(found)} wide. Needed features of the same model."
            )
        check_sizes(spec, store.spec.latent, list(store.buckets))
    return spec, largest


def model_spec(recipe: TrainRecipe, store: StoreSpec, where: str) -> ModelSpec:
    """Derive the model from the recipe and its store.

    Args:
      where: path of the store, for the messages.
    Raises: RecipeError: as ``check_model_keys``; RunError: the model does not fit the store.
    """
    check_model_keys(recipe)
    _check_fits(recipe, store, where)
    name, latent = recipe.model.name, store.latent
    num_classes, caption_width, texts = 0, 0, ()
    if recipe.takes_captions:
        caption_width, texts = caption_inputs(recipe, store)
    else:
        num_classes = recipe.model.num_classes or len(store.classes or ())
    spec = ModelSpec(
        name=name,
        channels=latent.channels,
        out_channels=num_outputs(recipe.objective, latent.channels),
        num_classes=num_classes,
        caption_width=caption_width,
        base_size=_base_size(recipe, store),
        options=options_of(recipe),
        projectors=projectors(recipe, store, where),
        fused=routed_blocks(recipe.routing, size_of(name)[0]) if recipe.routing.kind == "sprint" else None,
        adapter=_adapter(recipe),
        texts=texts,
    )
    return _with_config(spec, recipe, where)


def _check_fits(recipe: TrainRecipe, store: StoreSpec, where: str) -> None:
    """Raise RunError with all that a store lacks for a model."""
    lacks = caption_lacks(recipe, store, where) if recipe.takes_captions else _class_lacks(recipe, store)
    if recipe.model.channels not in (0, store.latent.channels):
        lacks.append(
            f"it is made for {recipe.model.channels} latent channels (model.channels), and there are "
            f"{store.latent.channels}: precompute with its VAE, or --set model.channels=0 for those of the store"
        )
    if lacks:
        family = family_of(recipe.model.name)
        fits = f". 'leandit precompute {FAMILIES[family].recipe}' makes a store that fits" if family else ""
        raise RunError(f"model '{recipe.model.name}', store '{where}': {'; '.join(lacks)}{fits}.")


def _class_lacks(recipe: TrainRecipe, store: StoreSpec) -> list[str]:
    """What a store lacks of the labels that a model reads."""
    num_stored, num_classes = len(store.classes or ()), recipe.model.num_classes
    if not num_stored:
        return [
            "it needs class labels, and there are none: use a model with captions, or --set conditioning.kind=caption"
        ]
    if 0 < num_classes < num_stored:
        return [
            f"it is made for {num_classes} classes (model.num_classes), and there are {num_stored}: use "
            "--set model.num_classes=0 for those of the store"
        ]
    return []


def _base_size(recipe: TrainRecipe, store: StoreSpec) -> int:
    """Latent side whose tokens are one position apart: the store's, or that which a DiT's weights have learned."""
    name, source = recipe.model.name, recipe.model.init_from
    if source and not family_of(name) and (grid := position_grid(source)):
        return grid * size_of(name)[-1]
    return store.images.resolution_px // store.latent.downscale


def _adapter(recipe: TrainRecipe) -> AdapterSpec | None:
    section, family = recipe.lora, family_of(recipe.model.name)
    if not section.rank or family is None:
        return None
    targets = tuple(section.targets) or FAMILIES[family].adapted
    return AdapterSpec(rank=section.rank, alpha=section.alpha or section.rank, targets=targets)


def projectors(recipe: TrainRecipe, store: StoreSpec, where: str) -> dict[str, ProjectorSpec]:
    """The projectors to the image features that the recipe aligns with.

    Raises: RunError: the store has no such feature, or not the tokens that are needed.
    """
    features, found = {one.name: one.spec for one in store.features}, dict[str, ProjectorSpec]()
    for name, section in recipe.align.items():
        if name not in features:
            known = ", ".join(features) or "none"
            raise RunError(
                f"align.{name}: store '{where}' has no image feature '{name}'. There are: {known}. Add it: precompute "
                f"again with a recipe that has a table [features.{name}]."
            )
        if hasattr(nn.ModuleDict, name):
            raise RunError(
                f"align.{name}: a model has an attribute of this name. Precompute the feature under another."
            )
        needed = {"patches", "cls"} if section.class_weight else {"patches"}
        output = features[name].output
        if needed - ({"patches", "cls"} if output == "both" else {output}):
            raise RunError(
                f"align.{name}: store '{where}' has only its {output}, needed {' and '.join(sorted(needed))}. "
                f'Precompute with features.{name}.output = "both", under another name.'
            )
        found[name] = ProjectorSpec(
            block=section.block,
            width=section.projector_width,
            feature_width=features[name].width,
            has_class=section.class_weight > 0,
        )
    if recipe.self_align.weight:
        width = size_of(recipe.model.name)[1]
        own = recipe.alignments[SELF]
        found[SELF] = ProjectorSpec(block=own.block, width=own.projector_width, feature_width=width)
    return found


def _widths(specs: Mapping[str, ProjectorSpec]) -> list[int]:
    return [one.feature_width for one in specs.values()]


def _with_config(spec: ModelSpec, recipe: TrainRecipe, where: str) -> ModelSpec:
    """The spec with the config of the model to fine-tune, which must fit store and objective."""
    family, source = family_of(spec.name), recipe.model.init_from
    if not (family and source):
        return spec
    config = read_config(source, family)
    if not config:  # a run of ours from scratch
        return spec
    needed = {"in_channels": spec.channels, "out_channels": spec.out_channels}
    if family == "sd3":
        needed |= {"joint_attention_dim": spec.caption_width, "pooled_projection_dim": spec.pooled_width}
    else:
        needed["caption_channels"] = spec.caption_width
    actual = {key: config.get(key) for key in needed}
    actual["out_channels"] = actual["out_channels"] or actual["in_channels"]
    if differing := [f"{key} is {actual[key]}, not {value}" for key, value in needed.items() if actual[key] != value]:
        raise RunError(
            f"model '{source}', store '{where}', objective '{recipe.objective.kind}': its {', its '.join(differing)}. "
            f"Use the kind of store and objective it was trained with; 'leandit precompute {FAMILIES[family].recipe}' "
            "makes a store for published weights."
        )
    return spec.model_copy(update={"config": config})


def check_sizes(spec: ModelSpec, latent: LatentSpec, buckets: list[str]) -> None:
    """Raise RunError if the sides of a bucket are not divisible by the patch size, or beyond the model's positions."""
    step, most = pixels_per_token(spec, latent), most_tokens_a_side(spec)
    for bucket in buckets:
        if most and max(bucket_size(bucket)) > most * step:
            raise RunError(
                f"model '{spec.name}': bucket '{bucket}' is larger than its table of positions, which ends at "
                f"{most * step} px. Use smaller buckets."
            )
        if any(int(side) % step for side in bucket.split("x")):
            raise RunError(
                f"model '{spec.name}': bucket '{bucket}' is not divisible by the patch size of {step} px. "
                "Use a model with smaller patches, or buckets that are multiples of it."
            )
