"""Runs that evaluate held-out records and draw images while they train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from making import CPU

from leandit.datasets.store import LatentStore
from leandit.train.config import TrainRecipe
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
