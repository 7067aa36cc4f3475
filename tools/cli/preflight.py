"""Checks of a command's inputs before torch loads, so that a wrong path fails at once.

Only cheap checks of local files. The code that uses an input checks it again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from ...datasets.disk.hashing import read_json
from ...datasets.errors import DamageError, RecipeError, RunError, SourceError
from ...datasets.order.alike import check_alike
from ...datasets.revisions.catalog import check_store, read_spec, sealed_revisions
from ...precompute.config import EncoderSection, PrecomputeRecipe
from ...train.config import TrainRecipe
from ...train.weights.folders import RUN, SNAPSHOT, STATE, find, is_run
from ..sample.request import find_labels
from .options import is_url

RANKS = ("RANK", "WORLD_SIZE", "SLURM_PROCID")  # set when several processes would print the same error


def check_precompute(recipe: PrecomputeRecipe, source: Sequence[str]) -> None:
    """Raise if a source is missing, or a local encoder does not match the recipe.

    Raises: SourceError, RecipeError; EncoderError.
    """
    check_source(recipe, source)
    from ...precompute.encoders.autoencoders import config_folder, family_of, find_files
    from ...precompute.encoders.model_files import (
        CONFIG,
        TEXT_WEIGHTS,
        local_folder,
        read_config,
        resolve_model,
        weight_files,
    )

    vae = recipe.vae
    if local_folder(vae.model):
        found = config_folder(vae)
        family_of(read_config(found[0], what="vae.model"), f"vae.model '{found[0]}'")
        find_files(vae, found)
    sections: dict[str, EncoderSection] = {f"text.{name}.model": one for name, one in recipe.texts.items()}
    sections |= {"text.model": recipe.text} if recipe.text.kind != "none" else {}
    sections |= {f"features.{name}.model": one for name, one in recipe.features.items()}
    for what, section in sections.items():
        if local_folder(section.model):
            folder, _ = resolve_model(section.model, section.subfolder, section.revision, files=(CONFIG,), what=what)
            read_config(folder, what=what)
            weight_files(folder, TEXT_WEIGHTS, what=what)


def check_source(recipe: PrecomputeRecipe, sources: Sequence[str]) -> None:
    """Raise if a source is missing, or given twice.

    Raises: SourceError, RecipeError.
    """
    from ...precompute.sources.several import source_names
    from ...precompute.sources.source import open_source

    source_names(sources)
    for source in sources:
        if not is_url(source):
            open_source(source, recipe.source, recipe.picture_columns)


def check_import(source: Path) -> None:
    """Raise if the features are missing.

    Raises: SourceError.
    """
    if not source.exists():
        raise SourceError(f"source '{source}': no such file or folder. Check the path.")


def check_trainable(recipe: TrainRecipe, store: str | None, run: Path) -> None:
    """Raise if no store is named, or, where one process trains, if a local one is missing or unlike the others.

    A run that has begun reads its own revisions, whatever the newest are like.

    Raises: RecipeError, StoreNotFound, StoreError, StoreIncomplete.
    """
    sections = [turn.section for turn in recipe.turns(store)]
    if any(name in os.environ for name in RANKS):
        return
    specs = []
    for section in sections:
        if not is_url(section.store):
            path = Path(section.store)
            check_store(path)
            if len(sections) > 1 and not (run / RUN).exists():
                newest = max(sealed_revisions(path), default=1)
                specs.append((path, read_spec(path, section.revision or newest)))
    if len(specs) > 1:
        check_alike(specs, captions=recipe.takes_captions, classes=not recipe.takes_captions)


def check_run(run: Path) -> None:
    """Raise if the run is missing.

    Raises: RunError.
    """
    if not run.is_dir():
        raise RunError(f"run '{run}': no such folder. Train first, or check the path.")


def check_subjects(run: Path, labels: Sequence[str], captions: Sequence[str]) -> None:
    """Raise if the newest snapshot of a run cannot draw these labels or captions.

    Loading the weights reports a snapshot that cannot be read.

    Raises: RecipeError.
    """
    if snapshots := find(SNAPSHOT, run):
        with contextlib.suppress(DamageError, OSError, KeyError, TypeError):
            find_labels(read_json(snapshots[-1] / STATE), labels, captions)


def check_evaluation(
    target: Path, against: Path | None, *, clip: str | None, captions: Path | None, features: str, out: Path | None
) -> None:
    """Raise if there is nothing to measure, or an input is missing.

    Raises: RecipeError, RunError, SourceError; EncoderError: no such network.
    """
    if not (against or clip):
        raise RecipeError("evaluate: nothing to measure. Give a reference with --against, or a CLIP with --clip.")
    if not target.exists():
        raise RunError(f"'{target}': there is no such run, folder or file. Check the path.")
    if is_run(target) and not out:
        raise RecipeError(f"evaluate: '{target}' is a run, so its pictures need a folder. Give --out.")
    if clip and not captions and is_run(target) and (snapshots := find(SNAPSHOT, target)):
        with contextlib.suppress(DamageError, OSError, KeyError, TypeError):
            if not read_json(snapshots[-1] / STATE)["spec"]["caption_width"]:
                raise RecipeError(
                    f"--clip: run '{target}' draws classes. Give captions with --captions, or leave it out."
                )
    if against and not against.exists():
        raise SourceError(f"--against '{against}': there is no such store, folder or file. Check the path.")
    from ...precompute.encoders.model_files import CONFIG, local_folder, resolve_model

    models = {"--clip": clip, "--features": None if features == "inception" else features}
    for what, model in models.items():
        if model and local_folder(model) and not Path(model).suffix:  # with one: a file of Inception's weights
            resolve_model(model, "", "", files=(CONFIG,), what=what)
