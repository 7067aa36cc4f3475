"""``leandit bench learning``: what alignment, routing and contrastive flow bring a small DiT, at equal steps.

The data are the demo's pictures. Every recipe trains with every seed on the same store. Its held-out loss, and the
Fréchet distance of what its averaged weights draw, are compared at equal steps and at equal seconds. Seconds are steps
times the seconds of a step, which are measured before, in alternating rounds, so other work on the machine matters
little.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from ....datasets.disk.files import write_atomic
from ....datasets.disk.hashing import canonical_json
from ....datasets.store import LatentStore
from ....precompute import config as precompute_config
from ....precompute.pipeline import precompute
from ....train import config as train_config
from ....train.loop import StopRequest, print_warning, train
from ....train.parallel.ranks import ALONE
from ....train.parallel.watchdog import Watchdog
from ....train.weights.folders import METRICS
from ...demo.demo import CPU, draw_pictures_folder, sample_captions
from ...demo.vision import train_vision
from ...plan.workload import workload_of_stores
from ...sample.evaluation.distances import frechet_distance
from ...sample.evaluation.gather import Team
from ...sample.evaluation.moments import Moments, collect
from ...sample.evaluation.networks.extractors import Network, open_network
from ...sample.evaluation.sets import moments_of, open_set
from ...terminal.progress import ProgressLine
from ...terminal.text import aligned
from ..harness.meters import hardware
from ..harness.rounds import alternating_rounds
from .steps import WARM_STEPS, StepRequest, our_step, timed

FEATURE = "scene"  # the teacher's, in the store
PLAIN = "plain"
SHARED = (
    "model.name=DiT-Ti/2",
    "conditioning.kind=caption",
    "optimizer.lr=1e-3",
    "schedule.kind=constant",
    "run.ema_decay=0.99",
    "data.holdout=0.05",
    "run.evaluate_images=64",
    "run.global_batch=32",
)
RECIPES: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "REPA": (f"align.{FEATURE}.block=3", f"align.{FEATURE}.projector_width=256"),
    "TREAD": ("routing.kind=tread",),
    "contrastive": ("objective.contrastive_weight=0.05",),
}
NUM_EVALUATIONS, NUM_SNAPSHOTS = 16, 4  # held-out losses and Fréchet distances of a run
BATCH = 64  # pictures of a forward of the network that measures
ROUNDS, STEPS = 20, 4  # of the measurement of a step: short rounds, as other work on the machine comes and goes


@dataclass(frozen=True)
class LearningRequest:
    """What to compare.

    Args:
      out: folder for pictures, models, store, runs and results; the same call again resumes.
      overrides: of all recipes.
      teacher_steps: of the training of each vision model.
      per_bucket: samples of each of the three aspect ratios, for a Fréchet distance.
    """

    out: Path
    seeds: int
    steps: int
    num_pictures: int
    overrides: tuple[str, ...] = ()
    teacher_steps: int = 600
    per_bucket: int = 64


def run(request: LearningRequest, progress: ProgressLine) -> dict[str, Any]:
    """Make the store, train every recipe with every seed, and measure the runs."""
    out = request.out
    store = make_store(request, progress)
    seconds = seconds_per_step(request, store, progress)
    network = open_network(str(out / "measuring"), None, CPU)
    team = Team(Watchdog(ALONE, print_warning))
    reference = moments_of(open_set(out / "pictures", network, CPU), network, team, "reference", progress)
    assert reference is not None
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in RECIPES}
    for seed in range(request.seeds):
        for name in RECIPES:
            folder = out / "runs" / f"{name}-{seed}"
            train_one(request, name, seed, store, folder, progress)
            distances = {
                step: distance(request, folder, step, store, network, reference) for step in snapshots(request)
            }
            runs[name].append({"seed": seed, "held_out": held_out_losses(folder), "frechet": distances})
    result = {
        "steps": request.steps,
        "seconds_per_step": seconds,
        "runs": runs,
        "hardware": hardware(),
        "torch": torch.__version__,
    }
    text = json.dumps(result, indent=1)
    write_atomic(out / "learning.json", text.encode())
    return json.loads(text)


def render(result: dict[str, Any]) -> str:
    """A row for each recipe: means over the seeds, with their ranges."""
    rows = [("recipe", "seconds a step", "held-out loss", "Fréchet distance", "steps to plain's last loss", "seconds")]
    plain = mean_curve(result["runs"][PLAIN], "held_out")
    goal, seconds = min(plain.values()), result["seconds_per_step"]
    for name, runs in result["runs"].items():
        reached = first_below(mean_curve(runs, "held_out"), goal)
        relative = seconds[name] / seconds[PLAIN]
        share = "never" if reached is None else f"{reached / result['steps']:.0%}"
        in_time = "never" if reached is None else f"{reached * relative / result['steps']:.0%}"
        loss, distance = (
            f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
            for values in (last(runs, "held_out"), last(runs, "frechet"))
        )
        rows.append((name, f"{seconds[name]:.3f} ({relative:.2f}x)", loss, distance, share, in_time))
    return "\n".join(aligned(rows))


def make_store(request: LearningRequest, progress: ProgressLine) -> LatentStore:
    """The demo's pictures with a teacher's patches; and the model that measures samples, of another seed."""
    out = request.out
    draw_pictures_folder(out / "pictures", request.num_pictures, progress)
    for seed, name in enumerate(("teacher", "measuring")):
        if not (out / name / "preprocessor_config.json").is_file():
            how: dict[str, Any] = {"seed": seed, "steps": request.teacher_steps, "num_pictures": request.num_pictures}
            train_vision(out / name, **how, progress=lambda step, steps, name=name: progress(name, step, steps))
    recipe = precompute_config.load("demo", [f"features.{FEATURE}.model={out / 'teacher'}"])
    where: dict[str, Any] = {"source_path": out / "pictures", "store_path": out / "store"}
    precompute(recipe, **where, device=CPU, progress=progress)
    return LatentStore(out / "store")


def recipe_of(request: LearningRequest, name: str, seed: int) -> train_config.TrainRecipe:
    """The recipe of a run: the demo's, with a DiT, a constant rate and held-out records."""
    every = {
        "steps": request.steps,
        "seed": seed,
        "evaluate_every": max(1, request.steps // NUM_EVALUATIONS),
        "checkpoint_every": max(1, request.steps // NUM_SNAPSHOTS),
        "keep_every": max(1, request.steps // NUM_SNAPSHOTS),
    }
    own = [f"run.{key}={value}" for key, value in every.items()]
    return train_config.load("demo", [*SHARED, *own, *RECIPES[name], *request.overrides])


def snapshots(request: LearningRequest) -> list[int]:
    """Steps whose averaged weights draw."""
    every = max(1, request.steps // NUM_SNAPSHOTS)
    return [every * (number + 1) for number in range(request.steps // every)]


def seconds_per_step(request: LearningRequest, store: LatentStore, progress: ProgressLine) -> dict[str, float]:
    """Median seconds of a step of each recipe, over alternating rounds; kept in the folder."""
    path = request.out / "seconds.json"
    if path.is_file():
        return json.loads(path.read_text())
    steps = {}
    for name in RECIPES:
        work = workload_of_stores(recipe_of(request, name, 0), store.path)
        steps[name] = our_step(StepRequest(work, CPU, ROUNDS, STEPS, "synthetic"))
        timed(steps[name], WARM_STEPS, CPU)
    seconds: dict[str, list[float]] = {name: [] for name in RECIPES}
    for number, name in alternating_rounds(list(RECIPES), ROUNDS):
        seconds[name].append(timed(steps[name], STEPS, CPU) / STEPS)
        progress("time a step", number + 1, ROUNDS, name)
    medians = {name: median(values) for name, values in seconds.items()}
    write_atomic(path, canonical_json(medians))
    return medians


def train_one(
    request: LearningRequest, name: str, seed: int, store: LatentStore, folder: Path, progress: ProgressLine
) -> None:
    """Train, or finish, a run.

    Raises: KeyboardInterrupt: it was stopped.
    """

    def show(report: Any) -> None:
        progress(f"train {name}, seed {seed}", report.step, request.steps, f"loss {report.loss:.3f}")

    recipe = recipe_of(request, name, seed)
    outcome = train(recipe, store_path=store.path, run=folder, device=CPU, report=show, stop=StopRequest())
    if not outcome.finished:
        raise KeyboardInterrupt


def held_out_losses(folder: Path) -> dict[int, float]:
    """Held-out loss of the averaged weights, by step."""
    reports = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return {one["step"]: one["held_out"]["averaged_loss"] for one in reports if one.get("held_out")}


def distance(
    request: LearningRequest, folder: Path, step: int, store: LatentStore, network: Network, reference: Moments
) -> float:
    """Fréchet distance of drawn pictures to all of the demo's; kept beside the run."""
    path = folder / f"frechet-{step}.json"
    if path.is_file():
        return json.loads(path.read_text())
    pictures, _ = sample_captions(folder, store, CPU, step=step, per_bucket=request.per_bucket)
    parts = (network.features(pictures[start : start + BATCH]) for start in range(0, len(pictures), BATCH))
    drawn = collect(parts, len(pictures))
    found = frechet_distance(drawn.mean, drawn.covariance, reference.mean, reference.covariance)
    write_atomic(path, canonical_json(found))
    return found


def mean_curve(runs: Sequence[Mapping[str, Any]], key: str) -> dict[int, float]:
    """Mean over the seeds, by step."""
    return {int(step): mean(run[key][step] for run in runs) for step in runs[0][key]}


def last(runs: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The value after the last step, of each seed."""
    return [run[key][max(run[key], key=int)] for run in runs]


def first_below(curve: Mapping[int, float], goal: float) -> float | None:
    """The step at which a curve comes down to a value, between two points by a straight line; None: it does not."""
    steps, values = list(curve), np.array(list(curve.values()))
    below = np.flatnonzero(values <= goal)
    if not len(below):
        return None
    number = int(below[0])
    if number == 0:
        return float(steps[0])
    return float(np.interp(goal, values[[number, number - 1]], [steps[number], steps[number - 1]]))
