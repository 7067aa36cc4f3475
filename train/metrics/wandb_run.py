"""Weights & Biases: an optional library that is told what ``metrics.jsonl`` is told. A run stays one run there too."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ...datasets.disk.files import write_atomic
from ...datasets.errors import RecipeError, RunError
from ..config import TrainRecipe

RUN_ID = "wandb_id"  # file in the run's folder


def check_wandb(recipe: TrainRecipe) -> None:
    """See that the library is there, where the recipe asks for it.

    Raises: RecipeError: it is not installed.
    """
    if recipe.run.wandb and importlib.util.find_spec("wandb") is None:
        raise RecipeError(
            f"run.wandb '{recipe.run.wandb}': it needs the package 'wandb', which is not installed. Install leandit "
            "with its extra 'wandb', or leave run.wandb empty."
        )


def start_wandb(run: Path, recipe: TrainRecipe) -> Any:
    """Begin a run of Weights & Biases, or go on with the one whose id stands in the run's folder.

    Where nobody is logged in, ``WANDB_MODE=offline`` keeps it in the run's folder, for ``wandb sync``.

    Raises: RunError: wandb refuses.
    """
    import wandb  # takes a second to import

    path = run / RUN_ID
    known = path.read_text().strip() if path.is_file() else None
    try:
        begun = wandb.init(
            project=recipe.run.wandb,
            name=run.resolve().name,
            id=known,
            resume="allow",
            dir=str(run),
            config=recipe.model_dump(),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise RunError(
            f"run.wandb '{recipe.run.wandb}': wandb refuses: {error}. Log in with 'wandb login', set "
            "WANDB_MODE=offline, or leave run.wandb empty."
        ) from error
    write_atomic(path, begun.id.encode())
    return begun
