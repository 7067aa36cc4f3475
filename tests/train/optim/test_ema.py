"""Averages against other implementations and their definitions; lengths chosen after training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from making import CPU, train_recipe
from runs import run_to
from torch import Tensor, nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from leandit.datasets.errors import DamageError, RecipeError, RunError
from leandit.datasets.store import LatentStore
from leandit.train.models.dit import SIZES
from leandit.train.optim.ema import Ema, Exponential, Power, first_share
from leandit.train.optim.posthoc_ema import Profile, combine, solve
from leandit.train.optim.state import whole
from leandit.train.sampling.snapshot import load_snapshot
from leandit.train.weights import checkpoint

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


@pytest.mark.parametrize(
    ("rule", "steps"), [(Exponential(0.9), 5), (Exponential(0.9, warmup=True), 2), (Power(0.1), 3)]
)
def test_the_share_of_the_first_weights_is_what_is_left_of_them(rule: Any, steps: int) -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    ema = Ema(dict(model.named_parameters()), [rule])
    nn.init.zeros_(model.weight)
    for step in range(1, steps + 1):
        ema.update(step)
    assert ema.weights["weight"].mean().item() == pytest.approx(first_share(rule, steps))


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


@pytest.mark.parametrize("rules", [[Exponential(0.3)], [Power(0.05), Power(0.1)]])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_skipped_update_moves_no_average(rules: list[Any], sharded: bool, one_rank: DeviceMesh) -> None:
    model = Walk()
    if sharded:  # as FSDP shards parameters
        for name, parameter in list(model.named_parameters()):
            setattr(model, name, nn.Parameter(distribute_tensor(parameter.detach(), one_rank, [Shard(0)])))
    ema = Ema(dict(model.named_parameters()), rules)
    before = {name: whole(value).clone() for name, value in ema.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    ema.update(2, torch.ones(()))
    assert all(torch.equal(whole(value), before[name]) for name, value in ema.state_dict().items())
    ema.update(2, torch.zeros(()))
    for name, value in ema.state_dict().items():
        rule = next(rule for rule in rules if name.startswith(rule.prefix))
        torch.testing.assert_close(whole(value), before[name] + 1 - rule.kept(2))


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("length", "bound"), [(0.05, 1e-6), (0.10, 1e-6), (0.07, 1e-2), (0.15, 1e-2)])
def test_any_length_is_found_after_training(
    length: float, bound: float, walked: SimpleNamespace, tmp_path: Path
) -> None:
    made = combine(walked.run, length, tmp_path)
    wanted = walked.followed[length].weights
    saved = checkpoint.read(made.path)
    tensors = saved.tensors("model", {**wanted, "table": torch.ones(3)})
    for name, value in wanted.items():
        assert relative(tensors[name], value) < bound
    assert saved.state["spec"] == {"some": "model"}
    assert saved.state["average"] == {"length": length, "error": made.error}
    assert made.error < 0.05
    one_of_the_stored = walked.followed[0.05].weights["w"]
    if length not in (0.05, 0.10):
        assert relative(one_of_the_stored, wanted["w"]) > 2 * relative(tensors["w"], wanted["w"])


@pytest.mark.parametrize(("steps", "length"), [((5,), 0.03), ((5, 10, 15, 20), 0.2)])
def test_any_average_of_weights_that_never_change_is_these_weights(
    steps: tuple[int, ...], length: float, tmp_path: Path
) -> None:
    weights = {"w": torch.randn(3, 4)}
    groups = {
        "ema": {f"{each:g}/{name}": w.clone() for each in (0.05, 0.10) for name, w in weights.items()},
        "model": {},
    }
    for step in steps:
        checkpoint.save(checkpoint.AVERAGE, tmp_path / "run", step, groups, {"lengths": [0.05, 0.10]})
    made = combine(tmp_path / "run", length, tmp_path / "out")
    torch.testing.assert_close(checkpoint.read(made.path).tensors("model", weights), weights)


def test_the_reported_error_is_that_of_the_weights_that_are_used() -> None:
    stored, wanted = [Profile(5, 0.05), Profile(5, 0.10)], Profile(5, 0.2)
    weights, error = solve(stored, wanted)
    t = (np.arange(200_000) + 0.5) / 200_000 * 5
    profiles = [(g + 1) * t**g / 5 ** (g + 1) for g in (Power(p.length).exponent for p in [*stored, wanted])]
    difference = weights[0] * profiles[0] + weights[1] * profiles[1] - profiles[2]
    assert error == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(profiles[2]), rel=1e-3)


def test_an_earlier_step_uses_nothing_of_later_ones(walked: SimpleNamespace, tmp_path: Path) -> None:
    made = combine(walked.run, 0.10, tmp_path, step=200)
    assert (made.path.name, made.used) == ("snapshot-200", 1)
    again = combine(walked.run, 0.08, tmp_path / "more", step=200)
    assert again.used <= 2 * 200 // EVERY


def test_what_cannot_be_combined_is_refused(walked: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="stored no averages"):
        combine(tmp_path, 0.1, tmp_path / "out")
    with pytest.raises(RunError, match="no averages of step 7; there are 20, 40"):
        combine(walked.run, 0.1, tmp_path / "out", step=7)
    combine(walked.run, 0.1, tmp_path / "out")
    with pytest.raises(RunError, match="already exists"):
        combine(walked.run, 0.1, tmp_path / "out")


def test_a_damaged_average_is_refused(walked: SimpleNamespace, tmp_path: Path) -> None:
    ema = walked.run / "average-400/ema.safetensors"
    before = ema.read_bytes()
    ema.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(DamageError, match="average 'ema"[:7]):
        combine(walked.run, 0.07, tmp_path / "out")
    ema.write_bytes(before)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lengths", [[], [0.1, 0.1], [0.3], [0.0]])
def test_lengths_that_make_no_sense_are_refused(lengths: list[float]) -> None:
    with pytest.raises(RecipeError, match="ema"):
        train_recipe("dit-s-4", "ema.kind=power", f"ema.lengths={lengths}")


def go(recipe_name: str, store: LatentStore, run: Path, steps: int) -> None:
    overrides = ["run.checkpoint_every=2", "ema.kind=power", "ema.keep_every=1", "schedule.kind=constant"]
    run_to(train_recipe(recipe_name, f"run.steps={steps}", *overrides), store, run)


def test_a_run_stores_averages_resumes_them_to_the_bit_and_gives_a_snapshot_of_any_length(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "S", (2, 64, 2))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    go("dit-s-4", label_store, whole, 4)
    go("dit-s-4", label_store, parts, 2)
    go("dit-s-4", label_store, parts, 4)
    stored = [path.name for path in checkpoint.find(checkpoint.AVERAGE, whole)]
    assert stored == ["average-1", "average-2", "average-3", "average-4"]
    for file in ("checkpoint-4/ema", "snapshot-4/model", "average-4/ema"):
        assert (whole / f"{file}.safetensors").read_bytes() == (parts / f"{file}.safetensors").read_bytes()
    combine(whole, 0.08, tmp_path / "out")
    combined, first = load_snapshot(tmp_path / "out", CPU), load_snapshot(whole, CPU)
    for one, other in zip(combined.model.parameters(), first.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=0.05)
    assert (combined.spec, combined.step) == (first.spec, 4)


def test_a_snapshot_of_another_length_has_the_null_caption(caption_store: LatentStore, tmp_path: Path) -> None:
    go("pixart-tiny", caption_store, tmp_path / "run", 1)
    combine(tmp_path / "run", 0.05, tmp_path / "out")
    combined, first = load_snapshot(tmp_path / "out", CPU), load_snapshot(tmp_path / "run", CPU)
    for one, other in zip(combined.model.state_dict().values(), first.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(combined.conditioner.null_caption, first.conditioner.null_caption)  # type: ignore
