"""A run that is stopped on a GPU goes on with the same bits, if its kernels add in the same order each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from making import train_recipe
from noise_store import make_store
from safetensors.torch import load_file

from leandit.train.loop import StopRequest, train
from leandit.train.metrics.history import StepReport

STEPS, STOP = 6, 3


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.usefixtures("tiny_models", "deterministic")
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    precision: str, gpu: torch.device, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    make_store(store, {"64x64": 40, "48x80": 30}, token_counts=[3, 40, 17], text_width=64, num_classes=0)
    settings = f"run.steps={STEPS}", f"run.precision={precision}", "run.compile=false", "run.microbatch=3"
    for name, stops in (("whole", ()), ("parts", (STOP,))):
        for stop_after in (*stops, STEPS):
            stop = StopRequest()

            def report(figures: StepReport, stop: StopRequest = stop, last: int = stop_after) -> None:
                if figures.step == last:
                    stop.set()

            recipe = train_recipe("dit-s-2-text", *settings)
            train(recipe, store_path=store, run=tmp_path / name, device=gpu, report=report, stop=stop)
    whole, parts = (weights_of(tmp_path / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint and snapshot of a run."""
    files = sorted(run.rglob("*.safetensors"))
    last = [path for path in files if f"{STEPS}" in path.relative_to(run).as_posix()]
    assert last, files
    return {f"{path.relative_to(run)} {name}": value for path in last for name, value in load_file(path).items()}
