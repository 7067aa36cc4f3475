"""Weights & Biases, an optional library, gets the figures of ``metrics.jsonl``. A resumed run stays one run there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ...datasets.disk.files import write_atomic
from ...datasets.errors import RecipeError, RunError
from ..config import TrainRecipe

RUN_ID = "wandb_id"  # file in the run's folder


def check_wandb(recipe: TrainRecipe) -> None:
    """Raise RecipeError if the recipe asks for wandb and it is not installed."""
    if recipe.run.wandb and importlib.util.find_spec("wandb") is None:
        raise RecipeError(
            f"run.wandb '{recipe.run.wandb}': it needs the package 'wandb', which is not installed. Install leandit "
            "with its extra 'wandb', or leave run.wandb empty."
        )


def start_wandb(run: Path, recipe: TrainRecipe) -> Any:
    """Start a run of Weights & Biases, or resume the one whose id is in the run's folder.

    Without a login, ``WANDB_MODE=offline`` keeps it in the run's folder, for ``wandb sync``.

    Raises: RunError: wandb refuses.
    """
    import wandb  # takes a second to import

    path = run / RUN_ID
    run_id = path.read_text().strip() if path.is_file() else None
    try:
        started = wandb.init(
            project=recipe.run.wandb,
            name=run.resolve().name,
            id=run_id,
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
    write_atomic(path, started.id.encode())
    return started
