"""Averages against other implementations and their definitions; lengths chosen after training."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from faults import flip
from making import CPU, train_recipe
from runs import run_to
from torch import Tensor, nn

from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, RecipeError, RunError
from leandit.train.optim.ema import Ema, Exponential, Power
from leandit.train.optim.posthoc_ema import Profile, combine, solve
from leandit.train.sampling.snapshot import load_snapshot
from leandit.train.weights import checkpoint

pytestmark = pytest.mark.usefixtures("tiny_models")
STEPS, EVERY = 400, 20


class Walk(nn.Module):
    """Weights that wander: a random walk with drift, the same each time."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(30))
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def advance(self) -> None:
        for parameter in self.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=self._generator) + 0.02


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run with stored averages of two lengths, and averages of other lengths that were followed beside them."""
    run, model = tmp_path_factory.mktemp("walk"), Walk()
    followed = {length: Ema(dict(model.named_parameters()), [Power(length)]) for length in (0.05, 0.07, 0.10, 0.15)}
    stored = Ema(dict(model.named_parameters()), [Power(0.05), Power(0.10)])
    history = []
    for step in range(1, STEPS + 1):
        model.advance()
        history.append(model.w.detach().clone())
        for ema in (stored, *followed.values()):
            ema.update(step)
        if step % EVERY == 0:
            extra = {"lengths": [0.05, 0.10], "spec": {"some": "model"}}
            groups = {"ema": stored.state_dict(), "model": {"table": torch.ones(3)}}
            checkpoint.save(checkpoint.AVERAGE, run, step, groups, extra)
    return SimpleNamespace(run=run, followed=followed, history=torch.stack(history))


def relative(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


def test_exponential_averages_are_those_of_torch_and_of_diffusers() -> None:
    from diffusers.training_utils import EMAModel
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = Walk().bfloat16()
    parameters = dict(model.named_parameters())
    ours, warmed = (Ema(parameters, [Exponential(decay, warmup=decay < 0.9)]) for decay in (0.9, 0.8))
    reference = Walk()  # averages are float32, whatever the model
    torchs = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs = [EMAModel(reference.parameters(), decay=0.9, min_decay=0.9), EMAModel(reference.parameters(), decay=0.8)]
    for step in range(50):  # a warm-up to 0.8 ends at 35
        if step:  # theirs begin with the first update, where ours begins with the model
            model.advance()
            ours.update(step)
            warmed.update(step)
        with torch.no_grad():
            for parameter, copy in zip(model.parameters(), reference.parameters(), strict=True):
                copy.copy_(parameter)
        torchs.update_parameters(reference)
        for average in theirs:
            average.step(reference.parameters())
    for name, value in ours.state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, torchs.module.get_parameter(name))  # type: ignore
    for average, other in zip((ours, warmed), theirs, strict=True):
        for value, shadow in zip(average.weights.values(), other.shadow_params, strict=True):
            torch.testing.assert_close(value, shadow)
    assert relative(ours.weights["w"], model.w) > 0.01


@hypothesis.given(st.floats(0.005, 0.27))
def test_the_exponent_gives_the_length(length: float) -> None:
    g = Power(length).exponent
    assert g > 0
    assert math.sqrt((g + 1) / ((g + 2) ** 2 * (g + 3))) == pytest.approx(length, rel=1e-6)
    assert Power(0.05).exponent == pytest.approx(16.97, abs=0.01)  # Karras et al. 2024, section 3.1


@pytest.mark.parametrize("length", [0.05, 0.15])
def test_an_average_weighs_each_step_by_its_profile(length: float, walked: SimpleNamespace) -> None:
    g = Power(length).exponent
    t = np.arange(STEPS + 1) / STEPS
    mass = np.diff(t ** (g + 1))  # the profile's integral over each step
    wanted = torch.einsum("t,tij->ij", torch.from_numpy(mass), walked.history.double())
    assert relative(walked.followed[length].weights["w"], wanted) < 1e-6


@pytest.mark.parametrize(("length", "bound"), [(0.05, 1e-6), (0.10, 1e-6), (0.07, 1e-2), (0.15, 1e-2)])
def test_any_length_is_found_later(length: float, bound: float, walked: SimpleNamespace, tmp_path: Path) -> None:
    made = combine(walked.run, length, tmp_path)
    wanted = walked.followed[length].weights
    saved = checkpoint.read(made.path)
    tensors = saved.tensors("model", {**wanted, "table": torch.ones(3)})
    for name, value in wanted.items():
        assert relative(tensors[name], value) < bound
    assert saved.state["spec"] == {"some": "model"}
    assert saved.state["average"] == {"length": length, "error": made.error}
    assert made.error < 0.05


def test_the_reported_error_is_that_of_the_weights_that_are_used() -> None:
    stored, wanted = [Profile(5, 0.05), Profile(5, 0.10)], Profile(5, 0.2)
    weights, error = solve(stored, wanted)
    t = (np.arange(200_000) + 0.5) / 200_000 * 5
    profiles = [(g + 1) * t**g / 5 ** (g + 1) for g in (Power(p.length).exponent for p in [*stored, wanted])]
    difference = weights[0] * profiles[0] + weights[1] * profiles[1] - profiles[2]
    assert error == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(profiles[2]), rel=1e-3)


def test_an_average_at_an_earlier_step_and_what_cannot_be_combined(walked: SimpleNamespace, tmp_path: Path) -> None:
    made = combine(walked.run, 0.10, tmp_path / "out", step=200)
    assert (made.path.name, made.used) == ("snapshot-200", 1)
    for run, how, words in (
        (tmp_path, {}, "stored no averages"),
        (walked.run, {"step": 7}, "no averages of step 7; there are 20, 40"),
        (walked.run, {"step": 200}, "already exists"),
    ):
        with pytest.raises(RunError, match=words):
            combine(run, 0.1, tmp_path / "out", **how)
    damaged = shutil.copytree(walked.run, tmp_path / "damaged")
    flip(damaged / "average-400/ema.safetensors", 8 * 2000)
    with pytest.raises(DamageError, match=r"average-400'.*ema\.safetensors"):
        combine(damaged, 0.07, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("lengths", [[], [0.1, 0.1], [0.3], [0.0]])
def test_lengths_that_make_no_sense_are_refused(lengths: list[float]) -> None:
    with pytest.raises(RecipeError, match="ema"):
        train_recipe("dit-s-4", "ema.kind=power", f"ema.lengths={lengths}")


def test_a_run_resumes_its_averages_and_gives_one_of_any_length(caption_store: LatentStore, tmp_path: Path) -> None:
    def go(run: str, steps: int) -> Path:
        overrides = ["run.checkpoint_every=2", "ema.kind=power", "ema.keep_every=1", "schedule.kind=constant"]
        run_to(train_recipe("pixart-tiny", f"run.steps={steps}", *overrides), caption_store, tmp_path / run)
        return tmp_path / run

    whole, parts = go("whole", 4), [go("parts", steps) for steps in (2, 4)][-1]
    stored = [path.name for path in checkpoint.find(checkpoint.AVERAGE, whole)]
    assert stored == ["average-1", "average-2", "average-3", "average-4"]
    for file in ("checkpoint-4/ema", "snapshot-4/model", "average-4/ema"):
        assert (whole / f"{file}.safetensors").read_bytes() == (parts / f"{file}.safetensors").read_bytes()
    combine(whole, 0.08, tmp_path / "out")
    combined, first = load_snapshot(tmp_path / "out", CPU), load_snapshot(whole, CPU)
    for one, other in zip(combined.model.parameters(), first.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=0.05)
    assert (combined.spec, combined.step) == (first.spec, 4)
    assert torch.equal(combined.conditioner.null_caption, first.conditioner.null_caption)  # type: ignore
