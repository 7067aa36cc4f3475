"""The model of a recipe, with the sizes of its stores; and all that does not fit, in one message.

Each check yields sentences: what is missing or wrong, and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...datasets.format.buckets import bucket_size
from ...datasets.format.schema import LatentSpec, StoreSpec, TextEncoder
from ...datasets.order.alike import check_alike, store_names
from ...datasets.store import LatentStore
from ...errors import RecipeError, RunError
from ...recipe import shipped_recipes
from ..config import TrainRecipe
from ..models.build import (
    FAMILIES,
    check_model_name,
    diffusers_names,
    family_of,
    most_tokens_a_side,
    pixels_per_token,
    takes_guidance,
)
from ..models.dit import size_of
from ..models.dit_dh import is_dit_dh
from ..models.spec import AdapterSpec, DiTOptions, ModelSpec, ProjectorSpec, TextInput
from ..objectives.losses import num_outputs
from ..techniques.registry import features_of, routed_blocks, techniques_of
from ..weights.sources import position_grid, read_config, read_scheduler


class Place(NamedTuple):
    """A store to train on: its name for messages, what it holds, and its buckets."""

    name: str
    spec: StoreSpec
    buckets: Sequence[str] = ()


def model_for_stores(
    recipe: TrainRecipe, stores: Sequence[LatentStore], learned: ModelSpec | None = None
) -> tuple[ModelSpec, LatentStore]:
    """The model that trains on all stores, and the store of the largest images, for whose resolution it is made.

    Args:
      learned: as in ``check_fit``.
    Raises: RunError: recipe and stores do not fit.
    """
    names = store_names(stores)
    places = [Place(name, store.spec, list(store.buckets)) for name, store in zip(names, stores, strict=True)]
    captions, features = recipe.takes_captions, features_of(recipe)
    named_specs = [(place.name, place.spec) for place in places]
    check_alike(named_specs, captions=captions, classes=not captions, features=features)
    first = max(range(len(stores)), key=lambda number: places[number].spec.images.resolution_px)
    return check_fit(recipe, [places.pop(first), *places], learned), stores[first]


def model_spec(recipe: TrainRecipe, store: StoreSpec, where: str, buckets: Sequence[str] = ()) -> ModelSpec:
    """The model of a recipe for one store.

    Raises: as ``check_fit``.
    """
    return check_fit(recipe, [Place(f"'{where}'", store, buckets)])


def check_fit(recipe: TrainRecipe, places: Sequence[Place], learned: ModelSpec | None = None) -> ModelSpec:
    """The model of a recipe, with the sizes of the first store.

    Args:
      learned: the model of a run that resumes: what it has of ``model.init_from`` is not read there again.
    Raises: RecipeError: the recipe is not valid for its model; RunError: with all that a store lacks for the model.
    """
    check_model_name(recipe.model.name)
    for contradiction in _contradictions(recipe):
        raise RecipeError(contradiction)
    places = [*{place.name: place for place in places}.values()]  # a store that is named twice is listed once
    lacks = {place.name: [*_lacks(recipe, place)] for place in places}
    spec = None if any(lacks.values()) else _spec(recipe, places[0].spec, learned)
    if spec and recipe.model.guidance != 1 and not takes_guidance(spec):
        raise RecipeError(
            f"model.guidance {recipe.model.guidance:g}: model '{spec.name}' does not take the guidance scale as an "
            "input, so it would have no effect. Leave it out; sampling has a guidance of its own."
        )
    if spec:
        lacks[places[0].name] += _config_lacks(recipe, spec) if spec.config else ()
        for place in places:
            lacks[place.name] += _size_lacks(spec, place.spec.latent, place.buckets)
    if spec is None or any(lacks.values()):
        stores = "; ".join(f"store {name}: {'; '.join(phrases)}" for name, phrases in lacks.items() if phrases)
        fits = _store_that_fits(recipe, places[0].spec.images.resolution_px)
        raise RunError(f"model '{recipe.model.name}', {stores}{fits}.")
    return spec


def _store_that_fits(recipe: TrainRecipe, resolution_px: int) -> str:
    """The command that makes a store for a model of diffusers, near the resolution of the store that does not fit."""
    if not (family := family_of(recipe.model.name)):
        return ""
    kind = FAMILIES[family].recipe.rpartition("-")[0]
    named = [name.rpartition("-") for name in shipped_recipes("leandit.precompute")]
    nearest = min((int(side) for start, _, side in named if start == kind), key=lambda side: abs(side - resolution_px))
    table = f" with a table [companions.{recipe.model.reference}] of an image" if recipe.model.reference else ""
    return f". 'leandit precompute {kind}-{nearest}'{table} makes a store that fits"


def _spec(recipe: TrainRecipe, store: StoreSpec, learned: ModelSpec | None) -> ModelSpec:
    """The model for a store that lacks nothing, with the config of the weights to fine-tune.

    Args:
      learned: as in ``check_fit``.
    """
    name, source, family = recipe.model.name, recipe.model.init_from, family_of(recipe.model.name)
    num_classes, caption_width, texts = 0, 0, ()
    techniques, projectors = techniques_of(recipe), dict[str, ProjectorSpec]()
    for technique in techniques:
        projectors |= technique.projectors(store, 0 if family else size_of(name)[1])
    if not recipe.takes_captions:
        num_classes = recipe.model.num_classes or len(store.classes or ())
    elif roles := _roles(recipe):
        texts = tuple(_input(role, encoder) for role, encoder in zip(roles, _encoders(recipe, store), strict=True))
        caption_width = _joined_width(texts)
    elif store.text:
        caption_width = store.text.width
    # Latent side whose tokens are one position apart: the store's, or that which a DiT's weights have learned.
    base_size = store.images.resolution_px // store.latent.downscale
    config: dict[str, Any] = {}
    scheduler: dict[str, Any] = {}
    if learned:
        scheduler = learned.scheduler
    elif source:
        scheduler = read_scheduler(source)
    if learned:
        base_size = learned.base_size
        config = learned.config
    elif source and family:
        config = read_config(source, family)
    elif source and (grid := position_grid(source)):
        base_size = grid * size_of(name)[-1]
    adapter = None
    if family and (lora := recipe.lora).rank:
        targets = tuple(lora.targets) or FAMILIES[family].adapted
        adapter = AdapterSpec(rank=lora.rank, alpha=lora.alpha or lora.rank, targets=targets)
    return ModelSpec(
        name=name,
        channels=store.latent.channels,
        out_channels=num_outputs(recipe.objective, store.latent.channels),
        num_classes=num_classes,
        caption_width=caption_width,
        base_size=base_size,
        options=_options(recipe),
        projectors=projectors,
        fused=routed_blocks(techniques, size_of(name)[0]) if any(technique.fuses for technique in techniques) else None,
        drops_path=any(technique.drops_path for technique in techniques),
        adapter=adapter,
        texts=texts,
        guidance=recipe.model.guidance,
        scheduler=scheduler,
        pads_null=FAMILIES[family].pads_null if family else True,
        reference=recipe.model.reference,
        config=config,
    )


# ------------------------------------------------------------------------------------------------- recipe and model


def _options(recipe: TrainRecipe) -> DiTOptions:
    return DiTOptions(**{key: getattr(recipe.model, key) for key in DiTOptions.model_fields})


def _contradictions(recipe: TrainRecipe) -> Iterator[str]:
    """What the recipe asks for that its model does not have.

    Raises: RecipeError: of a technique.
    """
    name, techniques = recipe.model.name, techniques_of(recipe)
    family = family_of(name)
    if family or is_dit_dh(name):
        if _options(recipe) != DiTOptions():
            yield f"model '{name}': model.{', model.'.join(DiTOptions.model_fields)} are options only of DiT."
        if keys := [technique.key for technique in techniques if technique.reads_blocks]:
            yield f"model '{name}': {', '.join(keys)} need the blocks of a DiT. Use a DiT."
        if (not family or FAMILIES[family].is_flow) and recipe.objective.kind != "flow":
            yield f"objective.kind '{recipe.objective.kind}': model '{name}' predicts a velocity. Use 'flow'."
        if recipe.conditioning.kind == ("label" if family else "caption"):
            takes = "captions" if family else "labels"
            yield f"conditioning.kind '{recipe.conditioning.kind}': model '{name}' takes {takes}. Use a DiT, or 'auto'."
    pipeline_shifts = family is not None and FAMILIES[family].resolution_shift is not None
    for key, shift in (("objective.shift", recipe.objective.shift), ("run.sample_shift", recipe.run.sample_shift)):
        if shift == "resolution" and not pipeline_shifts:
            families = ", ".join(name for name, kind in FAMILIES.items() if kind.resolution_shift)
            yield (
                f"{key} 'resolution': the pipeline of model '{name}' computes no shift from the size of an image, "
                f"those of {families} do. Use a number."
            )
    if recipe.model.reference and not (family and FAMILIES[family].takes_reference):
        yield f"model.reference '{recipe.model.reference}': model '{name}' takes none. Remove the key."
    if not family and recipe.lora.rank:
        yield (
            f"lora.rank {recipe.lora.rank}: model '{name}' takes no adapters. Use one of "
            f"{', '.join(diffusers_names())}, or lora.rank 0."
        )
    if not family and not is_dit_dh(name):
        depth = size_of(name)[0]
        routed_blocks(techniques, depth)
        for technique in techniques:
            technique.check_model(name, depth, techniques)
    if recipe.conditioning.texts and not _roles(recipe):
        yield f"conditioning.texts: model '{name}' reads one text encoder at most, that of [text]."
    if recipe.model.time == "to_data" and recipe.objective.kind != "flow":
        yield f"model '{name}': model.time 'to_data' is for objective.kind 'flow', which has a velocity."


# --------------------------------------------------------------------------------------------------- model and store


def _lacks(recipe: TrainRecipe, place: Place) -> Iterator[str]:
    store, made_for = place.spec, recipe.model.channels
    yield from _caption_lacks(recipe, place) if recipe.takes_captions else _class_lacks(recipe, store)
    if made_for not in (0, store.latent.channels):
        yield (
            f"it is built for {made_for} latent channels (model.channels), but the store has {store.latent.channels}: "
            "precompute with its VAE, or --set model.channels=0 for those of the store"
        )
    images = [one.name for one in store.companions if one.kind == "image"]
    if (reference := recipe.model.reference) and reference not in images:
        is_mask = any(one.name == reference for one in store.companions)
        what = "it is a mask; expected a companion image" if is_mask else f"no companion image '{reference}'"
        yield f"model.reference '{reference}': {what}, available: {', '.join(images) or 'none'}"
    for technique in techniques_of(recipe):
        yield from technique.lacks(store)


def _class_lacks(recipe: TrainRecipe, store: StoreSpec) -> Iterator[str]:
    num_stored, num_classes = len(store.classes or ()), recipe.model.num_classes
    if not num_stored:
        yield "it needs class labels, the store has none: use a model with captions, or set conditioning.kind=caption"
    elif 0 < num_classes < num_stored:
        yield (
            f"it is built for {num_classes} classes (model.num_classes), but the store has {num_stored}: use "
            "--set model.num_classes=0 for those of the store"
        )


def _size_lacks(spec: ModelSpec, latent: LatentSpec, buckets: Sequence[str]) -> Iterator[str]:
    """Buckets whose sides are not divisible by the patch size, or beyond the model's positions."""
    step, most = pixels_per_token(spec, latent), most_tokens_a_side(spec)
    for bucket in buckets:
        if most and max(bucket_size(bucket)) > most * step:
            yield (
                f"bucket '{bucket}' is larger than the model's table of positions, which ends at {most * step} px: "
                "use smaller buckets"
            )
        if any(side % step for side in bucket_size(bucket)):
            yield (
                f"bucket '{bucket}' is not divisible by the patch size of {step} px: use a model with smaller patches, "
                "or buckets that are multiples of it"
            )


