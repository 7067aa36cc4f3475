"""The state of a run, built from recipe and store: model, optimizer, averages and loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...datasets.errors import RecipeError
from ...datasets.format.schema import EncoderIdentity, LatentSpec, LatentStatistics, StoreSpec
from ...datasets.loader import BatchLoader
from ...datasets.revisions.encoder_paths import encoder_section, vae_of
from ...datasets.store import LatentStore
from ..config import TrainRecipe
from ..metrics.flops import meta_model, shortened
from ..models.build import patch_of
from ..models.diffusers.adapters import trained_parameters
from ..models.diffusers.families import family_of
from ..models.spec import ModelSpec
from ..optim.ema import build_rules, first_share
from ..parallel.ranks import ALONE, Ranks
from ..step.learner import Learner, build_learner
from ..weights.checkpoint import YOUNG
from ..weights.sources import class_map_warning, scale_warning, young_warning
from .data import buckets_at, build_loader
from .fit import model_for_stores
from .texts import null_captions


@dataclass(kw_only=True)
class TrainState(Learner):
    """A learner with its data.

    Args:
      stores: of the recipe, in order.
      extra: what a snapshot stores beside its tensors.
    """

    stores: list[LatentStore]
    loader: BatchLoader
    extra: dict[str, Any]


def prepare(
    recipe: TrainRecipe,
    stores: Sequence[LatentStore],
    device: torch.device,
    warn: Callable[[str], None],
    ranks: Ranks = ALONE,
    statistics: LatentStatistics | None = None,
) -> TrainState:
    """Build model, averages, optimizer and loader; nothing is written.

    Args:
      stores: those that the recipe names, in order, else the only one.
      warn: called with each part of the stores that does not train.
      ranks: of this process; ``ranks.connected`` has connected it.
      statistics: of the latents, as the run began; None for a new run.
    Raises: RecipeError, StoreError, RunError: recipe and stores do not fit.
    """
    if recipe.lora.rank and not recipe.model.init_from:
        raise RecipeError(
            f"lora.rank {recipe.lora.rank}: adapters need weights that they adapt. Name them with model.init_from: a "
            "run, or a hub id or folder in diffusers' layout."
        )
    spec, store = model_for_stores(recipe, stores)
    source, classes = recipe.model.init_from, store.spec.classes or []
    if source and not spec.takes_text and (warning := class_map_warning(source, spec.num_classes, classes)):
        warn(warning)
    loader = build_loader(recipe, stores, spec, device, warn, ranks, statistics)
    latent = loader.dataset.reader.latent_specs[0]
    for warning in (scale_warning(source, latent), young_warning(source)) if source else ():
        if warning:
            warn(warning)
    null, null_pooled = null_captions(spec, store)
    learner = build_learner(
        recipe,
        spec,
        device,
        null_caption=None if null is None else null.to(device),
        null_pooled=None if null_pooled is None else null_pooled.to(device),
        source_sizes=[torch.from_numpy(each.sizes[:, :2]).to(device).float() for each in stores if spec.takes_sizes],
        ranks=ranks,
        store=store.spec,
        compiled=recipe.run.compile and device.type == "cuda",
        pretrained=True,
    )
    buckets, hashes = buckets_at(recipe.data, stores, 1), [each.root_hash for each in stores]
    where = {"place": store.path, "buckets": buckets, "root_hashes": hashes}
    extra = snapshot_state(recipe, store.spec, spec, latent=latent, **where)
    if learner.frozen:
        extra["frozen"] = learner.frozen.model_dump()
    return TrainState(**vars(learner), stores=list(stores), loader=loader, extra=extra)


def snapshot_state(
    recipe: TrainRecipe,
    store: StoreSpec,
    spec: ModelSpec,
    *,
    latent: LatentSpec,
    place: Path,
    buckets: Mapping[str, int],
    root_hashes: Sequence[str | None],
) -> dict[str, Any]:
    """What a snapshot stores beside its tensors: all that sampling and export need of recipe and store.

    Args:
      latent: of the store, with the normalisation of the recipe.
      place: folder of the store, which relative paths of encoders start from.
      buckets: that train, with their number of records.
      root_hashes: of all stores.
    """
    encoder = store.text_encoder

    def text_encoder(name: str, identity: EncoderIdentity) -> dict[str, Any]:
        section = encoder_section(store, f"text.{name}" if name else "text", place)
        return {"model": section, "weights_sha256": identity.weights_sha256}

    read = {one.name: text_encoder(one.name, store.text_encoder_of(one.name).encoder) for one in spec.texts}
    return {
        "spec": spec.model_dump(),
        "objective": recipe.objective.model_dump(),
        "drop": recipe.conditioning.drop,
        "latent": latent.model_dump(),
        "text": store.text and store.text.model_dump(),
        "vae": vae_of(store, place),
        "text_encoder": encoder and text_encoder("", encoder),
        "texts": read,
        "classes": store.classes,
        "class_names": store.class_names,
        "buckets": dict(buckets),
        "root_hashes": list(root_hashes),
    }


def origin_lines(state: TrainState, run: Path) -> Iterator[str]:
    """Lines on the first weights, what was converted of them, what trains, and what takes longer than the run."""
    recipe, steps = state.recipe, state.recipe.run.steps
    if state.step:
        yield f"run '{run}' resumes after step {state.step}"
    else:
        yield f"run '{run}' begins from {', '.join([state.origin, *_positions(state)])}"
    model = meta_model(state.spec)
    total = shortened(sum(parameter.numel() for parameter in model.parameters()))
    if adapter := state.spec.adapter:
        trained = shortened(sum(parameter.numel() for parameter in trained_parameters(model).values()))
        scale = f"rank {adapter.rank}, alpha {adapter.alpha:g}"
        frozen = state.frozen.source if state.frozen else recipe.model.init_from
        yield f"{state.spec.name}: adapters of {scale} train, {trained} of {total} parameters; '{frozen}' is frozen"
    else:
        yield f"{state.spec.name}: all {total} parameters train"
    if (warmup := recipe.schedule.warmup_steps) >= steps:
        yield (
            f"schedule.warmup_steps {warmup}: the learning rate rises until then, the run ends at step {steps}, so it "
            "may seem not to learn. For a short test --set schedule.warmup_steps=0"
        )
    if (share := first_share(build_rules(recipe)[0], steps)) > YOUNG:
        yield (
            f"run.ema_decay {recipe.ema_decay:g}: the average is longer than the run, at its end {share:.0%} of it is "
            "still what the run began with, and so are snapshots and pictures. For a short run --set ema.warmup=true"
        )


def _positions(state: TrainState) -> Iterator[str]:
    """The span of a DiT's positions, where it is that of other pictures than those of the store."""
    spec = state.spec
    of_store = max(store.spec.images.resolution_px // store.spec.latent.downscale for store in state.stores)
    if not family_of(spec.name) and spec.base_size != of_store:
        learned, new = spec.base_size // patch_of(spec), of_store // patch_of(spec)
        yield f"positions over {learned} tokens a side as it has learned, not {new}"
