"""What lies in the folder of a run, without torch: its state, stores, starts, evaluations and pictures."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .....datasets.disk.hashing import read_json
from .....datasets.errors import DamageError, LeanditError
from .....datasets.store import LatentStore
from .....train.metrics.starts import Start, read_starts
from .....train.run.evaluation.decoding import waiting
from .....train.weights.folders import CHECKPOINT, EVALUATIONS, METRICS, RECIPE, RUN, SAMPLES, SNAPSHOT, STATE, find
from .metrics import Metrics, read_metrics, whole_lines
from .recipes import RecipeDiff, diff_to_shipped

SCORES = ("frechet", "kid", "cmmd", "precision", "recall", "density", "coverage", "clip_score")
QUIET_LINES, QUIET_SECONDS = 10, 300.0  # a run that has written nothing for longer than both has stopped
HASH_CHARS = 16


class _RevisionRead(BaseModel):
    revision: int
    root_hash: str | None
    from_step: int


class _StoreRead(BaseModel):
    path: str
    revisions: Annotated[list[_RevisionRead], Field(min_length=1)]


class _Manifest(BaseModel):
    """What a report takes of ``run.json``; the trainer checks all of it."""

    model_config = ConfigDict(extra="ignore")

    stores: list[_StoreRead]
    recipe: dict[str, Any]


@dataclass(frozen=True)
class StoreFacts:
    """A store of a run.

    Args:
      rows: name and value, for the page.
      name: of its folder.
    """

    name: str
    rows: list[tuple[str, str]]


@dataclass(frozen=True)
class Evaluation:
    """Numbers of ``leandit evaluate`` that lie in the run's folder.

    Args:
      file: name.
      pictures, reference: what was measured, and against what.
      scores: by name, of ``SCORES``.
    """

    file: str
    pictures: str
    reference: str
    scores: dict[str, float]


@dataclass(frozen=True, eq=False)
class RunFacts:
    """All that a report shows of a run.

    Args:
      steps: that the recipe asks for.
      quiet_seconds: since the run last wrote a figure.
      grids: decoded pictures by step; ``num_waiting`` others are latents still.
      checkpoints: steps of the checkpoints and snapshots.
      damaged: names of checkpoints that were set aside.
    """

    path: Path
    name: str
    recipe: dict[str, Any]
    recipe_text: str
    diff: RecipeDiff
    steps: int
    metrics: Metrics
    starts: list[Start]
    stores: list[StoreFacts]
    evaluations: list[Evaluation]
    grids: dict[int, Path]
    num_waiting: int
    checkpoints: list[int]
    damaged: list[str]
    quiet_seconds: float

    @property
    def last_step(self) -> int:
        """The last reported step; 0 of a run that has not reported."""
        return int(self.metrics.steps[-1]) if len(self.metrics) else 0

    @property
    def state(self) -> str:
        """ "finished", "running" or "stopped"; of a run without lines "not begun"."""
        if not len(self.metrics):
            return "not begun"
        if self.last_step >= self.steps:
            return "finished"
        line_seconds = float(self.metrics.columns["seconds_per_step"][-1] * self.metrics.widths[-1])
        return "running" if self.quiet_seconds < max(QUIET_SECONDS, QUIET_LINES * line_seconds) else "stopped"

    @property
    def restart_steps(self) -> list[int]:
        """Steps from which the run was resumed."""
        return [start.from_step for start in self.starts[1:]]

    @property
    def num_repeated_steps(self) -> int:
        """Steps that were lost and made again."""
        return sum(max(0, start.reached_step - start.from_step) for start in self.starts)

    def key(self, name: str) -> Any:
        """A key of the recipe, by its dotted name; None of one that the run does not have."""
        value: Any = self.recipe
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def read_run(run: Path, name: str, *, now: float | None = None) -> RunFacts:
    """Read the folder of a run; nothing is written.

    Args:
      name: for the page.
      now: seconds since 1970; None: the clock's.
    Raises: DamageError: a file of the run is not what the trainer writes.
    """
    manifest, starts = _manifest(run), read_starts(run)
    metrics = read_metrics(run)
    file, samples = run / METRICS, run / SAMPLES
    recipe = manifest.recipe
    steps = recipe.get("run", {}).get("steps")
    written = file.stat().st_mtime if file.is_file() else 0.0
    return RunFacts(
        path=run,
        name=name,
        recipe=recipe,
        recipe_text=(run / RECIPE).read_text(errors="replace") if (run / RECIPE).is_file() else "",
        diff=diff_to_shipped(recipe, starts[0].recipe if starts else ""),
        steps=steps if isinstance(steps, int) else 0,
        metrics=metrics,
        starts=starts,
        stores=[_store(run, store) for store in manifest.stores],
        evaluations=_evaluations(run),
        grids=_grids(samples),
        num_waiting=len(waiting(samples)),
        checkpoints=sorted(int(path.name.rpartition("-")[2]) for path in find(CHECKPOINT, run)),
        damaged=sorted(path.name for path in run.glob(f"damaged-{CHECKPOINT}-*")),
        quiet_seconds=max(0.0, (time.time() if now is None else now) - written),
    )


def _manifest(run: Path) -> _Manifest:
    try:
        return _Manifest.model_validate(read_json(run / RUN))
    except FileNotFoundError as error:
        raise DamageError(
            f"run '{run}': it has no {RUN}, so it is no run that trained; what 'leandit average' has made has no "
            "figures. Give the run itself."
        ) from error
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise DamageError(f"run '{run}': '{RUN}' is not valid, '{place}': {problem['msg']}. Restore it.") from error


def _grids(samples: Path) -> dict[int, Path]:
    """Decoded grids by step."""
    numbers = {path: path.stem.removeprefix("step-") for path in samples.glob("step-*.png")}
    return dict(sorted((int(number), path) for path, number in numbers.items() if number.isdecimal()))


def _evaluations(run: Path) -> list[Evaluation]:
    """Results of ``leandit evaluate``: of the run itself, and others whose ``--json`` lies beside the run's files.

    Raises: DamageError: a whole line is not JSON.
    """
    lines, _ = whole_lines(run / EVALUATIONS)
    try:
        results = [(EVALUATIONS, json.loads(line)) for line in lines]
    except ValueError as error:
        raise DamageError(f"'{run / EVALUATIONS}': a line is not JSON ({error}). Remove the line.") from error
    noted = [value for _, value in results]
    for path in sorted(run.glob("*.json")):
        with contextlib.suppress(DamageError):  # not ours: the trainer has no other JSON there
            if path.name != RUN and (value := read_json(path)) not in noted:
                results.append((path.name, value))
    found = []
    for name, value in results:
        if not (isinstance(value, dict) and isinstance(value.get("pictures"), dict)):
            continue
        if scores := {name: value[name] for name in SCORES if isinstance(value.get(name), (int, float))}:
            found.append(Evaluation(name, _side(value["pictures"]), _side(value.get("reference")), scores))
    return found


def _side(side: Any) -> str:
    """The pictures of one side of an evaluation, in words."""
    if not isinstance(side, dict):
        return "none"
    names = ("snapshot", "count", "sampler", "diffusion", "last_step", "steps", "shift", "guidance")
    parts = [f"{name} {side[name]}" for name in names if isinstance(side.get(name), (str, int, float))]
    return f"{side.get('kind', '')} {side.get('path', '')}" + (f" ({', '.join(parts)})" if parts else "")


def _store(run: Path, read: _StoreRead) -> StoreFacts:
    """Identity of a store: what the run has read of it, and what it says itself where it can be opened."""
    path, last = (run / read.path).resolve(), read.revisions[-1]
    rows = [("path", str(path))]
    for one in read.revisions:
        since = f" from step {one.from_step} on" if len(read.revisions) > 1 else ""
        rows.append(("revision", f"{one.revision}{since}, root hash {one.root_hash or 'none, it was not complete'}"))
    try:
        store = LatentStore(path, revision=last.revision, allow_incomplete=True)
    except (LeanditError, OSError) as error:
        return StoreFacts(path.name, [*rows, ("not opened", str(error)), *_encoders_of_snapshot(run)])
    if last.root_hash and store.root_hash != last.root_hash:
        rows.append(("another store", f"the one there now has root hash {store.root_hash}"))
    buckets = "bucket" if len(store.buckets) == 1 else "buckets"
    rows.append(("records", f"{sum(store.buckets.values()):,} in {len(store.buckets)} {buckets}"))
    spec = store.spec
    encoders = {"autoencoder": spec.vae} | ({"text encoder": spec.text_encoder} if spec.text_encoder else {})
    encoders |= {f"{kind} {one.name}": one.encoder for kind in ("text", "feature") for one in _named(spec, kind)}
    rows += [
        (role, f"{one.model}, {one.class_name}, weights {one.weights_sha256[:HASH_CHARS]}")
        for role, one in encoders.items()
    ]
    return StoreFacts(path.name, rows)


def _named(spec: Any, kind: str) -> list[Any]:
    return list(spec.texts if kind == "text" else spec.features)


def _encoders_of_snapshot(run: Path) -> list[tuple[str, str]]:
    """The encoders as the newest snapshot has them; none of a run without one."""
    snapshots = find(SNAPSHOT, run)
    state = read_json(snapshots[-1] / STATE) if snapshots else {}
    rows = []
    for role, name in (("vae", "autoencoder"), ("text_encoder", "text encoder")):
        if isinstance(encoder := state.get(role), dict) and isinstance(section := encoder.get("model"), dict):
            rows.append((name, f"{section.get('model')}, weights {str(encoder.get('weights_sha256'))[:HASH_CHARS]}"))
    return rows