def _config_lacks(recipe: TrainRecipe, spec: ModelSpec) -> Iterator[str]:
    """Where the config of the weights to fine-tune differs from what store and objective need."""
    needed = FAMILIES[family_of(spec.name) or ""].needs(spec)
    actual = {key: spec.config.get(key) for key in needed}
    if "out_channels" in actual:
        actual["out_channels"] = actual["out_channels"] or actual["in_channels"]
    if differing := [f"{key} is {actual[key]}, not {value}" for key, value in needed.items() if actual[key] != value]:
        yield (
            f"in model.init_from '{recipe.model.init_from}', {', '.join(differing)}: use the kind of store and "
            f"objective it was trained with (here '{recipe.objective.kind}')"
        )


# ----------------------------------------------------------------------------------------------------------- captions


def _roles(recipe: TrainRecipe) -> tuple[TextInput, ...]:
    """The text encoders that the model reads by role; empty for a model that reads that of ``[text]``."""
    family = family_of(recipe.model.name)
    return FAMILIES[family].texts if family else ()


def _encoders(recipe: TrainRecipe, store: StoreSpec) -> list[TextEncoder]:
    """The text encoders of a store that fill the roles, in the order of the roles."""
    encoders = {encoder.name: encoder for encoder in store.text_encoders}
    return [encoders[name] for name in recipe.conditioning.texts or encoders]


