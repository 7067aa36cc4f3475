"""Memory of a GPU: what the planner says of it, and what a run does that is short of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from making import caption_recipe, train_recipe
from noise_store import make_store
from planner import CHECKPOINTED, Case, measured_apart, planner_job, predicted_peak

from leandit.datasets.store import LatentStore
from leandit.tools.plan.dry_run import describe_precompute
from leandit.train.run.state import Run
from leandit.train.step import fit_microbatch, train_step

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


def test_a_step_that_runs_out_of_memory_is_tried_with_fewer_images(gpu: torch.device, tmp_path: Path) -> None:
    make_store(tmp_path / "store", {BUCKET: 16}, num_classes=5)
    recipe = train_recipe("dit-s-4", "model.name=DiT-S/2", "run.precision=bf16", "run.global_batch=16")
    state = Run.open(recipe, [LatentStore(tmp_path / "store")], gpu, print)
    share = 3 * 2**30 / torch.cuda.get_device_properties(gpu).total_memory  # the step of 16 images takes 4.1 GiB
    torch.cuda.set_per_process_memory_fraction(share, gpu)
    try:
        batch = next(iter(state.loader))
        for _ in range(3):
            fit_microbatch(state, batch)
            result = train_step(state, batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    assert 1 <= state.microbatches[BUCKET] < 16
    assert result.loss.isfinite()
    assert not result.skipped


def test_a_dry_run_of_precompute_tells_the_memory_of_the_gpu(caption_folder: Path, gpu: torch.device) -> None:
    assert "iB of the GPU" in describe_precompute(caption_recipe(), caption_folder, gpu).text
