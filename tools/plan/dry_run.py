"""``--dry-run``: what would be read, fetched and written, and for how long; then the recipe. Nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ...datasets.disk.files import files_below
from ...datasets.errors import RecipeError, SourceError
from ...datasets.format.buckets import bucket_size
from ...datasets.format.class_names import ClassNames
from ...datasets.format.schema import StoreSpec
from ...datasets.recipe import to_toml
from ...datasets.revisions.commits import missing_work, read_commits
from ...datasets.revisions.plan import FrozenPlan
from ...datasets.store import LatentStore
from ...precompute.config import PrecomputeRecipe, TextSection, VaeSection
from ...precompute.encoders.describe import describe_store
from ...precompute.encoders.model_files import local_folder, model_folder, model_name
from ...precompute.encoders.vae import load_encoders
from ...precompute.images.decoders import Decoders
from ...precompute.planning.compare import Options, all_fresh
from ...precompute.planning.opening import Ground, Planner, check_apart, check_fingerprint, is_sealed, look_for_plan
from ...precompute.planning.pictures import num_threads
from ...precompute.progress.rejects import count_reasons
from ...precompute.sources.several import SourcePaths, list_sources
from ...train.config import TrainRecipe
from ...train.models.build import build_model, check_model_name
from ...train.optim.ema import build_rules
from ...train.optim.loss_scale import autocast_dtype
from ...train.optim.named_state import expected_tensors
from ...train.parallel.deepspeed_config import read_config, resolve
from ...train.parallel.deepspeed_engine import with_users_config
from ...train.parallel.ranks import read_ranks
from ...train.run.model_for_store import check_sizes, model_spec
from ..terminal.outcome import change_rows
from ..terminal.progress import ProgressLine
from .precompute_cost import StoreBytes, predict_lines


@dataclass(frozen=True)
class DryRun:
    """What a precompute would do.

    Args:
      text: for the user.
      found: what it would write, where the encoders are here.
      store_bytes: of the whole store when it is done, what is there included; 0 where it is not known.
      refusal: why it would stop, where it would reject too much.
    """

    text: str
    found: StoreBytes | None = None
    store_bytes: int = 0
    refusal: SourceError | None = None


def describe_precompute(
    recipe: PrecomputeRecipe,
    source_path: SourcePaths | None,
    device: torch.device,
    *,
    num_devices: int = 1,
    store: Path | None = None,
    new_revision: bool = False,
    options: Options | None = None,
) -> DryRun:
    """What a precompute would do; nothing is written.

    Args:
      source_path: of one or several; is scanned if given; without it, only the recipe is shown.
      device: of the probe; the first of those that would encode.
      num_devices: that would encode.
      store: what is there of it is looked at, if given.
      new_revision: other encoders or settings than the store's would make its next revision.
      options: as of a precompute, where the store grows.
    Raises: StoreError, FingerprintMismatch: a precompute would refuse the store.
    """
    there = look_for_plan(store) if store else None
    lines, shown = encoder_lines(recipe), ["", to_toml(recipe).rstrip()]
    lines += [f"{'warning':<20}{warning}" for warning in recipe.images.warnings()]
    if source_path is None:
        return DryRun("\n".join([*lines, "give --source to count its pictures", *shown]))
    with ProgressLine() as progress:
        source = list_sources(source_path, recipe.source, progress=lambda done: progress("list", done, 0))
    if store:
        check_apart(store, source)
    lines += ["", *(f"{'source':<20}{line}" for line in source.lines())]
    lines += [f"{'':<20}{note}" for note in source.notes]
    if source.classes:
        lines.append(f"{'classes':<20}{ClassNames(source.classes, source.class_names).summary()}")
    lines += [f"{'ignored':<20}{line}" for line in source.ignored.lines()]
    wanted = [recipe.vae.model] + ([recipe.text.model] if recipe.text.kind != "none" else [])
    has_encoders = all(local_folder(model) is not None for model in wanted)
    encoders = load_encoders(recipe, device) if has_encoders else None
    spec = encoders and describe_store(recipe, source, encoders, known=there and there.spec)
    with ProgressLine() as progress, Decoders(num_threads()) as decoders:
        tokenizer = encoders and encoders.tokenizer
        planner = Planner(store or Path(), spec, source, recipe, tokenizer, decoders, progress)
        comparison, ground = all_fresh(source.records), Ground()
        if store and there and spec:
            is_complete = is_sealed(store, there)
            if not (new_revision and is_complete):
                check_fingerprint(store, there.spec, spec)
            lines += ["", f"{'store':<20}'{store}', {store_state(store, there, spec, is_complete=is_complete)}"]
            if is_complete and there.spec.fingerprint == spec.fingerprint:
                changes, ground = planner.compare(options or Options())
                lines += [f"{name:<20}{value}" for name, value in change_rows(changes)] if changes else []
                if not ground or not changes:
                    return DryRun("\n".join([*lines, "nothing would be encoded", *shown]))
                comparison = changes
        limit = planner.limit(comparison, stops=False)
        pictures = planner.look_at(comparison.fresh, limit)
        refusal = (limit.ledger and limit.ledger.refusal()) or limit.error or planner.refusal(comparison, pictures)
        rejects, buckets = count_reasons(pictures["reason"]), count_reasons(pictures["bucket"])
        lines += [f"{'would encode':<20}{buckets.total()} pictures"]
        lines += [f"{'would reject':<20}{count} x {reason}" for reason, count in sorted(rejects.items())]
        lines += ["", f"{'bucket':<20}{'records':>10}"]
        lines += [f"{name:<20}{buckets[name]:>10}" for name in sorted(buckets, key=bucket_size)]
        if not encoders or not (buckets or ground.stack):
            lines += [] if encoders else ["", "bytes and time are known once the encoders are here"]
            return DryRun("\n".join([*lines, *shown]), refusal=refusal)
        plan = planner.plan(comparison, ground, pictures)
    devices = {"num_devices": num_devices}
    sizes, found = predict_lines(recipe, plan, source, comparison.fresh, pictures, encoders, **devices)
    before = sum(path.stat().st_size for path in files_below(store)) if store and ground.stack else 0
    return DryRun("\n".join([*lines, "", *sizes, *shown]), found, found.total + before, refusal)


def store_state(store: Path, there: FrozenPlan, spec: StoreSpec, *, is_complete: bool) -> str:
    """What is there already, and what of it a precompute would do."""
    if not is_complete:
        commits = read_commits(store, there)
        missing = missing_work(there, [task for task in there.layout.tasks() if task not in commits])
        return (
            f"revision {there.revision} is not complete, {missing} are missing and would be encoded. All of it takes:"
        )
    if there.spec.fingerprint != spec.fingerprint:
        return f"revision {there.revision} is complete: all would be encoded again beside it, which takes:"
    return f"revision {there.revision} is complete: only what has changed since would be encoded"


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
    Raises: RecipeError: the recipe's ds_config.json cannot be read, or contradicts itself.
    """
    recipe, changes, blocked = _with_ds_config(recipe, device)
    shown = ["", to_toml(recipe).rstrip(), *(f"# {line}" for line in changes)]
    asked = recipe.run.precision
    actual = asked if asked != "bf16" or autocast_dtype(asked, device) else "fp32, this device has no fast bf16"
    lines = [f"{'device':<20}{device}, {actual}, {os.cpu_count()} cores"]
    blocked = blocked or _refusal(lambda: check_model_name(recipe.model.name))
    if blocked:
        return "\n".join([*lines, f"{'cannot run yet':<20}{blocked}", *shown])
    if store_path is None:
        return "\n".join([*lines, "give --store to check that the model fits it", *shown])
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
    lines += [f"{name:<20}{count:>10}" for name, count in store.buckets.items()]
    return "\n".join([*lines, *shown])


def _with_ds_config(recipe: TrainRecipe, device: torch.device) -> tuple[TrainRecipe, list[str], str | None]:
    """The recipe as its ds_config.json changes it, the table of what differs, and why it cannot be trained here."""
    if not (path := recipe.parallel.deepspeed_config):
        return recipe, [], None
    ranks, changes = read_ranks(), list[str]()
    try:
        return with_users_config(recipe, ranks, device, changes.append), changes, None
    except (
        RecipeError
    ) as error:  # not on this device, or without DeepSpeed: what the file says can be shown all the same
        resolved = resolve(read_config(path), recipe, ranks.world_size)
        return resolved.recipe, resolved.notes, str(error)


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
