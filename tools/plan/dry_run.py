"""``--dry-run``: the resolved recipe, then what a command would read, fetch and write, with times. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

import torch

from ...datasets.disk.files import files_below
from ...datasets.format.buckets import bucket_size
from ...datasets.format.class_names import ClassNames
from ...datasets.format.schema import StoreSpec
from ...datasets.revisions.catalog import sealed_revisions
from ...datasets.revisions.commits import missing_work, read_commit
from ...datasets.revisions.plan import FrozenPlan
from ...datasets.store import LatentStore
from ...errors import RecipeError, SourceError
from ...precompute.config import PrecomputeRecipe
from ...precompute.encoders.loading import describe_store, load_encoders
from ...precompute.encoders.model_files import local_folder, model_folder, model_name
from ...precompute.images.decoders import Decoders
from ...precompute.planning.compare import Comparison, Options, all_fresh
from ...precompute.planning.images import num_threads
from ...precompute.planning.opening import (
    check_apart,
    check_fingerprint,
    is_extension,
    label_warnings,
    look_for_plan,
)
from ...precompute.planning.planner import Planner
from ...precompute.run.rejects import count_reasons
from ...precompute.sources.several import SourcePaths, list_sources
from ...recipe import to_toml
from ...train.config import TrainRecipe, notes
from ...train.data_recipe import StoreSection, batch_shares
from ...train.metrics.flops import shortened
from ...train.models.build import build_model, check_model_name
from ...train.models.diffusers.adapters import trained_parameters
from ...train.parallel.deepspeed_engine import apply_ds_config
from ...train.parallel.ranks import read_ranks
from ...train.run.fit import model_for_stores
from ...train.run.manifest import open_stores
from ...units import plural, readable_size
from ..terminal.outcome import change_rows, computed_precision
from ..terminal.progress import ProgressLine
from ..terminal.text import Rows
from .precompute_cost import PROBE_RECORDS, completed_rows, predict
from .strategies import with_ds_config
from .workload import mirror_size


@dataclass(frozen=True)
class DryRun:
    """What a precompute would do.

    Args:
      recipe: as TOML.
      rows: names and values.
      new_bytes: what it would write, by what; None without local encoders.
      store_bytes: of the finished store, existing bytes included; 0 if unknown.
      refusal: the error that would stop it: too many rejects.
    """

    recipe: str
    rows: Rows
    new_bytes: dict[str, int] | None = None
    store_bytes: int = 0
    refusal: SourceError | None = None

    @property
    def text(self) -> str:
        """The recipe, then the answer."""
        return _text(self.recipe, self.rows)


def _text(recipe: str, rows: Rows) -> str:
    return "\n".join([recipe.rstrip(), "", *(f"{name:<20}{value}".rstrip() for name, value in rows)])


def describe_precompute(
    recipe: PrecomputeRecipe,
    source_path: SourcePaths | None,
    device: torch.device,
    *,
    num_devices: int = 1,
    store: Path | None = None,
    options: Options | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> DryRun:
    """Describe what a precompute would do; writes nothing.

    Args:
      source_path: one or several sources to scan; None: only describe the recipe.
      device: for the probe; the first encoding device.
      num_devices: that would encode.
      store: existing or future store; its state is part of the description.
      options: how a grown store treats changes.
      say: called before records are encoded to measure them.
    Raises: StoreError, FingerprintMismatch: as a precompute.
    """
    frozen, shown = look_for_plan(store) if store else None, to_toml(recipe)
    rows, are_local = _encoder_rows(recipe)
    if source_path is None:
        rows += [("warning", warning) for warning in recipe.images.warnings()]
        return DryRun(shown, [*rows, ("source", "pass --source to count its images")])
    with ProgressLine() as progress:
        source = list_sources(
            source_path,
            recipe.source,
            recipe.companion_columns,
            needs_labels=recipe.needs_labels,
            progress=lambda done: progress("list", done, 0),
        )
    if store:
        check_apart(store, source)
    encoders = load_encoders(recipe, device) if are_local else None
    images = recipe.images.for_vae(encoders.image.downscale) if encoders else recipe.images
    rows += [("source", line) for line in source.lines()] + [("", note) for note in source.notes]
    if source.classes:
        rows.append(("classes", ClassNames(source.classes, source.class_names).summary()))
    rows += [("ignored", line) for line in source.ignored.lines()]
    rows += [("warning", warning) for warning in (*label_warnings(recipe, source), *images.warnings())]
    spec = encoders and describe_store(recipe, source, encoders, known=frozen and frozen.spec)
    limit = recipe.images.max_megapixels
    with ProgressLine() as progress, Decoders(num_threads(), max_megapixels=limit) as decoders:
        tokenizers = encoders.tokenizers if encoders else {}
        planner = Planner(store or Path(), spec, source, recipe, tokenizers, decoders, progress)
        comparison, before = all_fresh(source.records), None
        if store and frozen and spec:
            state, comparison, before = _compare_with_store(planner, store, frozen, spec, options)
            rows += state
        if comparison is None:
            return DryRun(shown, [*rows, ("would encode", "nothing")])
        limits = planner.limits(comparison)
        placed = planner.measure(comparison.fresh, limits, before, stops=False)
        refusal = limits.problem or planner.refusal(comparison, placed)
        rejects, buckets = count_reasons(placed["reason"]), count_reasons(placed["bucket"])
        rows.append(("would encode", f"{buckets.total():,} images"))
        rows += [("would reject", f"{count:,} x {reason}") for reason, count in sorted(rejects.items())]
        rows += _bucket_rows({name: buckets[name] for name in sorted(buckets, key=bucket_size)})
        if not encoders:
            rows.append(("cost", "bytes and time need the encoders on this machine"))
        if not encoders or not (buckets or before):
            return DryRun(shown, rows, refusal=refusal)
        plan = planner.plan(comparison, before, placed)
    if num_completed := completed_rows(plan):
        rows.append(("would complete", f"{num_completed:,} images already in the store"))
    total = buckets.total()
    captions = ", and captions," if recipe.text else ""
    say(f"encoding {min(PROBE_RECORDS, total)} of {plural(total, 'image')}{captions} to measure time and memory")
    costs, new_bytes = predict(recipe, plan, source, comparison, placed, encoders, num_devices=num_devices)
    old_bytes = sum(path.stat().st_size for path in files_below(store)) if store and before else 0
    return DryRun(shown, [*rows, ("", ""), *costs], new_bytes, sum(new_bytes.values()) + old_bytes, refusal)


def _compare_with_store(
    planner: Planner, store: Path, frozen: FrozenPlan, spec: StoreSpec, options: Options | None
) -> tuple[Rows, Comparison | None, FrozenPlan | None]:
    """State of the store, the records to encode and what they build on; no comparison if nothing would be encoded."""
    is_complete = frozen.revision in sealed_revisions(store)
    adds = is_extension(frozen.spec, spec)
    if not (is_complete and adds):
        check_fingerprint(store, frozen.spec, spec)
    if not is_complete:
        missing = missing_work(frozen, [one for one in frozen.layout.tasks() if not read_commit(store, frozen, *one)])
        state = f"is not complete, {missing} are missing and would be encoded. All of it takes:"
    elif frozen.spec.fingerprint == spec.fingerprint:
        state = "is complete: only what has changed since would be encoded"
    else:
        state = "is complete: a new revision would add encoders or images to it:"
    rows = [("", ""), ("store", f"'{store}', revision {frozen.revision} {state}")]
    if not (is_complete and adds):
        return rows, all_fresh(planner.source.records), None
    changes, before = planner.compare(options or Options())
    rows += change_rows(changes) if changes else []
    return (rows, changes, before) if before and changes else (rows, None, None)


def _bucket_rows(buckets: Mapping[str, int]) -> Rows:
    rows = [(name, f"{count:>10,}") for name, count in buckets.items()]
    return [("", ""), ("bucket", f"{'records':>10}"), *rows] if rows else []


def _encoder_rows(recipe: PrecomputeRecipe) -> tuple[Rows, bool]:
    """Where each encoder comes from, and whether all of them are local."""
    sections = {"vae": recipe.vae}
    sections |= {f"text encoder {name}".strip(): section for name, section in recipe.text.items()}
    sections |= {f"feature {name}": section for name, section in recipe.features.items()}
    rows, are_local = list[tuple[str, str]](), True
    for role, section in sections.items():
        if (folder := local_folder(section.model)) is None:
            are_local = False
            name = f"{section.model}/{section.subfolder}" if section.subfolder else section.model
            state = "would be fetched from the hub (safetensors), or taken from its cache"
        else:
            folder = model_folder(folder, section.subfolder)
            name = model_name(section, folder)
            state = "a local folder" if folder.is_dir() else "a folder that is MISSING"
        rows.append((role, f"'{name}': {state}"))
    return rows, are_local


def describe_train(recipe: TrainRecipe, store_path: Path | str | None, device: torch.device) -> str:
    """Describe what a training run would do: the recipe, then the answer.

    Args:
      store_path: None: only describe the recipe.
    Raises: RecipeError: the recipe's ds_config.json cannot be read, or contradicts itself.
    """
    recipe, changes, refusal = _with_ds_config(recipe, device)
    shown = "\n".join([to_toml(recipe).rstrip(), *(f"# {line}" for line in changes)])
    rows = [("device", f"{device}, {computed_precision(recipe.run.precision, device)}, {os.cpu_count()} cores")]
    rows += [("", note) for note in notes(recipe)]
    try:
        check_model_name(recipe.model.name)
    except RecipeError as error:
        refusal = refusal or str(error)
    if refusal:
        return _text(shown, [*rows, ("cannot run yet", refusal)])
    if store_path is None and not recipe.data.mixture:
        return _text(shown, [*rows, ("store", "pass --store to check that the model fits it")])
    sections, stores = recipe.store_sections(store_path), open_stores(recipe, store_path, Path(), None, lambda _: None)
    spec, _ = model_for_stores(recipe, stores)
    with torch.device("meta"):
        model = build_model(spec, seed=0)
    parameters, trained = sum(p.numel() for p in model.parameters()), trained_parameters(model).values()
    num_trained = sum(p.numel() for p in trained)
    frozen = f", {shortened(num_trained)} of them trained" if num_trained < parameters else ""
    rows += [
        ("model", f"{spec.name}, {shortened(parameters)} parameters{frozen}, {spec.channels} latent channels"),
        ("memory", "see 'leandit plan train'"),
        ("run", f"{recipe.run.steps:,} steps of {recipe.run.global_batch:,} images"),
    ]
    for section, share, store in zip(sections, batch_shares(sections), stores, strict=True):
        rows += [("", ""), ("store", _store_text(section, share, store, recipe)), *_bucket_rows(store.buckets)[1:]]
        if store.remote:
            folder = store.remote.store.parent
            size = f"{readable_size(mirror_size(recipe, store))} at most (run.remote_gib)"
            rows.append(("mirror", f"'{folder}': {size}, {readable_size(disk_usage(folder).free)} free"))
    return _text(shown, rows)


def _store_text(section: StoreSection, share: float, store: LatentStore, recipe: TrainRecipe) -> str:
    """What a store holds, its share of the batches, and its epochs unless a filter or ``data.batch_tokens`` decides.

    Args:
      share: of the batches, 0 to 1.
    """
    text = f"'{section.store}', {len(store):,} records"
    if share < 1:
        text += f", {share:.4g} of the batches"
    if not (recipe.data.batch_tokens or section.has_filter):
        trained = max(1, len(store) * (1 - recipe.data.holdout))
        text += f": {share * recipe.run.steps * recipe.run.global_batch / trained:,.1f} epochs"
    return text


def _with_ds_config(recipe: TrainRecipe, device: torch.device) -> tuple[TrainRecipe, list[str], str | None]:
    """The recipe as its ds_config.json changes it, lines of the differences, and why it cannot train here."""
    if not recipe.parallel.deepspeed_config:
        return recipe, [], None
    ranks, changes = read_ranks(), list[str]()
    try:
        return apply_ds_config(recipe, ranks, device, changes.append), changes, None
    except RecipeError as error:  # wrong device, or no DeepSpeed: the file's values can still be shown
        return *with_ds_config(recipe, ranks.world_size), str(error)
