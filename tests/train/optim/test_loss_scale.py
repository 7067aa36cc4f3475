"""fp16 and its loss scale; and what is not finite: nothing is updated, the run stops and names the records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from making import CPU, train_recipe

from leandit.datasets.batches.batch import Batch
from leandit.datasets.batches.latents import final_latents
from leandit.datasets.store import LatentStore
from leandit.errors import RunError
from leandit.train import loop
from leandit.train.metrics.meter import StepResult
from leandit.train.optim.precision import GROWTH_STEPS, LossScale
from leandit.train.run.state import Run
from leandit.train.weights.checkpoint import EMA, MODEL, find

pytestmark = pytest.mark.usefixtures("tiny_models")

SETTINGS = ["run.steps=12", "schedule.kind=constant", "run.checkpoint_every=4", "run.keep_checkpoints=9"]


def run_to(store: LatentStore, run: Path, *overrides: str) -> list[dict[str, float]]:
    """Train, and give the lines of its metrics."""
    recipe = train_recipe("dit-s-4", *SETTINGS, *overrides)
    runs.run_to(recipe, store, run)
    return runs.lines(run)


def test_the_scale_halves_at_an_overflow_and_doubles_after_many_good_updates() -> None:
    scale, good, bad = LossScale(CPU), torch.zeros(()), torch.ones(())
    first = scale.value()
    scale.update(bad)
    assert scale.value() == first / 2
    for _ in range(GROWTH_STEPS):
        assert scale.value() == first / 2
        scale.update(good)
    assert scale.value() == first


def overflow_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Lift the loss scale before a step so far that the gradients overflow; then no average may move."""
    take = loop.train_step

    def made(state: Run, batch: Batch) -> StepResult:
        if state.step + 1 == step:
            state.engine.loss_scale.scale.fill_(2.0**26)
        before = {name: value.clone() for name, value in state.engine.tensors(EMA)}
        trace = take(state, batch)
        same = all(torch.equal(value, before[name]) for name, value in state.engine.tensors(EMA))
        assert same == bool(trace.skipped)
        return trace

    patch.setattr(loop, "train_step", made)


@pytest.mark.parametrize("optimizer", ["adamw", "came"])
def test_no_average_of_any_length_moves_at_an_update_that_fp16_skips(
    optimizer: str, label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflow_at(3, monkeypatch)
    settings = ["ema.kind=power", "ema.lengths=[0.05, 0.1]", "run.checkpoint_every=9", f"optimizer.name={optimizer}"]
    found = run_to(label_store, tmp_path / "run", "run.precision=fp16", "run.steps=4", *settings)
    assert [line["skipped_steps"] for line in found][:3] == [0, 0, 1]


def test_fp16_skips_an_update_that_overflows_recovers_and_resumes_with_its_scale_bit_for_bit(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        overflow_at(2, patch)
        whole = run_to(label_store, tmp_path / "whole", "run.precision=fp16")
    skipped, scales = ([line[key] for line in whole] for key in ("skipped_steps", "loss_scale"))
    assert (skipped[:2], skipped[-1], scales[1]) == ([0, 1], 0, 2.0**25)
    assert scales[-1] < scales[1]
    assert all(np.isfinite(line["loss"]) for line in whole)
    overflow_at(2, monkeypatch)
    run_to(label_store, tmp_path / "run", "run.precision=fp16", "run.steps=4")
    found = run_to(label_store, tmp_path / "run", "run.precision=fp16")
    kept = ("step", "loss", "grad_norm", "loss_scale", "skipped_steps")
    assert [[line[k] for k in kept] for line in found] == [[line[k] for k in kept] for line in whole]


def test_precision_may_change_and_losses_of_fp16_are_near(label_store: LatentStore, tmp_path: Path) -> None:
    run_to(label_store, tmp_path / "run", "run.precision=fp16", "run.steps=4")
    found = run_to(label_store, tmp_path / "run", "run.precision=fp32", "run.residual=bf16")
    assert [line["loss_scale"] is None for line in found] == [False] * 4 + [True] * 8
    full = run_to(label_store, tmp_path / "full", "run.precision=fp32")
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in full], rel=0.02)


@pytest.fixture
def poison(label_store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """A record whose latent is not a number when it is read; its key."""
    victim = 7

    def poisoned(batch: Batch) -> torch.Tensor:
        latents = final_latents(batch.stored, batch.spec, batch.draw_keys)
        latents[batch.records == victim] = float("nan")
        return latents

    monkeypatch.setattr(Batch, "latents", property(poisoned))
    return label_store.record_at(victim).key


@pytest.mark.parametrize("microbatch", [0, 3])
def test_a_loss_that_is_no_number_stops_before_the_update_and_names_the_record(
    microbatch: int, poison: str, label_store: LatentStore, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(RunError, match=f"the loss of records '{poison}' is not finite") as error:
        run_to(label_store, run, f"run.microbatch={microbatch}", "run.log_every=4")
    assert "leandit inspect STORE KEY" in str(error.value)
    assert not find("checkpoint", run)


@pytest.mark.parametrize("optimizer", ["adamw", "came"])
def test_no_weight_is_spoiled_by_a_gradient_that_is_no_number(
    optimizer: str, label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW skips the update on the device; others make it without the gradient."""
    take, seen = loop.train_step, []

    def made(state: Run, batch: Batch) -> StepResult:
        if state.step == 2:  # the third: an infinite gradient from a finite loss
            next(state.engine.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
        seen.append([t.detach().clone() for _, t in state.engine.tensors(MODEL)])
        trace = take(state, batch)
        seen.append([t.detach().clone() for _, t in state.engine.tensors(MODEL)])
        return trace

    monkeypatch.setattr(loop, "train_step", made)
    with pytest.raises(RunError, match="step 3: the losses are finite, but the gradient is not finite"):
        run_to(label_store, tmp_path / "run", f"optimizer.name={optimizer}")
    assert all(tensor.isfinite().all() for tensor in seen[-1])
    assert all(torch.equal(*both) for both in zip(*seen[-2:], strict=True)) == (optimizer == "adamw")
    assert not find("checkpoint", tmp_path / "run")