def _caption_lacks(recipe: TrainRecipe, place: Place) -> Iterator[str]:
    """What a store lacks of the captions that a model reads.

    Raises: RecipeError: ``conditioning.texts`` is not valid for model and store.
    """
    store, roles = place.spec, _roles(recipe)
    stored = [encoder.name for encoder in store.text_encoders]
    tables = ", ".join(map(_table, stored)) or "none"
    if roles:
        needed, names = ", ".join(role.name for role in roles), recipe.conditioning.texts
        if names and (len(names) != len(roles) or len(set(names)) < len(names) or not set(names) <= set(stored)):
            raise RecipeError(
                f"conditioning.texts {json.dumps(names)}: expected {needed}, in this order, by the names of text "
                f"encoders of store {place.name}, which has {tables}."
            )
        if not names and len(stored) != len(roles):
            do = ": name those to read, in this order, in conditioning.texts" if len(stored) > len(roles) else ""
            yield f"it reads {len(roles)} text encoders, {needed}, but the store has {tables}{do}"
            return
        for role, encoder in zip(roles, _encoders(recipe, store), strict=True):
            yield from _role_lacks(role, encoder)
    elif store.text is None and store.texts:
        yield f"it takes the captions of [text], but the store has only {tables}: precompute with its encoder as [text]"
    elif store.text is None:
        yield "it needs captions, but the store has none: precompute with text.kind"
    elif not store.text.has_tokens:
        yield (
            "it takes the tokens of captions, but [text] has only pooled vectors: precompute with a text encoder that "
            "gives tokens as [text]"
        )


