"""The state of a run, built from recipe and store: model, optimizer, averages and loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...datasets.format.encoder_paths import encoder_section
from ...datasets.format.schema import StoreSpec
from ...datasets.loader import BatchLoader
from ...datasets.store import LatentStore
from ..config import TrainRecipe
from ..models.spec import ModelSpec
from ..parallel.ranks import ALONE, Ranks
from ..step.learner import Learner, build_learner
from ..weights.init_from import class_map_warning
from .data import build_loader
from .model_for_store import check_sizes, model_spec


@dataclass(kw_only=True)
class TrainState(Learner):
    """A learner with its data.

    Args:
      extra: what a snapshot stores beside its tensors.
    """

    store: LatentStore
    loader: BatchLoader
    extra: dict[str, Any]


def prepare(
    recipe: TrainRecipe,
    store: LatentStore,
    device: torch.device,
    warn: Callable[[str], None],
    ranks: Ranks = ALONE,
) -> TrainState:
    """Build model, averages, optimizer and loader; nothing is written.

    Args:
      warn: called with each part of the store that does not train.
      ranks: of this process; ``ranks.connected`` has connected it.
    Raises: RecipeError, StoreError, RunError: recipe and store do not fit.
    """
    spec = model_spec(recipe, store.spec, str(store.path))
    check_sizes(spec, store.spec.latent, list(store.buckets))
    source, classes = recipe.model.init_from, store.spec.classes or []
    if source and not spec.takes_text and (warning := class_map_warning(source, spec.num_classes, classes)):
        warn(warning)
    loader = build_loader(recipe, store, spec, device, warn, ranks)
    learner = build_learner(
        recipe,
        spec,
        device,
        null_caption=torch.from_numpy(store.null_caption).to(device).float() if spec.takes_text else None,
        source_sizes=torch.from_numpy(store.sizes[:, :2]).to(device).float() if spec.takes_sizes else None,
        ranks=ranks,
        compiled=recipe.run.compile and device.type == "cuda",
        pretrained=True,
    )
    extra = snapshot_state(recipe, store.spec, spec, place=store.path, buckets=store.buckets, root_hash=store.root_hash)
    return TrainState(**vars(learner), store=store, loader=loader, extra=extra)


def snapshot_state(
    recipe: TrainRecipe,
    store: StoreSpec,
    spec: ModelSpec,
    *,
    place: Path,
    buckets: Mapping[str, int],
    root_hash: str | None,
) -> dict[str, Any]:
    """What a snapshot stores beside its tensors: all that sampling and export need of recipe and store.

    Args:
      place: folder of the store, which relative paths of encoders start from.
      buckets: of the store, with their number of records.
    """
    vae, encoder = store.vae, store.text_encoder
    return {
        "spec": spec.model_dump(),
        "objective": recipe.objective.model_dump(),
        "drop": recipe.conditioning.drop,
        "latent": store.latent.model_dump(),
        "text": store.text and store.text.model_dump(),
        "vae": {
            "model": encoder_section(store, "vae", place),
            "class_name": vae.class_name,
            "weights_sha256": vae.weights_sha256,
        },
        "text_encoder": encoder
        and {"model": encoder_section(store, "text", place), "weights_sha256": encoder.weights_sha256},
        "classes": store.classes,
        "class_names": store.class_names,
        "buckets": dict(buckets),
        "root_hash": root_hash,
    }
