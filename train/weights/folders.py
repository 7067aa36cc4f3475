"""What a run's folder holds: find its files, checkpoints, snapshots and averages, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RUN, STATE = "run.json", "state.json"
RECIPE, METRICS, STARTS, SAMPLES = "recipe.toml", "metrics.jsonl", "starts.jsonl", "samples"
EVALUATIONS = "evaluations.jsonl"  # a line for each result of ``leandit evaluate`` of the run
CHECKPOINT, SNAPSHOT, AVERAGE = "checkpoint", "snapshot", "average"


def find(kind: str, run: Path) -> list[Path]:
    """Checkpoints, snapshots or averages of a run, oldest first; not checked."""
    return [path for _, path in sorted(steps(kind, run))]


def steps(kind: str, run: Path) -> Iterator[tuple[int, Path]]:
    """Step and path of each of them, in any order."""
    for path in run.glob(f"{kind}-*") if run.is_dir() else ():
        if match := re.fullmatch(rf"{kind}-(0|[1-9][0-9]*)", path.name):
            yield int(match[1]), path


def is_run(path: Path) -> bool:
    """Whether a path is a run, or what ``leandit average`` has made."""
    return path.is_dir() and ((path / RUN).is_file() or bool(find(SNAPSHOT, path)))


def knows_null(state: Mapping[str, Any]) -> bool:
    """Whether the model of a snapshot has learned the null condition, so that it can be guided.

    A run that drops nothing has not, unless it trains adapters of weights that have, or dropped in earlier steps.

    Args:
      state: of the snapshot.
    """
    return state.get("drop") != 0 or bool(state.get("base_knows_null"))
