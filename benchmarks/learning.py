"""What alignment (REPA), routing (TREAD) and contrastive flow bring a small DiT, at equal steps and equal seconds.

    python benchmarks/learning.py --out learning

Every recipe trains with every seed on the same store of the demo's images, on a CPU. Compared are the held-out loss
and the Fréchet distance of what the averaged weights draw, measured by a vision model other than REPA's teacher.
Seconds are steps times the seconds of a step, which are measured before, in alternating rounds. The same command
resumes. It writes learning.json and learning.png.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, NamedTuple

import matplotlib
import numpy as np
import torch
import typer
from matplotlib import pyplot as plt
from measuring import alternate, machine, print_table, timed
from scene_vision import train_vision

from leandit.datasets.disk.files import write_atomic
from leandit.datasets.store import LatentStore
from leandit.precompute import config as precompute_config
from leandit.precompute.pipeline import precompute
from leandit.tools.demo.demo import sample_captions
from leandit.tools.demo.scenes import write_image_folder
from leandit.tools.plan.workload import workload_of_stores
from leandit.tools.sample.evaluation.distances import frechet_distance
from leandit.tools.sample.evaluation.images import folder_images
from leandit.tools.sample.evaluation.moments import Moments, Team, collect, moments_of
from leandit.tools.sample.evaluation.networks import Network, open_network
from leandit.tools.synthetic.batches import synthetic_batch, synthetic_run
from leandit.tools.terminal.progress import ProgressLine
from leandit.train import config as train_config
from leandit.train.loop import StopRequest, train
from leandit.train.metrics.history import read_history
from leandit.train.optim.process import set_allocator
from leandit.train.parallel.ranks import ALONE
from leandit.train.step import train_step

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


class Sizes(NamedTuple):
    """How much is drawn and trained.

    Args:
      images: in the store.
      batch, held_out: images of a step, and of a held-out loss.
      samples: of each of the demo's three aspect ratios, for a Fréchet distance.
      rounds: of the timing of a step.
    """

    seeds: int = 3
    steps: int = 800
    images: int = 3000
    batch: int = 32
    held_out: int = 64
    teacher_steps: int = 600
    samples: int = 64
    rounds: int = 20

    def recipe(self, name: str, seed: int) -> train_config.TrainRecipe:
        """The demo's recipe, with a DiT, a constant rate and held-out records."""
        snapshot = max(1, self.steps // NUM_SNAPSHOTS)
        run = {"steps": self.steps, "seed": seed, "global_batch": self.batch, "evaluate_images": self.held_out}
        run |= {"evaluate_every": max(1, self.steps // NUM_EVALUATIONS)}
        run |= {"checkpoint_every": snapshot, "keep_every": snapshot}
        settings = [f"run.{key}={value}" for key, value in run.items()]
        return train_config.load("demo", [*SHARED, *settings, *RECIPES[name]])


TINY = Sizes(seeds=1, steps=2, images=48, batch=2, held_out=8, teacher_steps=2, samples=1, rounds=1)


def main(
    out: Annotated[Path, typer.Option(help="Folder for images, store, runs and results; the same command resumes.")],
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny sizes, to see that everything works.")] = False,
) -> None:
    """Compare what REPA, routing and contrastive flow bring a small DiT."""
    sizes, out = TINY if tiny else Sizes(), out.resolve()
    set_allocator(torch.device("cpu"))
    with ProgressLine() as progress:
        store = make_store(sizes, out, progress)
        network = open_network(str(out / "measuring"), None, CPU)
        pictures = folder_images(out / "pictures")
        reference = moments_of(pictures, network, Team(ALONE, progress), "reference")
        assert reference is not None, "the only rank"
        seconds = kept(out / "seconds.json", partial(seconds_per_step, sizes, store))
        runs: dict[str, list[Run]] = {name: [] for name in RECIPES}
        for seed in range(sizes.seeds):
            for name in RECIPES:
                folder = out / "runs" / f"{name}-{seed}"
                runs[name].append(measure_run(sizes, folder, name, seed, store, network, reference, progress))
    result = {"machine": machine(), "sizes": sizes._asdict(), "seconds_per_step": seconds, "runs": runs}
    write_atomic(out / "learning.json", json.dumps(result, indent=1).encode())
    draw_chart(runs, seconds, out / "learning.png")
    print(f"{machine()}; {sizes.steps} steps, {sizes.seeds} seeds: mean (range)\n")
    print_table(table_rows(runs, seconds, sizes.steps))


def make_store(sizes: Sizes, out: Path, progress: ProgressLine) -> LatentStore:
    """The demo's images with a teacher's patches; and the model that measures samples, of another seed."""
    write_image_folder(out / "pictures", sizes.images, progress)
    for seed, name in enumerate(("teacher", "measuring")):
        if not (out / name / "preprocessor_config.json").is_file():
            how = {"steps": sizes.teacher_steps, "num_images": sizes.images}
            train_vision(out / name, seed=seed, progress=partial(progress, name), **how)
    recipe = precompute_config.load("demo", [f"features.{FEATURE}.model={out / 'teacher'}"])
    where: dict[str, Any] = {"source_path": out / "pictures", "store_path": out / "store"}
    precompute(recipe, device=CPU, progress=progress, **where)
    return LatentStore(out / "store")


def seconds_per_step(sizes: Sizes, store: LatentStore) -> dict[str, float]:
    """Median seconds of a step of each recipe, on one batch of noise."""
    cells: dict[str, Callable[[], float]] = {}
    for name in RECIPES:
        recipe = sizes.recipe(name, 0)
        work = workload_of_stores(recipe, store.path)
        learner = synthetic_run(recipe, work.spec, work.tokens, CPU, store=work.store)
        batch = synthetic_batch(work.store, work.largest_bucket, recipe.run.global_batch, work.tokens, CPU)
        step = partial(train_step, learner, batch)
        timed(step, WARM_STEPS, CPU)
        cells[name] = lambda step=step: timed(step, STEPS, CPU) / STEPS
    return {name: median(values) for name, values in alternate(cells, sizes.rounds).items()}


def measure_run(
    sizes: Sizes,
    folder: Path,
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
    recipe = sizes.recipe(name, seed)

    def show(report: Any) -> None:
        progress(f"train {name}, seed {seed}", report.step, sizes.steps, f"loss {report.loss:.3f}")

    if not train(recipe, store_path=store.path, run=folder, device=CPU, report=show, stop=StopRequest()).finished:
        raise KeyboardInterrupt

    def distance(step: int) -> float:
        images, _ = sample_captions(folder, store, CPU, step=step, per_bucket=sizes.samples)
        starts = range(0, len(images), FORWARD_IMAGES)
        drawn = collect((network.features(images[i : i + FORWARD_IMAGES]) for i in starts), len(images))
        return frechet_distance(drawn.mean, drawn.covariance, reference.mean, reference.covariance)

    every = recipe.run.checkpoint_every
    snapshots = range(every, sizes.steps + 1, every)
    frechet = {step: kept(folder / f"frechet-{step}.json", partial(distance, step)) for step in snapshots}
    metrics = read_history(folder)
    losses = metrics.columns["held_out.averaged_loss"][metrics.is_evaluated].tolist()
    held_out = dict(zip(metrics.steps[metrics.is_evaluated].tolist(), losses, strict=True))
    return {"seed": seed, "held_out": held_out, "frechet": frechet}


def kept(path: Path, measure: Callable[[], Any]) -> Any:
    """The JSON value of a file, measured and written if the file is missing."""
    if not path.is_file():
        write_atomic(path, json.dumps(measure()).encode())
    return json.loads(path.read_text())


# --------------------------------------------------------------------------------------------------------------- result


def table_rows(runs: Mapping[str, Sequence[Run]], seconds: Mapping[str, float], steps: int) -> list[tuple[str, ...]]:
    """A row for each recipe: means over the seeds, with their ranges."""
    curves = {
        name: {n: mean(run["held_out"][n] for run in found) for n in found[0]["held_out"]}
        for name, found in runs.items()
    }
    goal = min(curves[PLAIN].values())
    rows: list[tuple[str, ...]] = [
        ("", "seconds a step", "held-out loss", "Fréchet distance", "steps to plain's last loss", "seconds to it")
    ]
    for name, found in runs.items():
        reached, relative = first_below(curves[name], goal), seconds[name] / seconds[PLAIN]
        shares = ["not reached"] * 2 if reached is None else [f"{reached * x / steps:.0%}" for x in (1, relative)]
        lasts = ([run[key][max(run[key])] for run in found] for key in ("held_out", "frechet"))
        cells = [f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})" for values in lasts]
        rows.append((name, f"{seconds[name]:.3f} ({relative:.2f}x)", *cells, *shares))
    return rows


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
        row[0].set_ylabel(label)
    axes[0, 0].legend()
    axes[1, 0].set_xlabel("steps")
    axes[1, 1].set_xlabel("seconds of training")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
