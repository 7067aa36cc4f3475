"""What a run's folder holds: find its files, checkpoints, snapshots and averages, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

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
