"""What a run's folder holds: its figures, stores, starts, evaluations and images. Reading it needs no torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ....datasets.disk.cached import cached_property
from ....errors import DamageError, LeanditError
from ....recipe import flatten, shipped_recipes
from ....train.config import PACKAGE, load
from ....train.metrics.history import read_history, read_starts, whole_lines
from ....train.run.evaluation.decoding import IMAGE, LATENTS, grid_files
from ....train.run.manifest import RunManifest, StoreRead, read_run_manifest, reopen_store, store_place
from ....train.run.settings import read_stored_recipe
from ....train.weights.folders import CHECKPOINT, EVALUATIONS, RECIPE, RUN, SAMPLES, find
from ....units import plural
from ..templating import Rows

SCORES = ("frechet", "kid", "cmmd", "precision", "recall", "density", "coverage", "clip_score")
ABSENT = "-"
HASH_CHARS = 16


class RunFacts:
    """All that a report shows of a run, read from its folder; nothing is written.

    Args:
      run: its folder.
      now: seconds since 1970; None: the clock's.
    Raises: DamageError: a file of the run is not what the trainer writes.
    """

    def __init__(self, run: Path, *, now: float | None = None) -> None:
        manifest = read_run_manifest(run) if (run / RUN).is_file() else None
        if manifest is None:
            raise DamageError(
                f"run '{run}': it has no {RUN}, so it has not trained; the output of 'leandit average' has no metrics. "
                "Pass the run itself."
            )
        stored = read_stored_recipe(manifest.recipe)
        self.path = run
        self.recipe = stored.values  # nested, with all keys
        self.unknown_keys = stored.unknown  # of another release, by dotted name
        self.recipe_text = (run / RECIPE).read_text(errors="replace") if (run / RECIPE).is_file() else ""
        self.starts, self.metrics = read_starts(run), read_history(run)
        steps = self.key("run.steps")
        self.num_steps = steps if isinstance(steps, int) else 0  # that the recipe asks for
        self.state = self.metrics.state(self.num_steps, now=now)
        shipped = self.starts[0].recipe if self.starts else ""
        self.shipped = shipped if shipped in shipped_recipes(PACKAGE) else ""  # that it was started with; "": another
        self.changed = differing(load(shipped, []).model_dump(), self.recipe) if self.shipped else []
        self.stores = [_describe_store(run, manifest, store) for store in manifest.stores]
        self.evaluations = _read_evaluations(run)
        self.grids = grid_files(run / SAMPLES, IMAGE)  # decoded ones, by step
        self.num_waiting = len(grid_files(run / SAMPLES, LATENTS))
        self.checkpoints = sorted(int(path.name.rpartition("-")[2]) for path in find(CHECKPOINT, run))  # steps
        self.damaged = sorted(path.name for path in run.glob(f"damaged-{CHECKPOINT}-*"))  # that were set aside

    @property
    def restart_steps(self) -> list[int]:
        """Steps from which the run was resumed."""
        return [start.from_step for start in self.starts[1:]]

    @property
    def num_repeated_steps(self) -> int:
        """Steps that were lost, since no checkpoint had them, and made again."""
        return sum(max(0, start.reached_step - start.from_step) for start in self.starts)

    @property
    def num_skipped(self) -> int:
        """Updates that were skipped, because gradients overflowed or the loss or the gradient was not finite."""
        return int(np.nansum(self.metrics.columns["skipped_steps"]))

    @property
    def first_lines(self) -> np.ndarray:
        """Places of the first line of each start, which has its costs: compilation, first reads, kernels tried."""
        places = np.searchsorted(self.metrics.steps, [0, *self.restart_steps], side="right")
        return places[places < len(self.metrics)]

    def key(self, name: str) -> Any:
        """A key of the recipe by its dotted name; None if the run lacks it."""
        return functools.reduce(
            lambda table, part: table.get(part) if isinstance(table, Mapping) else None, name.split("."), self.recipe
        )

    def mean(self, column: str) -> float:
        """Mean of a column over the time in steps, without the first line of each start; NaN without a number."""
        values, weights = self.metrics.columns[column], self.metrics.columns["seconds_per_step"] * self.metrics.widths
        counts = np.isfinite(values) & np.isfinite(weights)
        if len(values) > len(self.first_lines):
            counts[self.first_lines] = False
        return float(np.average(values[counts], weights=weights[counts])) if weights[counts].sum() > 0 else np.nan

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The numbers of the summary: None where there is none; empty for a run that has not reported.

        Returns: among them ``held_out``: ``last`` and ``lowest`` loss by weights, and the ``step`` of the lowest;
        ``shares`` of the time; ``seconds_left`` at the speed of the last line.
        """
        metrics, columns = self.metrics, self.metrics.columns
        if not len(metrics):
            return {}
        held_out = {}
        for name, column in (("averaged weights", "held_out.averaged_loss"), ("weights", "held_out.loss")):
            losses = columns[column][metrics.is_evaluated]
            if np.isfinite(losses).any():
                best = int(np.nanargmin(losses))
                step = int(metrics.steps[metrics.is_evaluated][best])
                held_out[name] = {"last": losses[-1], "lowest": losses[best], "step": step}
        line_seconds = columns["seconds_per_step"][-1]
        shares = {"MFU": "mfu", "waiting for batches": "data_wait_share", "GPU busy": "gpu_busy_share"}
        means = {name: self.mean(column) for name, column in shares.items()}
        return {
            "num_images": int(np.nan_to_num(columns["num_images"][-1])),
            "epoch": int(np.nan_to_num(columns["epoch"][-1])),
            "seconds": float(metrics.seconds[-1]),
            "seconds_left": line_seconds * (self.num_steps - metrics.last_step) if line_seconds > 0 else None,
            "loss": _finite(np.nanmean, columns["loss"][-max(1, len(metrics) // 10) :]),
            "held_out": held_out,
            "images_per_second": _finite(np.nanmedian, columns["images_per_second"]),
            "shares": {name: mean for name, mean in means.items() if np.isfinite(mean)},
            "evaluating": _finite(np.nanmedian, columns["held_out.share"]),
            "memory_gib": _finite(np.nanmax, columns["memory_gib"]),
        }


def differing(*recipes: dict[str, Any]) -> list[tuple[str, ...]]:
    """Keys whose values differ between recipes, with the value of each; "-" where it lacks the key."""
    flat = list(map(flatten, recipes))
    rows = [
        (key, *(json.dumps(recipe[key], ensure_ascii=False) if key in recipe else ABSENT for recipe in flat))
        for key in sorted({key for recipe in flat for key in recipe})
    ]
    return [row for row in rows if len(set(row[1:])) > 1]


def _finite(summarize: Callable[[np.ndarray], Any], values: np.ndarray) -> float | None:
    return float(summarize(values)) if np.isfinite(values).any() else None


def _read_evaluations(run: Path) -> list[dict[str, str]]:
    """Results of ``leandit evaluate`` of the run.

    Raises: DamageError: a whole line is not JSON.
    """
    try:
        results = [json.loads(line) for line in whole_lines(run / EVALUATIONS)[0]]
    except ValueError as error:
        raise DamageError(f"'{run / EVALUATIONS}': a line is not JSON ({error}). Remove the line.") from error
    evaluations = []
    for value in results:
        if isinstance(value, dict):
            scores = {name: f"{value[name]:.5g}" for name in SCORES if isinstance(value.get(name), (int, float))}
            evaluations.append({side: _side(value.get(side)) for side in ("images", "reference")} | scores)
    return evaluations


def _side(side: Any) -> str:
    """One side of an evaluation, in words."""
    if not isinstance(side, dict):
        return "none"
    names = ("snapshot", "count", "sampler", "diffusion", "last_step", "steps", "shift", "guidance")
    parts = [f"{name} {side[name]}" for name in names if isinstance(side.get(name), (str, int, float))]
    return f"{side.get('kind', '')} {side.get('path', '')}" + (f" ({', '.join(parts)})" if parts else "")


def _describe_store(run: Path, manifest: RunManifest, read: StoreRead) -> Rows:
    """What the run reads of a store, and what the store itself says where it can be opened."""
    rows = {"URL" if read.is_url else "path": [store_place(run, read)]}
    if read.remote_folder:
        rows["local copy"] = [read.remote_folder]
    rows["revision"] = [f"{read.revision}, root hash {read.root_hash or 'none, it was not complete'}"]
    try:
        store = reopen_store(run, manifest, read, revision=read.revision)
    except (LeanditError, OSError) as error:
        return rows | {"not opened": [str(error)]}
    if read.root_hash and store.root_hash != read.root_hash:
        rows["another store"] = [f"the one there now has root hash {store.root_hash}"]
    rows["records"] = [f"{sum(store.buckets.values()):,} in {plural(len(store.buckets), 'bucket')}"]
    spec = store.spec
    encoders = {"autoencoder": spec.vae, "text encoder": spec.text_encoder}
    encoders |= {f"text {text.name}": text.encoder for text in spec.texts}
    encoders |= {f"feature {feature.name}": feature.encoder for feature in spec.features}
    return rows | {
        role: [f"{encoder.model}, {encoder.class_name}, weights {encoder.weights_sha256[:HASH_CHARS]}"]
        for role, encoder in encoders.items()
        if encoder
    }
