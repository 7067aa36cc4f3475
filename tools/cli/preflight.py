"""Cheap checks before torch loads, so that a wrong path fails at once; the code that uses an input checks all of it."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets.disk.hashing import read_json
from ...datasets.format.layout import GROUP
from ...errors import DamageError, RecipeError, RunError, SourceError
from ...train.weights.folders import SNAPSHOT, STATE, find, is_run
from ..sample.request import INCEPTION
from .options import is_url

if TYPE_CHECKING:  # pydantic's models take half of a second
    from ...precompute.config import PrecomputeRecipe
    from ...train.config import TrainRecipe

RANKS = ("RANK", "WORLD_SIZE", "SLURM_PROCID")  # set when several processes would print the same error


def check_sources(recipe: PrecomputeRecipe, sources: Sequence[str]) -> None:
    """Raise if a source is missing, or given twice. Raises: SourceError, RecipeError."""
    from ...precompute.sources.several import source_names
    from ...precompute.sources.source import open_source

    source_names(sources)
    for source in sources:
        if not is_url(source):
            open_source(source, recipe.source, recipe.companion_columns)


def check_encoders(recipe: PrecomputeRecipe) -> None:
    """Raise if the folder of an encoder is missing, before a source is listed. Raises: RecipeError, EncoderError."""
    from ...precompute.encoders import autoencoders, model_files

    if model_files.local_folder(recipe.vae.model):
        files = model_files.ModelFiles(recipe.vae, "vae.model")
        autoencoders.family_of(files.read(), files.where)
    encoders = {f"text.{name}".rstrip("."): section for name, section in recipe.text.items()}
    encoders |= {f"features.{name}": section for name, section in recipe.features.items()}
    for name, section in encoders.items():
        if model_files.local_folder(section.model):
            model_files.ModelFiles(section, f"{name}.model")


def check_trainable(recipe: TrainRecipe, store: str | None) -> None:
    """Raise if no store is named, or a local one is missing. Raises: RecipeError, StoreError."""
    from ...datasets.revisions.catalog import check_store

    for section in recipe.store_sections(store):
        if not is_url(section.store) and not any(name in os.environ for name in RANKS):
            check_store(Path(section.store))


def check_run(run: Path) -> None:
    """Raise if the run is missing, or is a store. Raises: RunError."""
    if not run.is_dir():
        raise RunError(f"run '{run}': no such folder. Train first, or check the path.")
    if not is_run(run) and (run / GROUP).is_file():
        train = f"leandit train RECIPE --store {shlex.quote(str(run))} --run RUN"
        raise RunError(f"'{run}' is a store, not a run. Pass the folder that '{train}' makes.")


# A damaged snapshot is left to the code that loads its weights.
IF_READABLE = contextlib.suppress(DamageError, OSError, IndexError, KeyError, TypeError)


def _newest_state(run: Path) -> Any:
    return read_json(find(SNAPSHOT, run)[-1] / STATE)


def check_subjects(run: Path, labels: Sequence[str], captions: Sequence[str]) -> None:
    """Raise if the newest snapshot of a run cannot draw these labels or captions. Raises: RecipeError."""
    from ..sample.request import find_labels

    with IF_READABLE:
        find_labels(_newest_state(run), labels, captions)


def check_evaluation(
    target: Path, against: Path | None, *, clip: str | None, captions: Path | None, features: str, out: Path | None
) -> None:
    """Raise if there is nothing to measure, or an input is missing. Raises: RecipeError, SourceError, EncoderError."""
    from ...precompute.encoders.model_files import CONFIG, local_folder, resolve_model

    if not (against or clip):
        raise RecipeError("evaluate: nothing to measure. Pass a reference with --against, or a CLIP with --clip.")
    for what, path in (("", target), ("--against ", against)):
        if path and not path.exists():
            raise SourceError(f"{what}'{path}': there is no such run, store, folder or file. Check the path.")
    if is_run(target) and not out:
        raise RecipeError(f"evaluate: '{target}' is a run, so its images need a folder. Pass --out.")
    is_of_classes = False
    with IF_READABLE:
        is_of_classes = is_run(target) and not _newest_state(target)["spec"]["caption_width"]
    if clip and not captions and is_of_classes:
        raise RecipeError(f"--clip: run '{target}' generates classes. Pass captions with --captions, or leave it out.")
    for what, model in {"--clip": clip, "--features": features}.items():
        if (
            model and model != INCEPTION and local_folder(model) and not Path(model).suffix
        ):  # with one: a file of weights
            resolve_model(model, "", "", files=(CONFIG,), what=what)
