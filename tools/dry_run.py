"""``--dry-run``: the resolved recipe, what would be read, fetched and written, and for how long. Nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import torch
from torch import nn

from ..datasets.buckets import bucket_size
from ..datasets.errors import RecipeError
from ..datasets.frozen import FrozenPlan
from ..datasets.recipe import to_toml
from ..datasets.schema import StoreSpec
from ..datasets.store import LatentStore
from ..precompute.config import PrecomputeRecipe, TextSection, VaeSection
from ..precompute.decoder import Decoders
from ..precompute.describe import describe_store
from ..precompute.encoders import load_encoders
from ..precompute.model_files import local_folder, model_folder, model_name
from ..precompute.opening import check_apart, check_fingerprint, is_sealed, look_for_plan
from ..precompute.picture_plan import num_threads, picture_table, plan_pictures
from ..precompute.sources import list_source
from ..train.config import TrainRecipe
from ..train.ema import build_rules
from ..train.models import build_model, check_model_name, check_sizes, model_spec
from ..train.optimizer_state import expected_tensors
from ..train.precision import autocast_dtype
from .prediction import StoreBytes, predict_lines
from .progress import ProgressLine

NO_LIMIT = {"max_reject_share": 1.0, "max_rejects_in_a_row": 1 << 62}  # a dry run counts all rejects


def describe_precompute(
    recipe: PrecomputeRecipe,
    source_path: Path | str | None,
    device: torch.device,
    *,
    num_devices: int = 1,
    store: Path | None = None,
    new_revision: bool = False,
) -> tuple[str, StoreBytes | None]:
    """What a precompute would do.

    Args:
      source_path: is scanned if given; without it, only the recipe is shown.
      device: of the probe; the first of those that would encode.
      num_devices: that would encode.
      store: what is there of it is looked at, if given.
      new_revision: other encoders or settings than the store's would make its next revision.
    Returns: the text, and what the store will take, where the encoders are here.
    Raises: StoreError, FingerprintMismatch: a precompute would refuse the store.
    """
    there = look_for_plan(store) if store else None
    lines = [to_toml(recipe), *encoder_lines(recipe)]
    if source_path is None:
        return "\n".join([*lines, "give --source to count its pictures"]), None
    with ProgressLine() as progress:
        source = list_source(source_path, recipe.source.kind, progress=lambda done: progress("list", done, 0))
    if store:
        check_apart(store, source, source_path)
    everything = recipe.model_copy(update={"source": recipe.source.model_copy(update=NO_LIMIT)})
    with ProgressLine() as progress, Decoders(num_threads()) as decoders:
        total = len(source.records)
        looked_at = plan_pictures(
            source, source.records, everything, decoders, progress=lambda done: progress("scan", done, total)
        )
        pictures = picture_table(looked_at)
    rejects, buckets = _counted(pictures["reason"]), _counted(pictures["bucket"])
    lines += ["", f"{'source':<20}{source.kind} '{source_path}', {len(source.records)} records"]
    lines += [f"{'would reject':<20}{count} x {reason}" for reason, count in sorted(rejects.items())]
    lines += ["", f"{'bucket':<20}{'records':>10}"]
    lines += [f"{name:<20}{buckets[name]:>10}" for name in sorted(buckets, key=bucket_size)]
    wanted = [recipe.vae.model] + ([recipe.text.model] if recipe.text.kind != "none" else [])
    if any(local_folder(model) is None for model in wanted):
        return "\n".join([*lines, "", "bytes and time are known once the encoders are here"]), None
    encoders = load_encoders(recipe, device)
    spec = describe_store(recipe, source, encoders, known=there and there.spec)
    if store and there:
        is_complete = is_sealed(store, there)
        if not (new_revision and is_complete):
            check_fingerprint(store, there.spec, spec)
        lines += ["", f"{'store':<20}'{store}', {store_state(there, spec, is_complete=is_complete)}"]
    sizes, found = predict_lines(recipe, spec, source, pictures, encoders, num_devices=num_devices)
    return "\n".join([*lines, "", *sizes]), found


def store_state(there: FrozenPlan, spec: StoreSpec, *, is_complete: bool) -> str:
    """What is there already, and what of it a precompute would do."""
    if not is_complete:
        return f"revision {there.revision} is begun: what is missing of it is made. All of it takes:"
    if there.spec.fingerprint != spec.fingerprint:
        return f"revision {there.revision} is complete: all is encoded anew beside it, which takes:"
    return f"revision {there.revision} is complete: only what has changed since is encoded. A new store would take:"


def _counted(names: pa.ChunkedArray) -> dict[str, int]:
    """How often each name stands in a column; nulls are not counted."""
    found = names.drop_null().value_counts()
    return dict(zip(found.field("values").to_pylist(), found.field("counts").to_pylist(), strict=True))


def encoder_lines(recipe: PrecomputeRecipe) -> list[str]:
    """Where each encoder comes from."""
    wanted: list[tuple[str, VaeSection | TextSection]] = [("vae", recipe.vae)]
    if recipe.text.kind != "none":
        wanted.append(("text encoder", recipe.text))
    lines = []
    for role, section in wanted:
        folder = local_folder(section.model)
        if folder is None:
            where = f"{section.model}/{section.subfolder}" if section.subfolder else section.model
            lines.append(f"{role:<20}'{where}': would be fetched from the hub (safetensors), or taken from its cache")
        else:
            folder = model_folder(folder, section.subfolder)
            state = "a folder here" if folder.is_dir() else "a folder that is MISSING"
            lines.append(f"{role:<20}'{model_name(section, folder)}': {state}")
    return lines


def describe_train(recipe: TrainRecipe, store_path: Path | str | None, device: torch.device) -> str:
    """What a training run would do.

    Args:
      store_path: is opened if given; without it, only the recipe is shown.
    """
    lines = [to_toml(recipe)]
    asked = recipe.run.precision
    actual = asked if asked != "bf16" or autocast_dtype(asked, device) else "fp32, this device has no fast bf16"
    lines.append(f"{'device':<20}{device}, {actual}, {os.cpu_count()} cores")
    blocked = _refusal(lambda: check_model_name(recipe.model.name))
    if blocked:
        return "\n".join([*lines, f"{'cannot run yet':<20}{blocked}"])
    if store_path is None:
        return "\n".join([*lines, "give --store to check that the model fits it"])
    store = LatentStore(store_path, allow_incomplete=recipe.run.allow_incomplete)
    spec = model_spec(recipe, store.spec, str(store_path))
    check_sizes(spec, store.spec.latent, list(store.buckets))
    with torch.device("meta"):
        model = build_model(spec, seed=0)
    parameters, held = sum(p.numel() for p in model.parameters()), held_bytes(recipe, model)
    records = sum(store.buckets.values())
    epochs = recipe.run.steps * recipe.run.global_batch / max(records, 1)
    lines += [
        f"{'model':<20}{spec.name}, {parameters / 1e6:.1f} M parameters, {spec.channels} latent channels",
        f"{'memory':<20}{held / 2**30:.2f} GiB of weights, gradients, {recipe.optimizer.name} and averages; "
        "activations: 'leandit plan train'",
        f"{'store':<20}'{store_path}', {records} records",
        f"{'run':<20}{recipe.run.steps} steps of {recipe.run.global_batch} images: {epochs:.1f} epochs",
        "",
        f"{'bucket':<20}{'records':>10}",
    ]
    return "\n".join([*lines, *(f"{name:<20}{count:>10}" for name, count in store.buckets.items())])


def held_bytes(recipe: TrainRecipe, model: nn.Module) -> int:
    """Bytes that one process holds from step to step, and the gradients.

    Args:
      model: on any device, the meta device too.
    """
    weights = sum(p.nbytes for p in model.parameters())
    of_optimizer = sum(tensor.nbytes for tensor in expected_tensors(recipe.optimizer, model).values())
    return weights * (2 + len(build_rules(recipe))) + of_optimizer


def _refusal(check: Callable[[], None]) -> str | None:
    """Message of a check that refuses, else None."""

    try:
        check()
    except RecipeError as error:
        return str(error)
    return None