def _role_lacks(role: TextInput, encoder: TextEncoder) -> Iterator[str]:
    """What an encoder does not give of what a role reads."""
    spec, reads = encoder.spec, f"it reads {role.name} from {_table(encoder.name)}, which has"
    if role.tokens and not spec.has_tokens:
        yield f'{reads} only pooled vectors: precompute with output = "both"'
    if role.pooled_width and not spec.pooled_width:
        yield f'{reads} no pooled vectors: precompute with output = "both", or set the order in conditioning.texts'
    if role.tokens and spec.has_tokens and not spec.full_length:
        yield f"{reads} only the valid tokens, but the model reads padding too: precompute with full_length = true"


def _input(role: TextInput, encoder: TextEncoder) -> TextInput:
    spec = encoder.spec
    return TextInput(
        name=encoder.name,
        tokens=spec.max_tokens if role.tokens else 0,
        width=spec.width,
        pooled_width=spec.pooled_width if role.pooled_width else 0,
        beside=role.beside,
    )


def _joined_width(inputs: tuple[TextInput, ...]) -> int:
    """Width of the widest token, with those that are joined to it."""
    widths: list[int] = []
    for text in inputs:
        if text.beside:
            widths[-1] += text.width
        elif text.tokens:
            widths.append(text.width)
    return max(widths)


def _table(name: str) -> str:
    return f"[text.{name}]" if name else "[text]"
