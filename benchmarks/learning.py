"""What alignment (REPA), routing (TREAD) and contrastive flow bring a small DiT, at equal steps and equal seconds.

    python benchmarks/learning.py --out learning

Every recipe trains with every seed on the same store of the demo's images. Compared are the held-out loss, and the
Fréchet distance of what the averaged weights draw, measured by a vision model other than REPA's teacher. Seconds are
steps times the seconds of a step, which are measured before, in alternating rounds, so that other work on the machine
matters little. On a CPU; the same command resumes. It writes learning.json and learning.png.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import matplotlib
import numpy as np
import torch
import typer
from matplotlib import pyplot as plt
from measuring import alternating_rounds, log, machine, print_table, timed
from scene_vision import train_vision

from leandit.datasets.disk.files import write_atomic
from leandit.datasets.store import LatentStore
from leandit.precompute import config as precompute_config
from leandit.precompute.pipeline import precompute
from leandit.tools.cli.options import Overrides
from leandit.tools.demo.demo import sample_captions
from leandit.tools.demo.scenes import write_image_folder
from leandit.tools.plan.workload import workload_of_stores
from leandit.tools.sample.evaluation.distances import frechet_distance
from leandit.tools.sample.evaluation.gather import Team
from leandit.tools.sample.evaluation.moments import Moments, collect
from leandit.tools.sample.evaluation.networks.extractors import Network, open_network
from leandit.tools.sample.evaluation.sets import moments_of, open_set
from leandit.tools.synthetic.batches import synthetic_batch, synthetic_learner
from leandit.tools.terminal.cpu_memory import keep_freed_memory
from leandit.tools.terminal.progress import ProgressLine
from leandit.train import config as train_config
from leandit.train.loop import StopRequest, train
from leandit.train.parallel.ranks import ALONE
from leandit.train.parallel.watchdog import Watchdog
from leandit.train.step.train_step import train_step
from leandit.train.weights.folders import METRICS

CPU = torch.device("cpu")
FEATURE = "scene"  # the teacher's, in the store
PLAIN = "plain"
SHARED = (
    "model.name=DiT-Ti/2",
    "conditioning.kind=caption",
    "optimizer.name=adamw",
    "optimizer.lr=1e-3",
    "schedule.kind=constant",
    "run.ema_decay=0.99",
    "data.holdout=0.05",
    "run.evaluate_images=64",
    "run.global_batch=32",
)
RECIPES = {
    PLAIN: (),
    "REPA": (f"align.{FEATURE}.block=3", f"align.{FEATURE}.projector_width=256"),
    "TREAD": ("routing.kind=tread", "routing.last_block=6"),
    "contrastive": ("objective.contrastive_weight=0.05",),
}
NUM_EVALUATIONS, NUM_SNAPSHOTS = 16, 4  # held-out losses and Fréchet distances of a run
FORWARD_IMAGES = 64  # of the network that measures
STEPS, WARM_STEPS = 4, 3  # of the timing: short rounds, as other work on the machine comes and goes
Run = Mapping[str, Any]  # "held_out" and "frechet": values by step


@dataclass(frozen=True)
class Study:
    """What is compared, and its folder.

    Args:
      samples: of each of the demo's three aspect ratios, for a Fréchet distance.
      overrides: of all recipes.
    """

    out: Path
    seeds: int
    steps: int
    num_images: int
    teacher_steps: int
    samples: int
    overrides: tuple[str, ...]

    def recipe(self, name: str, seed: int) -> train_config.TrainRecipe:
        """The demo's recipe, with a DiT, a constant rate and held-out records."""
        every = {
            "steps": self.steps,
            "seed": seed,
            "evaluate_every": max(1, self.steps // NUM_EVALUATIONS),
            "checkpoint_every": max(1, self.steps // NUM_SNAPSHOTS),
            "keep_every": max(1, self.steps // NUM_SNAPSHOTS),
        }
        settings = [f"run.{key}={value}" for key, value in every.items()]
        return train_config.load("demo", [*SHARED, *settings, *RECIPES[name], *self.overrides])

    @property
    def snapshots(self) -> list[int]:
        """Steps whose averaged weights draw."""
        every = max(1, self.steps // NUM_SNAPSHOTS)
        return list(range(every, self.steps + 1, every))


def main(
    out: Annotated[Path, typer.Option(help="Folder for images, store, runs and results; the same command resumes.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each recipe.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Of each run.")] = 800,
    images: Annotated[int, typer.Option(min=12, help="To draw.")] = 3000,
    teacher_steps: Annotated[int, typer.Option(min=1, help="Of the training of each vision model.")] = 600,
    samples: Annotated[int, typer.Option(min=1, help="Of each aspect ratio, for a Fréchet distance.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Of the timing of a step.")] = 20,
    overrides: Overrides = None,
) -> None:
    """Compare what REPA, routing and contrastive flow bring a small DiT."""
    study = Study(out.resolve(), seeds, steps, images, teacher_steps, samples, tuple(overrides or ()))
    keep_freed_memory()
    with ProgressLine() as progress:
        store = make_store(study, progress)
        network = open_network(str(study.out / "measuring"), None, CPU)
        pictures = open_set(study.out / "pictures", network, CPU)
        reference = moments_of(pictures, network, Team(Watchdog(ALONE, log)), "reference", progress)
        assert reference is not None, "the only rank"
        seconds = kept(study.out / "seconds.json", partial(seconds_per_step, study, store, rounds))
        runs: dict[str, list[Run]] = {name: [] for name in RECIPES}
        for seed in range(seeds):
            for name in RECIPES:
                runs[name].append(measure_run(study, name, seed, store, network, reference, progress))
    result = {"machine": machine(), "steps": steps, "seconds_per_step": seconds, "runs": runs}
    write_atomic(study.out / "learning.json", json.dumps(result, indent=1).encode())
    draw_chart(runs, seconds, study.out / "learning.png")
    print(f"{machine()}; {steps} steps, {seeds} seeds: mean (range); seconds are medians of {rounds} rounds\n")
    print_table(table_rows(runs, seconds, steps))


def make_store(study: Study, progress: ProgressLine) -> LatentStore:
    """The demo's images with a teacher's patches; and the model that measures samples, of another seed."""
    write_image_folder(study.out / "pictures", study.num_images, progress)
    for seed, name in enumerate(("teacher", "measuring")):
        if not (study.out / name / "preprocessor_config.json").is_file():
            show = partial(progress, name)
            sizes = {"steps": study.teacher_steps, "num_images": study.num_images}
            train_vision(study.out / name, seed=seed, progress=show, **sizes)
    recipe = precompute_config.load("demo", [f"features.{FEATURE}.model={study.out / 'teacher'}"])
    where: dict[str, Any] = {"source_path": study.out / "pictures", "store_path": study.out / "store"}
    precompute(recipe, device=CPU, progress=progress, **where)
    return LatentStore(study.out / "store")


def seconds_per_step(study: Study, store: LatentStore, rounds: int) -> dict[str, float]:
    """Median seconds of a step of each recipe, on one batch of noise."""
    steps = {name: step_on_noise(study.recipe(name, 0), store) for name in RECIPES}
    for step in steps.values():
        timed(step, WARM_STEPS, CPU)
    seconds: dict[str, list[float]] = {name: [] for name in RECIPES}
    for _, name in alternating_rounds(list(RECIPES), rounds):
        seconds[name].append(timed(steps[name], STEPS, CPU) / STEPS)
    return {name: median(values) for name, values in seconds.items()}


def step_on_noise(recipe: train_config.TrainRecipe, store: LatentStore) -> Callable[[], object]:
    """The step of ``leandit train``, without a loader."""
    work = workload_of_stores(recipe, store.path)
    learner = synthetic_learner(recipe, work.spec, work.tokens, CPU, store=work.store)
    batch = synthetic_batch(work.store, work.largest_bucket, recipe.run.global_batch, work.tokens, CPU)
    return lambda: train_step(learner, batch).loss.item()


def measure_run(
    study: Study,
    name: str,
    seed: int,
    store: LatentStore,
    network: Network,
    reference: Moments,
    progress: ProgressLine,
) -> Run:
    """Train, or finish, a run; its held-out losses and Fréchet distances by step.

    Raises: KeyboardInterrupt: it was stopped.
    """
    folder, recipe = study.out / "runs" / f"{name}-{seed}", study.recipe(name, seed)

    def show(report: Any) -> None:
        progress(f"train {name}, seed {seed}", report.step, study.steps, f"loss {report.loss:.3f}")

    if not train(recipe, store_path=store.path, run=folder, device=CPU, report=show, stop=StopRequest()).finished:
        raise KeyboardInterrupt

    def distance(step: int) -> float:
        images, _ = sample_captions(folder, store, CPU, step=step, per_bucket=study.samples)
        starts = range(0, len(images), FORWARD_IMAGES)
        drawn = collect((network.features(images[i : i + FORWARD_IMAGES]) for i in starts), len(images))
        return frechet_distance(drawn.mean, drawn.covariance, reference.mean, reference.covariance)

    frechet = {n: kept(folder / f"frechet-{n}.json", partial(distance, n)) for n in study.snapshots}
    reports = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    held_out = {one["step"]: one["held_out"]["averaged_loss"] for one in reports if one.get("held_out")}
    log(f"{name}, seed {seed}: held-out loss {held_out[study.steps]:.3f}")
    return {"seed": seed, "held_out": held_out, "frechet": frechet}


def kept(path: Path, measure: Callable[[], Any]) -> Any:
    """The JSON value of a file, measured and written if the file is missing."""
    if not path.is_file():
        write_atomic(path, json.dumps(measure()).encode())
    return json.loads(path.read_text())


# --------------------------------------------------------------------------------------------------------------- result


def table_rows(runs: Mapping[str, Sequence[Run]], seconds: Mapping[str, float], steps: int) -> list[tuple[str, ...]]:
    """A row for each recipe: means over the seeds, with their ranges."""
    goal = min(mean_curve(runs[PLAIN], "held_out").values())
    rows: list[tuple[str, ...]] = [
        ("", "seconds a step", "held-out loss", "Fréchet distance", "steps to plain's last loss", "seconds to it")
    ]
    for name, found in runs.items():
        reached, relative = first_below(mean_curve(found, "held_out"), goal), seconds[name] / seconds[PLAIN]
        shares = ["not reached"] * 2 if reached is None else [f"{reached * x / steps:.0%}" for x in (1, relative)]
        lasts = ([run[key][max(run[key])] for run in found] for key in ("held_out", "frechet"))
        cells = [f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})" for values in lasts]
        rows.append((name, f"{seconds[name]:.3f} ({relative:.2f}x)", *cells, *shares))
    return rows


def mean_curve(runs: Sequence[Run], key: str) -> dict[int, float]:
    """Mean over the seeds, by step."""
    return {step: mean(run[key][step] for run in runs) for step in runs[0][key]}


def first_below(curve: Mapping[int, float], goal: float) -> float | None:
    """The step at which a curve falls to a value, on a straight line between two points; None: it does not."""
    steps, values = list(curve), list(curve.values())
    number = next((i for i, value in enumerate(values) if value <= goal), None)
    if not number:
        return None if number is None else float(steps[0])
    return float(np.interp(goal, values[number - 1 : number + 1][::-1], steps[number - 1 : number + 1][::-1]))


def draw_chart(runs: Mapping[str, Sequence[Run]], seconds: Mapping[str, float], path: Path) -> None:
    """Held-out loss and Fréchet distance against steps and seconds: mean over the seeds, and their range as a band.

    It begins at the first Fréchet distance: before it all losses fall alike, and would hide what comes later.
    """
    matplotlib.use("agg")
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained", sharex="col")
    for row, (key, label) in zip(axes, (("held_out", "held-out loss"), ("frechet", "Fréchet distance")), strict=True):
        for name, found in runs.items():
            steps = [step for step in found[0][key] if step >= min(found[0]["frechet"])]
            values = np.array([[run[key][step] for step in steps] for run in found])
            for axis, unit in zip(row, (1.0, seconds[name]), strict=True):
                x = np.array(steps) * unit
                (line,) = axis.plot(x, values.mean(0), label=name, marker="o", markersize=3)
                axis.fill_between(x, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
                axis.grid(visible=True, alpha=0.3)
        row[0].set_ylabel(label)
    axes[0, 0].legend()
    axes[1, 0].set_xlabel("steps")
    axes[1, 1].set_xlabel("seconds of training")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
