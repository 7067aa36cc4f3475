"""Where the figures of a run go: ``metrics.jsonl``, TensorBoard and wandb; and each start to ``starts.jsonl``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import __version__
from ...datasets.disk.files import write_atomic
from ...errors import RunError, needs_extra
from ..config import TrainRecipe
from ..parallel.ranks import Ranks, choose_strategy
from ..weights.folders import METRICS, STARTS
from .history import OFFSETS, Start, StepReport, parse_reports, whole_lines
from .meter import computed_in

LIBRARIES = ("torch", "diffusers", "transformers", "numpy", "zarr")
WANDB_ID = "wandb_id"  # file in the run's folder, so that a resumed run stays one run of Weights & Biases


def check_wandb(recipe: TrainRecipe) -> None:
    """Raise RecipeError if the recipe asks for wandb and it is not installed."""
    with needs_extra("wandb", f"run.wandb '{recipe.run.wandb}'", "leave run.wandb empty"):
        if recipe.run.wandb and importlib.util.find_spec("wandb") is None:  # to import it takes a second
            raise ModuleNotFoundError(name="wandb")


class MetricsWriter:
    """Writes the reports of a run.

    Args:
      run: its folder.
      step: from which the run starts or resumes; lines of later steps are dropped.
      recipe: its ``run.wandb`` turns on wandb.

    Attributes:
      reached_step: the last reported one, of dropped lines too; 0 of a run that has not reported.
    Raises: RunError: wandb refuses; DamageError: a line is not a report.
    """

    def __init__(self, run: Path, *, step: int, recipe: TrainRecipe) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self._path = run / METRICS
        lines, _ = whole_lines(self._path)
        steps = [report.step for report in parse_reports(self._path, lines)]
        self.reached_step = max(steps, default=0)
        kept = (line + b"\n" for line, reported in zip(lines, steps, strict=True) if reported <= step)
        write_atomic(self._path, b"".join(kept))
        self._offset = OFFSETS[recipe.run.evaluate_times]
        self._wandb = _start_wandb(run, recipe) if recipe.run.wandb else None
        self._tensorboard = SummaryWriter(run / "tensorboard", purge_step=step + 1)

    def write(self, report: StepReport) -> None:
        """Append one report."""
        values = asdict(report)
        with open(self._path, "a") as file:
            file.write(json.dumps(values) + "\n")
        figures = _scalars(values, self._offset)
        for name, value in figures.items():
            self._tensorboard.add_scalar(name, value, report.step)
        if self._wandb is not None:
            self._wandb.log(figures, step=report.step)

    def write_image(self, path: Path, step: int, *, now: int) -> None:
        """Show a PNG in TensorBoard and wandb.

        Args:
          step: that made it.
          now: the current step; wandb takes no earlier one.
        """
        from PIL import Image  # most runs draw no images

        with Image.open(path) as image:
            self._tensorboard.add_image("samples", np.asarray(image), step, dataformats="HWC")
        if self._wandb is not None:
            import wandb

            self._wandb.log({"samples": wandb.Image(str(path), caption=f"step {step}")}, step=now)

    def close(self) -> None:
        """Flush everything."""
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(run: Path, recipe: TrainRecipe) -> Any:
    """A run of Weights & Biases, or the one whose id is in the run's folder.

    Without a login, ``WANDB_MODE=offline`` keeps it in the run's folder, for ``wandb sync``.
    """
    import wandb  # takes a second to import

    path = run / WANDB_ID
    try:
        started = wandb.init(
            project=recipe.run.wandb,
            name=run.resolve().name,
            id=path.read_text().strip() if path.is_file() else None,
            resume="allow",
            dir=str(run),
            config=recipe.model_dump(),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise RunError(
            f"run.wandb '{recipe.run.wandb}': wandb failed: {error}. Log in with 'wandb login', set "
            "WANDB_MODE=offline, or leave run.wandb empty."
        ) from error
    write_atomic(path, started.id.encode())
    return started


def _scalars(values: dict[str, Any], offset: float) -> dict[str, float]:
    """The numbers of a report that can be plotted over the steps, one for each band and each time.

    Args:
      offset: of a held-out time in its eighth.
    """
    figures = {name: value for name, value in values.items() if name not in ("step", "held_out", "loss_terms")}
    for group in ("loss_terms", "held_out"):
        figures |= {f"{group}/{name}": value for name, value in (values[group] or {}).items()}
    for name in [name for name, value in figures.items() if isinstance(value, list)]:
        by_time, first = figures.pop(name), offset if name.startswith("held_out/") else 0.0
        figures |= {f"{name}/{(number + first) / len(by_time):g}": value for number, value in enumerate(by_time)}
    return {name: value for name, value in figures.items() if value is not None}


def write_start(
    run: Path,
    recipe: TrainRecipe,
    device: torch.device,
    ranks: Ranks,
    *,
    name: str,
    step: int,
    reached_step: int,
    changed: Mapping[str, tuple[Any, Any]],
) -> None:
    """Append a start of the first rank to those of a run.

    Args:
      name: of the recipe.
      step: from which the run starts or resumes.
      reached_step: the last one that was reported before.
      changed: settings that ``--continue-with`` has changed: by key, the old and the new value.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    on_gpu, cpu = device.type == "cuda", f"{platform.machine()} CPU, {cores} cores"
    installed = {each: importlib.metadata.version(each) for each in LIBRARIES if importlib.util.find_spec(each)}
    start = Start(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        from_step=step,
        reached_step=reached_step,
        recipe=name,
        machine=platform.node(),
        device=torch.cuda.get_device_name(device) if on_gpu else cpu,
        world_size=ranks.world_size,
        num_machines=ranks.num_machines,
        strategy=choose_strategy(recipe.parallel, ranks),
        precision=computed_in(recipe.run.precision, device),
        versions={"leandit": __version__, "python": platform.python_version()} | installed,
        changed=dict(changed),
    )
    path = run / STARTS
    before = path.read_bytes() if path.is_file() else b""
    write_atomic(path, before + start.model_dump_json().encode() + b"\n")
