"""When and where a run was started: ``starts.jsonl``, one line for each call that trains."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from ...datasets.disk.files import write_atomic
from ...datasets.errors import DamageError
from ..weights.folders import STARTS

if TYPE_CHECKING:  # reports are made without torch
    import torch

    from ..config import TrainRecipe
    from ..parallel.ranks import Ranks

LIBRARIES = ("torch", "diffusers", "transformers", "numpy", "zarr")


class Start(BaseModel):
    """One start of a run.

    Args:
      time: ISO 8601, UTC.
      from_step: last step of the checkpoint that it resumed from; 0: it began.
      reached_step: last reported step before; above ``from_step``, the steps between were lost and are made again.
      recipe: as the command named it; empty: the call had a recipe without a name.
      machine, device: of the first rank.
      world_size, num_machines: of all ranks.
      strategy: of ``parallel.strategy``, resolved.
      precision: that it computes in: of the recipe, or fp32 where that is bf16 and the device has no fast one.
      versions: of this package and of the libraries.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    time: str
    from_step: int
    reached_step: int
    recipe: str
    machine: str
    device: str
    world_size: int
    num_machines: int
    strategy: str
    precision: str
    versions: dict[str, str]


def start_of(
    recipe: TrainRecipe,
    device: torch.device,
    ranks: Ranks,
    *,
    name: str,
    release: str,
    from_step: int,
    reached_step: int,
) -> Start:
    """This start, of the first rank's machine.

    Args:
      name: of the recipe.
      release: version of this package.
    """
    import torch

    from ..parallel.strategy import choose_strategy
    from .device import computed_in

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    on_gpu, cpu = device.type == "cuda", f"{platform.machine()} CPU, {cores} cores"
    installed = {one: importlib.metadata.version(one) for one in LIBRARIES if importlib.util.find_spec(one)}
    return Start(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        from_step=from_step,
        reached_step=reached_step,
        recipe=name,
        machine=platform.node(),
        device=torch.cuda.get_device_name(device) if on_gpu else cpu,
        world_size=ranks.world_size,
        num_machines=ranks.num_machines,
        strategy=choose_strategy(recipe.parallel, ranks),
        precision=computed_in(recipe.run.precision, device),
        versions={"leandit": release, "python": platform.python_version()} | installed,
    )


def write_start(run: Path, start: Start) -> None:
    """Append a start to those of a run."""
    path = run / STARTS
    before = path.read_bytes() if path.is_file() else b""
    write_atomic(path, before + start.model_dump_json().encode() + b"\n")


def read_starts(run: Path) -> list[Start]:
    """The starts of a run, in order; empty if the file is missing.

    Raises: DamageError: a line is not a start.
    """
    path, starts = run / STARTS, list[Start]()
    for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else (), 1):
        try:
            starts.append(Start.model_validate(json.loads(line)))
        except (ValueError, RecursionError, ValidationError) as error:
            raise DamageError(f"'{path}': line {number} is not a start of a run. Remove the line.") from error
    return starts
