"""Memory of a GPU: what the planner says of it, and what a run does that is short of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from making import caption_recipe, train_recipe
from planner import CHECKPOINTED, Case, measured_apart, planner_job, predicted_peak

from leandit.datasets.store import LatentStore
from leandit.tools.plan.dry_run import describe_precompute
from leandit.tools.synthetic.store import make_store
from leandit.train.run import autotune
from leandit.train.run.autotune import TRIED
from leandit.train.run.state import TrainState, prepare
from leandit.train.step.train_step import train_step

BUCKET = "512x512"


@pytest.mark.parametrize(
    "case",
    [
        Case("dit-s-2-256", 256, 64),
        Case("dit-s-2-256", 256, 32, 2, (CHECKPOINTED,)),
        Case("dit-b-2-256", 256, 32),
        Case("dit-s-2-256", 256, 32, 1, ("conditioning.kind=caption",)),
    ],
    ids=str,
)
def test_the_planner_is_within_five_per_cent(case: Case, gpu: torch.device, tmp_path: Path) -> None:
    job = planner_job(case, gpu, tmp_path, "run.compile=false")
    predicted, measured = predicted_peak(job), measured_apart(job)
    assert predicted == pytest.approx(measured, rel=0.05), predicted / measured


@pytest.fixture
def state(gpu: torch.device, tmp_path: Path) -> TrainState:
    """A DiT-S of 512 px, whose images take hundreds of MiB each."""
    make_store(tmp_path / "store", {BUCKET: 16}, num_classes=5)
    recipe = train_recipe("dit-s-4", "model.name=DiT-S/2", "run.precision=bf16")
    return prepare(recipe, [LatentStore(tmp_path / "store")], gpu, print)


@pytest.fixture
def short_of_memory(state: TrainState) -> Iterator[None]:
    """Room for two images, not for the four that are tried first."""
    device = state.device
    peaks = [autotune._peak(state, BUCKET, images) for images in TRIED[0]]
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((0.3 * peaks[0] + 0.7 * peaks[1]) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.usefixtures("short_of_memory")
def test_a_trial_that_runs_out_of_memory_is_made_again_with_fewer_images(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, peak = [], autotune._peak

    def look(of: TrainState, bucket: str, images: int) -> float:
        tried.append(images)
        return peak(of, bucket, images)

    monkeypatch.setattr(autotune, "_peak", look)
    assert autotune._most_images(state, BUCKET) >= 1
    assert tried == [*TRIED[0], *TRIED[1]]
    state.microbatches = {BUCKET: 1}
    result = train_step(state, next(iter(state.loader)))  # the trial that failed left nothing behind
    assert result.loss.isfinite()
    assert not result.skipped


def test_a_dry_run_of_precompute_tells_the_memory_of_the_gpu(caption_folder: Path, gpu: torch.device) -> None:
    assert "iB of the GPU" in describe_precompute(caption_recipe(), caption_folder, gpu).text
