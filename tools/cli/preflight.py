"""Cheap checks of local inputs before torch loads, so that a wrong path fails at once.

The code that uses an input checks it again, and reports what cannot be read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets.errors import DamageError, RecipeError, RunError, SourceError
from .options import is_url

if TYPE_CHECKING:  # pydantic's models take half of a second
    from ...precompute.config import PrecomputeRecipe
    from ...train.config import TrainRecipe

UNREADABLE = (DamageError, OSError, IndexError, KeyError, TypeError)  # a snapshot: told where its weights are loaded
RANKS = ("RANK", "WORLD_SIZE", "SLURM_PROCID")  # set when several processes would print the same error


def check_sources(recipe: PrecomputeRecipe, sources: Sequence[str]) -> None:
    """Raise if a source is missing, or given twice. Raises: SourceError, RecipeError."""
    from ...precompute.sources.several import source_names
    from ...precompute.sources.source import open_source

    source_names(sources)
    for source in sources:
        if not is_url(source):
            open_source(source, recipe.source, recipe.picture_columns)


def check_encoders(recipe: PrecomputeRecipe) -> None:
    """Raise if a local encoder is missing, or is not what the recipe says. Raises: RecipeError, EncoderError."""
    from ...precompute.encoders import autoencoders
    from ...precompute.encoders import model_files as files

    if files.local_folder(recipe.vae.model):
        folder = autoencoders.config_folder(recipe.vae)
        autoencoders.family_of(files.read_config(folder[0], what="vae.model"), f"vae.model '{folder[0]}'")
        autoencoders.find_files(recipe.vae, folder)
    encoders = {f"text.{name}": section for name, section in recipe.texts.items()}
    encoders |= {"text": recipe.text} if recipe.text.kind != "none" else {}
    for name, section in {**encoders, **{f"features.{name}": one for name, one in recipe.features.items()}}.items():
        if files.local_folder(section.model):
            named = {"files": (files.CONFIG,), "what": f"{name}.model"}
            folder, _ = files.resolve_model(section.model, section.subfolder, section.revision, **named)
            files.read_config(folder, what=named["what"])
            files.weight_files(folder, files.TEXT_WEIGHTS, what=named["what"])


def check_trainable(recipe: TrainRecipe, store: str | None) -> None:
    """Raise if no store is named, or, where one process trains, a local one is missing.

    Raises: RecipeError, StoreNotFound, StoreError, StoreIncomplete.
    """
    from ...datasets.revisions.catalog import check_store

    for turn in recipe.turns(store):
        if not is_url(turn.section.store) and not any(name in os.environ for name in RANKS):
            check_store(Path(turn.section.store))


def _newest_state(run: Path) -> Any:
    """The state of the newest snapshot. Raises: UNREADABLE."""
    from ...datasets.disk.hashing import read_json
    from ...train.weights.folders import SNAPSHOT, STATE, find

    return read_json(find(SNAPSHOT, run)[-1] / STATE)


def check_run(run: Path) -> None:
    """Raise if the run is missing. Raises: RunError."""
    if not run.is_dir():
        raise RunError(f"run '{run}': no such folder. Train first, or check the path.")


def check_subjects(run: Path, labels: Sequence[str], captions: Sequence[str]) -> None:
    """Raise if the newest snapshot of a run cannot draw these labels or captions. Raises: RecipeError."""
    from ..sample.request import find_labels

    with contextlib.suppress(*UNREADABLE):
        find_labels(_newest_state(run), labels, captions)


def check_evaluation(
    target: Path, against: Path | None, *, clip: str | None, captions: Path | None, features: str, out: Path | None
) -> None:
    """Raise if there is nothing to measure, or an input is missing.

    Raises: RecipeError, RunError, SourceError; EncoderError: no such network.
    """
    from ...precompute.encoders.model_files import CONFIG, local_folder, resolve_model
    from ...train.weights.folders import is_run

    if not (against or clip):
        raise RecipeError("evaluate: nothing to measure. Give a reference with --against, or a CLIP with --clip.")
    if not target.exists():
        raise RunError(f"'{target}': there is no such run, folder or file. Check the path.")
    if is_run(target) and not out:
        raise RecipeError(f"evaluate: '{target}' is a run, so its pictures need a folder. Give --out.")
    if clip and not captions and is_run(target):
        with contextlib.suppress(*UNREADABLE):
            if not _newest_state(target)["spec"]["caption_width"]:
                raise RecipeError(
                    f"--clip: run '{target}' draws classes. Give captions with --captions, or leave it out."
                )
    if against and not against.exists():
        raise SourceError(f"--against '{against}': there is no such store, folder or file. Check the path.")
    for what, model in {"--clip": clip, "--features": None if features == "inception" else features}.items():
        if model and local_folder(model) and not Path(model).suffix:  # with one: a file of Inception's weights
            resolve_model(model, "", "", files=(CONFIG,), what=what)
