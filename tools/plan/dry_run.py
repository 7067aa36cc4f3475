"""``--dry-run``: what a command would read, fetch and write, with times; then the recipe. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
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
from ...datasets.units import readable_size
from ...precompute.config import EncoderSection, PrecomputeRecipe
from ...precompute.encoders.describe import describe_store
from ...precompute.encoders.loading import Encoders, load_encoders
from ...precompute.encoders.model_files import is_single_file, local_folder, model_folder, model_name
from ...precompute.images.decoders import Decoders
from ...precompute.planning.additions import is_extension
from ...precompute.planning.compare import Comparison, Options, all_fresh
from ...precompute.planning.opening import check_apart, check_fingerprint, is_sealed, label_warnings, look_for_plan
from ...precompute.planning.pictures import num_threads
from ...precompute.planning.planner import Lineage, Planner
from ...precompute.progress.rejects import count_reasons
from ...precompute.sources.several import SourcePaths, list_sources
from ...precompute.sources.source import Source
from ...train.config import TrainRecipe
from ...train.data_recipe import Turn
from ...train.metrics.flops import shortened
from ...train.models.build import build_model, check_model_name
from ...train.models.diffusers.adapters import trained_parameters
from ...train.optim.ema import build_rules
from ...train.optim.loss_scale import autocast_dtype
from ...train.optim.named_state import expected_tensors
from ...train.parallel.deepspeed_config import read_config, resolve
from ...train.parallel.deepspeed_engine import apply_ds_config
from ...train.parallel.ranks import read_ranks
from ...train.run.fit import model_for_stores
from ..terminal.outcome import change_rows
from ..terminal.progress import ProgressLine
from .precompute_cost import PROBE_RECORDS, StoreBytes, completed_rows, predict_lines


@dataclass(frozen=True)
class DryRun:
    """What a precompute would do.

    Args:
      text: for the user.
      new_bytes: what it would write; None without local encoders.
      store_bytes: of the finished store, existing bytes included; 0 if unknown.
      refusal: the error that would stop it: too many rejects.
    """

    text: str
    new_bytes: StoreBytes | None = None
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
    say: Callable[[str], None] = lambda _: None,
) -> DryRun:
    """Describe what a precompute would do; writes nothing.

    Args:
      source_path: one or several sources to scan; None: only describe the recipe.
      device: for the probe; the first encoding device.
      num_devices: that would encode.
      store: existing or future store; its state is part of the description.
      new_revision: other encoders or settings would make the next revision.
      options: how a grown store treats changes.
      say: called before records are encoded to measure them.
    Raises: StoreError, FingerprintMismatch: as a precompute.
    """
    frozen = look_for_plan(store) if store else None
    lines, shown_recipe = encoder_lines(recipe), ["", to_toml(recipe).rstrip()]
    if source_path is None:
        lines += _warning_lines(recipe.images.warnings())
        return DryRun("\n".join([*lines, "give --source to count its pictures", *shown_recipe]))
    with ProgressLine() as progress:
        source = list_sources(
            source_path, recipe.source, recipe.picture_columns, progress=lambda done: progress("list", done, 0)
        )
    if store:
        check_apart(store, source)
    lines += source_lines(source)
    encoders = _local_encoders(recipe, device)
    images = recipe.images.for_vae(encoders.image.downscale) if encoders else recipe.images
    lines += _warning_lines([*label_warnings(recipe, source), *images.warnings()])
    spec = encoders and describe_store(recipe, source, encoders, known=frozen and frozen.spec)
    with ProgressLine() as progress, Decoders(num_threads()) as decoders:
        tokenizers = encoders.tokenizers if encoders else {}
        planner = Planner(store or Path(), spec, source, recipe, tokenizers, decoders, progress)
        comparison, lineage = all_fresh(source.records), Lineage()
        if store and frozen and spec:
            state, comparison, lineage = _compare_with_store(planner, store, frozen, spec, new_revision, options)
            lines += state
        if comparison is None:
            return DryRun("\n".join([*lines, "nothing would be encoded", *shown_recipe]))
        limit = planner.limit(comparison, stops=False)
        pictures = planner.look_at(comparison.fresh, limit)
        refusal = (limit.ledger and limit.ledger.refusal()) or limit.error or planner.refusal(comparison, pictures)
        lines += picture_lines(pictures)
        if not encoders:
            lines += ["", "bytes and time need the encoders on this machine"]
        has_pictures = pictures["bucket"].null_count < pictures.num_rows
        if not encoders or not (has_pictures or lineage.stack):
            return DryRun("\n".join([*lines, *shown_recipe]), refusal=refusal)
        plan = planner.plan(comparison, lineage, pictures)
    if num_completed := completed_rows(plan):
        lines.append(f"{'would complete':<20}{num_completed:,} pictures that are there")
    total = pictures.num_rows - pictures["bucket"].null_count
    say(f"encoding {min(PROBE_RECORDS, total)} of {total:,} pictures, and captions, to measure time and memory")
    devices = {"num_devices": num_devices}
    costs, new_bytes = predict_lines(recipe, plan, source, comparison, pictures, encoders, **devices)
    old_bytes = sum(path.stat().st_size for path in files_below(store)) if store and lineage.stack else 0
    text = "\n".join([*lines, "", *costs, *shown_recipe])
    return DryRun(text, new_bytes, new_bytes.total + old_bytes, refusal)


def _compare_with_store(
    planner: Planner, store: Path, frozen: FrozenPlan, spec: StoreSpec, new_revision: bool, options: Options | None
) -> tuple[list[str], Comparison | None, Lineage]:
    """Lines on the store, the records to encode and what they build on; no comparison if nothing would be encoded."""
    is_complete, adds = is_sealed(store, frozen), is_extension(frozen.spec, spec)
    if not (is_complete and (new_revision or adds)):
        check_fingerprint(store, frozen.spec, spec)
    lines = ["", f"{'store':<20}'{store}', {store_state(store, frozen, spec, is_complete=is_complete)}"]
    if not (is_complete and adds):
        return lines, all_fresh(planner.source.records), Lineage()
    changes, lineage = planner.compare(options or Options())
    lines += [f"{name:<20}{value}" for name, value in change_rows(changes)] if changes else []
    return (lines, changes, lineage) if lineage and changes else (lines, None, Lineage())


def source_lines(source: Source) -> list[str]:
    """What a source holds, its classes, and the files that it ignores."""
    lines = ["", *(f"{'source':<20}{line}" for line in source.lines())]
    lines += [f"{'':<20}{note}" for note in source.notes]
    if source.classes:
        lines.append(f"{'classes':<20}{ClassNames(source.classes, source.class_names).summary()}")
    return lines + [f"{'ignored':<20}{line}" for line in source.ignored.lines()]


def picture_lines(pictures: pa.Table) -> list[str]:
    """Pictures to encode by bucket, and rejects by reason.

    Args:
      pictures: of all new records (PICTURES_SCHEMA).
    """
    rejects, buckets = count_reasons(pictures["reason"]), count_reasons(pictures["bucket"])
    lines = [f"{'would encode':<20}{buckets.total():,} pictures"]
    lines += [f"{'would reject':<20}{count:,} x {reason}" for reason, count in sorted(rejects.items())]
    lines += ["", f"{'bucket':<20}{'records':>10}"] if buckets else []
    return lines + [f"{name:<20}{buckets[name]:>10,}" for name in sorted(buckets, key=bucket_size)]


def store_state(store: Path, frozen: FrozenPlan, spec: StoreSpec, *, is_complete: bool) -> str:
    """State of the newest revision, and what a precompute would do with it."""
    if not is_complete:
        commits = read_commits(store, frozen)
        missing = missing_work(frozen, [task for task in frozen.layout.tasks() if task not in commits])
        return (
            f"revision {frozen.revision} is not complete, {missing} are missing and would be encoded. All of it takes:"
        )
    if frozen.spec.fingerprint != spec.fingerprint and is_extension(frozen.spec, spec):
        return f"revision {frozen.revision} is complete: a new revision would add encoders or pictures to it:"
    if frozen.spec.fingerprint != spec.fingerprint:
        return f"revision {frozen.revision} is complete: a new revision would encode everything again, which takes:"
    return f"revision {frozen.revision} is complete: only what has changed since would be encoded"


def _encoder_sections(recipe: PrecomputeRecipe) -> dict[str, EncoderSection]:
    texts = {f"text encoder {name}".strip(): section for name, section in recipe.text_sections.items()}
    return {"vae": recipe.vae, **texts, **{f"feature {name}": one for name, one in recipe.features.items()}}


def _warning_lines(warnings: list[str]) -> list[str]:
    return [f"{'warning':<20}{warning}" for warning in warnings]


def _local_encoders(recipe: PrecomputeRecipe, device: torch.device) -> Encoders | None:
    """The encoders, if all of them are local folders."""
    is_local = all(local_folder(section.model) is not None for section in _encoder_sections(recipe).values())
    return load_encoders(recipe, device) if is_local else None


def encoder_lines(recipe: PrecomputeRecipe) -> list[str]:
    """Where each encoder comes from."""
    lines = []
    for role, section in _encoder_sections(recipe).items():
        folder = local_folder(section.model)
        if folder is None:
            name = f"{section.model}/{section.subfolder}" if section.subfolder else section.model
            state = "would be fetched from the hub (safetensors), or taken from its cache"
        else:
            folder = model_folder(folder, section.subfolder)
            name = model_name(section, folder)
            state = "a local folder" if folder.is_dir() else "a folder that is MISSING"
            if is_single_file(section.model):
                state = "a single file" if Path(section.model).expanduser().is_file() else "a file that is MISSING"
        lines.append(f"{role:<20}'{name}': {state}")
    return lines


def describe_train(recipe: TrainRecipe, store_path: Path | str | None, device: torch.device) -> str:
    """Describe what a training run would do.

    Args:
      store_path: None: only describe the recipe.
    Raises: RecipeError: the recipe's ds_config.json cannot be read, or contradicts itself.
    """
    recipe, changes, refusal = _with_ds_config(recipe, device)
    shown_recipe = ["", to_toml(recipe).rstrip(), *(f"# {line}" for line in changes)]
    precision = recipe.run.precision
    if precision == "bf16" and not autocast_dtype(precision, device):
        precision = "fp32, this device has no fast bf16"
    lines = [f"{'device':<20}{device}, {precision}, {os.cpu_count()} cores"]
    try:
        check_model_name(recipe.model.name)
    except RecipeError as error:
        refusal = refusal or str(error)
    if refusal:
        return "\n".join([*lines, f"{'cannot run yet':<20}{refusal}", *shown_recipe])
    if store_path is None and not recipe.data.turns:
        return "\n".join([*lines, "give --store to check that the model fits it", *shown_recipe])
    turns, incomplete = recipe.turns(store_path), recipe.run.allow_incomplete
    stores = [LatentStore(t.section.store, revision=t.section.revision, allow_incomplete=incomplete) for t in turns]
    spec, _ = model_for_stores(recipe, stores)
    with torch.device("meta"):
        model = build_model(spec, seed=0)
    parameters, state_bytes = sum(p.numel() for p in model.parameters()), held_bytes(recipe, model)
    trained = sum(p.numel() for p in trained_parameters(model).values())
    frozen = f" of which {shortened(trained)} train" if trained < parameters else ""
    lines += [
        f"{'model':<20}{spec.name}, {shortened(parameters)} parameters{frozen}, {spec.channels} latent channels",
        f"{'memory':<20}{readable_size(state_bytes)} of weights, gradients, {recipe.optimizer.name} and averages; "
        "activations: 'leandit plan train'",
        f"{'run':<20}{recipe.run.steps:,} steps of {recipe.run.global_batch:,} images",
    ]
    for turn, store in zip(turns, stores, strict=True):
        lines += store_lines(turn, store, recipe)
    return "\n".join([*lines, *shown_recipe])


def store_lines(turn: Turn, store: LatentStore, recipe: TrainRecipe) -> list[str]:
    """What a store holds, when it trains, and how often, where no filter or ``data.batch_tokens`` changes that."""
    run, epochs = recipe.run, ""
    if not (recipe.data.batch_tokens or turn.section.has_filter):
        trained = max(1, len(store) * (1 - recipe.data.holdout))
        epochs = f": {turn.batches(run.steps) * run.global_batch / trained:,.1f} epochs"
    stop = run.steps if turn.stop is None else min(turn.stop, run.steps)
    when = f"steps {turn.start + 1:,} to {stop:,}" if turn.start < stop else "after the last step"
    share = f", {turn.share:.4g} of the batches" if turn.share < 1 else ""
    lines = ["", f"{'store':<20}'{turn.section.store}', {len(store):,} records, {when}{share}{epochs}"]
    return [*lines, f"{'bucket':<20}{'records':>10}", *(f"{name:<20}{n:>10,}" for name, n in store.buckets.items())]


def _with_ds_config(recipe: TrainRecipe, device: torch.device) -> tuple[TrainRecipe, list[str], str | None]:
    """The recipe as its ds_config.json changes it, lines of the differences, and why it cannot train here."""
    if not (path := recipe.parallel.deepspeed_config):
        return recipe, [], None
    ranks, changes = read_ranks(), list[str]()
    try:
        return apply_ds_config(recipe, ranks, device, changes.append), changes, None
    except RecipeError as error:  # wrong device, or no DeepSpeed: the file's values can still be shown
        resolved = resolve(read_config(path), recipe, ranks.world_size)
        return resolved.recipe, resolved.notes, str(error)


def held_bytes(recipe: TrainRecipe, model: nn.Module) -> int:
    """Bytes of weights, gradients, optimizer states and averages of one process.

    Args:
      model: on any device, also the meta device.
    """
    weights = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in trained_parameters(model).values())
    optimizer = sum(tensor.nbytes for tensor in expected_tensors(recipe.optimizer, model).values())
    return weights + trained * (1 + len(build_rules(recipe))) + optimizer
