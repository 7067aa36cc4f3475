"""Folders of runs: of a training of a few steps, or written by hand with any figures, in a millisecond."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from making import CPU, train_recipe
from PIL import Image

from leandit.datasets.store import LatentStore
from leandit.train.config import TrainRecipe, load
from leandit.train.loop import StopRequest, train
from leandit.train.metrics.history import StepReport
from leandit.train.weights.checkpoint import Saved, read

HOLDOUT, EVERY = "data.holdout=0.4", "run.evaluate_every=2"


def run_to(
    recipe: TrainRecipe, store: LatentStore | None, run: Path, stop_at: int = 0, said: list[str] | None = None
) -> list[StepReport]:
    stop, seen = StopRequest(), list[StepReport]()

    def report(figures: StepReport) -> None:
        seen.append(figures)
        if figures.step == stop_at:
            stop.set()

    warn = [].append if said is None else said.append
    path = None if store is None else store.path
    train(recipe, store_path=path, run=run, device=CPU, report=report, stop=stop, warn=warn)
    return seen


ADAPTED = ("pixart-tiny", "sana-tiny", "sd3-tiny")  # models that take adapters
MOVED = ["run.steps=2", "optimizer.lr=3e-2", "run.ema_decay=0.0"]  # a rate that moves all weights
MOVED += ["schedule.kind=constant", "schedule.warmup_steps=0"]


def runs_of_whole_models(golden: Any, store_of: Mapping[str, LatentStore]) -> dict[str, Path]:
    """A run of all weights of each model that takes adapters, and "other", of another seed; do not change them."""

    def make(root: Path) -> None:
        for name in ADAPTED:
            run_to(train_recipe(name, *MOVED), store_of[name], root / name)
        run_to(train_recipe(ADAPTED[0], *MOVED, "run.seed=1"), store_of[ADAPTED[0]], root / "other")

    root = golden("whole-models", make)
    return {name: root / name for name in (*ADAPTED, "other")}


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses_held_out(run: Path) -> dict[int, list[Any]]:
    """All that is computed, without times, by step."""
    found = [(line["step"], line["held_out"]) for line in lines(run) if line["held_out"]]
    return {step: [each for name, each in values.items() if "loss" in name] for step, values in found}


def read_all(path: Path) -> Saved:
    """A checkpoint of which every byte was checked."""
    saved = read(path)
    for name in saved.files:
        saved.read(name.removesuffix(".safetensors"))
    return saved


def bits(run: Path, step: int) -> dict[str, bytes]:
    folders = [run / f"{kind}-{step}" for kind in ("checkpoint", "snapshot")]
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for each in folders for path in each.glob("*.s*")}


def assert_same_training(one: Path, other: Path, step: int) -> None:
    assert len(bits(one, step)) > 3
    assert bits(one, step) == bits(other, step)
    assert [line["loss"] for line in lines(one)] == [line["loss"] for line in lines(other)]


LINES, LOG_EVERY = 40, 10
Change = Callable[[int, dict[str, Any]], Any]


def report_line(number: int, num_lines: int = LINES) -> dict[str, Any]:
    """A healthy line, of which there are ``num_lines``; the first is of number 1."""
    share, step = number / num_lines, number * LOG_EVERY
    loss = 2.0 - share
    held_out = {"loss": loss + 0.1, "averaged_loss": loss + 0.05, "num_images": 8, "seconds": 1.0, "share": 0.005}
    held_out |= {"loss_by_time": [loss] * 8, "averaged_loss_by_time": [loss - 0.1] * 8}
    line = {"step": step, "num_images": step * 8, "epoch": 0, "loss": loss, "grad_norm": 0.5, "learning_rate": 1e-4}
    line |= {"seconds_per_step": 0.5, "images_per_second": 16.0, "tokens_per_second": 256.0, "mfu": 0.4}
    line |= {"data_wait_share": 0.001, "gpu_busy_share": 0.99, "memory_gib": 3.0, "skipped_steps": 0}
    line |= {"loss_scale": None, "loss_by_time": [loss] * 10, "loss_terms": {}}
    return line | {"held_out": held_out if number % 4 == 0 else None}


SPEC = {"name": "DiT-S/2", "channels": 4, "out_channels": 8, "num_classes": 10, "caption_width": 0, "base_size": 32}


def make_run(
    run: Path,
    *overrides: str,
    recipe: str = "dit-s-2-256",
    lines: int = LINES,
    change: Change = lambda number, line: None,
    starts: list[Mapping[str, Any]] | None = None,
    tail: str = "",
) -> Path:
    """Write a finished run; ``change`` is called with the number of each line, from 1, and the line."""
    (run / "samples").mkdir(parents=True)
    steps = f"run.steps={lines * LOG_EVERY}"
    values = load(recipe, [steps, "data.holdout=0.1", *overrides]).model_dump()
    stores = [{"path": "../store", "revision": 1, "root_hash": "f" * 64}]
    (run / "run.json").write_text(json.dumps({"recipe": values, "stores": stores, "spec": SPEC}))
    (run / "recipe.toml").write_text("[run]\n")
    written = []
    for number in range(1, lines + 1):
        change(number, line := report_line(number, lines))
        written.append(json.dumps(line) + "\n")
    (run / "metrics.jsonl").write_text("".join(written) + tail)
    start = {"time": "2026-01-02T03:04:05+00:00", "from_step": 0, "reached_step": 0, "recipe": recipe}
    start |= {"machine": "node-1", "device": "NVIDIA H100", "world_size": 8, "num_machines": 1, "strategy": "ddp"}
    start |= {"precision": "bf16", "versions": {"leandit": "0.1.0", "torch": "2.10.0"}}
    told = [start | dict(one) for one in ([{}] if starts is None else starts)]
    (run / "starts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))
    return run


def make_grid(run: Path, step: int, *, side_px: int = 40) -> None:
    """A decoded grid, of one colour for each step."""
    pixels = np.full((side_px, side_px, 3), step % 256, np.uint8)
    Image.fromarray(pixels).save(run / f"samples/step-{step}.png")
