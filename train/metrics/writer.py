"""Where the figures of a run go: ``metrics.jsonl``, with units in its keys; the same for TensorBoard and wandb."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...datasets.disk.files import write_atomic
from ...datasets.errors import DamageError, RecipeError, RunError
from ..config import TrainRecipe
from ..weights.folders import METRICS
from .meter import StepReport

WANDB_ID = "wandb_id"  # file in the run's folder, so that a resumed run stays one run of Weights & Biases


def check_wandb(recipe: TrainRecipe) -> None:
    """Raise RecipeError if the recipe asks for wandb and it is not installed."""
    if recipe.run.wandb and importlib.util.find_spec("wandb") is None:
        raise RecipeError(
            f"run.wandb '{recipe.run.wandb}': it needs the package 'wandb', which is not installed. Install leandit "
            "with its extra 'wandb', or leave run.wandb empty."
        )


class MetricsWriter:
    """Writes the reports of a run.

    Args:
      run: its folder.
      step: from which the run starts or resumes; lines of later steps are dropped.
      recipe: its ``run.wandb`` turns on wandb.
    Raises: RunError: wandb refuses.
    """

    def __init__(self, run: Path, *, step: int, recipe: TrainRecipe) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self._path = run / METRICS
        write_atomic(self._path, "".join(_lines_until(self._path, step)).encode())
        self._wandb = _start_wandb(run, recipe) if recipe.run.wandb else None
        self._tensorboard = SummaryWriter(run / "tensorboard", purge_step=step + 1)

    def write(self, report: StepReport) -> None:
        """Append one report."""
        values = asdict(report)
        with open(self._path, "a") as file:
            file.write(json.dumps(values) + "\n")
        figures = _scalars(values)
        for name, value in figures.items():
            self._tensorboard.add_scalar(name, value, report.step)
        if self._wandb is not None:
            self._wandb.log(figures, step=report.step)

    def write_picture(self, path: Path, step: int, *, now: int) -> None:
        """Show a PNG in TensorBoard and wandb.

        Args:
          step: that made it.
          now: the current step; wandb takes no earlier one.
        """
        from tensorboard.compat.proto import summary_pb2

        proto: Any = summary_pb2  # its classes are made at run time
        png = path.read_bytes()
        width, height = struct.unpack(">II", png[16:24])
        image = proto.Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        summary = proto.Summary(value=[proto.Summary.Value(tag="samples", image=image)])
        self._tensorboard._get_file_writer().add_summary(summary, step)  # its add_image encodes pixels, by PIL
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
            f"run.wandb '{recipe.run.wandb}': wandb refuses: {error}. Log in with 'wandb login', set "
            "WANDB_MODE=offline, or leave run.wandb empty."
        ) from error
    write_atomic(path, started.id.encode())
    return started


def last_step(run: Path) -> int:
    """The last step that a run has reported; 0 of a new one.

    Raises: DamageError: a line is not a report.
    """
    lines = _lines_until(run / METRICS, sys.maxsize)
    return json.loads(lines[-1])["step"] if lines else 0


def _scalars(values: dict[str, Any]) -> dict[str, float]:
    """The numbers of a report that can be plotted over the steps, one for each band and each time."""
    figures = {name: value for name, value in values.items() if name not in ("step", "held_out", "loss_terms")}
    figures |= {f"loss_terms/{name}": value for name, value in values["loss_terms"].items()}
    figures |= {f"held_out/{name}": value for name, value in (values["held_out"] or {}).items()}
    for name in [name for name, value in figures.items() if isinstance(value, list)]:
        by_time, middle = figures.pop(name), 0.5 if name.startswith("held_out/") else 0.0
        figures |= {f"{name}/{(number + middle) / len(by_time):g}": value for number, value in enumerate(by_time)}
    return {name: value for name, value in figures.items() if value is not None}


def _lines_until(path: Path, step: int) -> list[str]:
    """Lines of a metrics file up to a step, without a line that a crash cut off.

    Raises: DamageError: a line is not a report.
    """
    kept = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.is_file() else (), 1):
        if not line.endswith(b"\n"):
            continue
        try:
            line_step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamageError(
                f"'{path}': line {number} is not a report. Remove the line, or move the file away: a run "
                "resumes without it."
            ) from error
        kept += [line.decode()] if line_step <= step else []
    return kept
