"""What a command is given, checked before torch is loaded: a wrong path answers at once, not after seconds.

What is checked here is checked again where it is used; only what is cheap and lies on this machine is looked at.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from ...datasets.disk.hashing import read_json
from ...datasets.errors import DamageError, RunError, SourceError
from ...datasets.revisions.catalog import check_store
from ...precompute.config import PrecomputeRecipe, TextSection, VaeSection
from ...train.weights.folders import SNAPSHOT, STATE, find
from ..sample.subjects import find_labels
from .options import is_url

RANKS = ("RANK", "WORLD_SIZE", "SLURM_PROCID")  # several processes would each say the same


def check_precompute(recipe: PrecomputeRecipe, source: Sequence[str]) -> None:
    """Refuse a source that is not there, and encoders in folders that are not what the recipe says.

    Raises: SourceError, RecipeError; EncoderError.
    """
    check_source(recipe, source)
    from ...precompute.encoders.autoencoders import check_normalisation
    from ...precompute.encoders.model_files import (
        CONFIG,
        TEXT_WEIGHTS,
        VAE_WEIGHTS,
        local_folder,
        read_config,
        resolve_model,
        weight_files,
    )

    sections: list[tuple[str, VaeSection | TextSection, str]] = [("vae.model", recipe.vae, VAE_WEIGHTS)]
    if recipe.text.kind != "none":
        sections.append(("text.model", recipe.text, TEXT_WEIGHTS))
    for what, section, stem in sections:
        if local_folder(section.model):
            folder, _ = resolve_model(section.model, section.subfolder, section.revision, files=(CONFIG,), what=what)
            config = read_config(folder, what=what)
            if section is recipe.vae:
                check_normalisation(config, f"{what} '{folder}'")
            weight_files(folder, stem, what=what)


def check_source(recipe: PrecomputeRecipe, sources: Sequence[str]) -> None:
    """Refuse a source that is not there, or is given twice.

    Raises: SourceError, RecipeError.
    """
    from ...precompute.sources.several import source_names
    from ...precompute.sources.source import open_source

    source_names(sources)
    for source in sources:
        if not is_url(source):
            open_source(source, recipe.source)


def check_import(source: Path) -> None:
    """Refuse features that are not there.

    Raises: SourceError.
    """
    if not source.exists():
        raise SourceError(f"source '{source}': there is no such file or folder. Check the path.")


def check_trainable(store: str) -> None:
    """Refuse a store that is not there, where one process trains.

    Raises: StoreNotFound, StoreError, StoreIncomplete.
    """
    if not is_url(store) and not any(name in os.environ for name in RANKS):
        check_store(Path(store))


def check_run(run: Path) -> None:
    """Refuse a run that is not there.

    Raises: RunError.
    """
    if not run.is_dir():
        raise RunError(f"run '{run}': there is no such folder. Train first, or check the path.")


def check_subjects(run: Path, labels: Sequence[str], captions: Sequence[str]) -> None:
    """Refuse labels or captions that the newest snapshot of a run cannot draw.

    A snapshot that cannot be read is left to the loading of its weights, which says what is wrong with it.

    Raises: RecipeError.
    """
    if found := find(SNAPSHOT, run):
        with contextlib.suppress(DamageError, OSError, KeyError, TypeError):
            find_labels(read_json(found[-1] / STATE), labels, captions)
