"""Every optimizer against its published rule or another implementation, and its state saved and taken up again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from forked import ForkedPython
from making import SUPPORT, train_recipe
from runs import bits, run_to
from torch import Tensor, nn

from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError
from leandit.train.config import OptimizerSection
from leandit.train.models.dit import SIZES
from leandit.train.models.roles import RolePatterns
from leandit.train.optim import came
from leandit.train.optim.build import build_optimizer, parameter_groups, set_learning_rate
from leandit.train.optim.came import Came
from leandit.train.optim.muon import MuonWithAdamW
from leandit.train.optim.state import optimizer_state

NAMES = ["adamw", "adamw8bit", "came", "muon"]


class Tiny(nn.Module):
    """A model with all that the optimizers tell apart; the large matrix has 8-bit moments."""

    roles: ClassVar[RolePatterns] = {
        "hidden": ("blocks.*.fc", "blocks.*.proj"),
        "modulation": ("blocks.*.adaLN_modulation.1",),
        "embedding": ("conv",),
        "head": ("deep",),
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 16)
        self.blocks = nn.ModuleList(nn.ModuleDict(self._layers()) for _ in range(2))
        self.conv = nn.Conv2d(16, 8, 1)
        self.deep = nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.table = nn.Parameter(torch.randn(6, 16))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def _layers(self) -> dict[str, nn.Module]:
        layers = {"fc": nn.Linear(16, 256), "proj": nn.Linear(256, 16, bias=False), "norm": nn.LayerNorm(16)}
        return {**layers, "adaLN_modulation": nn.Sequential(nn.SiLU(), nn.Linear(16, 16))}

    def forward(self, index: Tensor) -> Tensor:
        x = self.embedding(index) + self.table[0]
        for block in self.blocks:
            x = x + block["proj"](block["fc"](block["norm"](x)).relu()) * block["adaLN_modulation"](x + self.table[1])
        return self.deep(self.conv(x.T[None, :, :, None]))


def section(name: str, **keys: object) -> OptimizerSection:
    return OptimizerSection.model_validate({"name": name, "lr": 1e-2, "weight_decay": 0.1, **keys})


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    """Steps whose targets and rates depend on their number alone."""
    for step in range(first, first + count):
        target = torch.randn(5, 16, generator=torch.Generator().manual_seed(step))
        (model(torch.arange(5)).squeeze() * target[None, :, :8].mT.squeeze()).square().mean().backward()
        set_learning_rate(optimizer, 1e-2 / (step + 1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_a_fresh_optimizer_has_the_names_and_shapes_of_a_used_one_and_no_update(name: str) -> None:
    fresh, used = Tiny(), Tiny()
    optimizers = [build_optimizer(section(name, decay_all=False), model) for model in (fresh, used)]
    steps(used, optimizers[1], 0, 1)
    states = [optimizer_state(model, optimizer) for model, optimizer in zip((fresh, used), optimizers, strict=True)]
    shapes = [{key: (t.shape, t.dtype) for key, t in state.items()} for state in states]
    assert shapes[0] == shapes[1]
    assert not any(key.startswith("frozen") for key in states[0])
    assert not any(tensor.any() for key, tensor in states[0].items() if not key.endswith(".codes"))
    assert all(torch.equal(p, fresh.get_parameter(n)) for n, p in Tiny().named_parameters())


def test_eight_bit_adamw_follows_adamw_with_moments_of_eight_bits() -> None:
    models = [Tiny(), Tiny()]
    optimizers = [build_optimizer(section(name), model) for name, model in zip(NAMES[:2], models, strict=True)]
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, 0, 5)
    began = Tiny().blocks[0]["fc"].weight
    one, other = (model.blocks[0]["fc"].weight - began for model in models)
    assert (one - other).norm() < 0.1 * one.norm()
    torch.testing.assert_close(models[0].deep.weight, models[1].deep.weight, rtol=2e-2, atol=1e-3)
    state = optimizers[1].state[models[1].blocks[0]["fc"].weight]
    assert state["exp_avg"].codes.dtype == state["exp_avg_sq"].codes.dtype == torch.uint8
    assert optimizers[1].param_groups[0]["lr"].item() == pytest.approx(2e-3)


def test_eight_bit_moments_become_numbers_and_back_within_their_rounding() -> None:
    from leandit.train.optim.adamw8bit import fit_moments

    values = 1e-3 * torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    values.view(-1)[:256] = 0
    held = {"w.exp_avg": values, "w.exp_avg_sq": values.square()}
    names = [f"{key}{suffix}" for key in held for suffix in (".codes", ".scale")]
    numbers = dict(held)
    for bound in (0.02, 0.01):
        before = dict(numbers)
        fit_moments(numbers, names)
        assert sorted(numbers) == sorted(names)
        fit_moments(numbers, list(held))
        for key, value in held.items():
            assert (numbers[key] - before[key]).abs().max() <= bound * value.abs().max()


def test_a_missing_package_is_named_with_what_to_do_and_came_needs_three_betas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.optim", raising=False)
    monkeypatch.delitem(sys.modules, "leandit.train.optim.adamw8bit", raising=False)
    with pytest.raises(RecipeError, match=r"torchao.*extra 'optimizers'"):
        build_optimizer(section("adamw8bit"), Tiny())
    with pytest.raises(RecipeError, match="needs three"):
        train_recipe("dit-s-4", "optimizer.name=came", "optimizer.betas=[0.9, 0.99]")


def test_came_is_the_librarys_where_both_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytorch_optimizer import CAME

    monkeypatch.setattr(came, "CHUNK", 1000)  # several chunks, of several parameters and of one
    ours, theirs = Tiny(), Tiny()
    options = {"lr": 1e-2, "betas": (0.9, 0.999, 0.9999), "weight_decay": 0.1}
    optimizer = Came([p for p in ours.parameters() if p.ndim < 4], **options)  # type: ignore
    reference = CAME([p for p in theirs.parameters() if p.ndim < 4], **options, foreach=False)  # type: ignore
    for step in range(5):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            if one.requires_grad:
                one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step))
                other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_came_treats_a_small_convolution_as_its_matrix_and_others_whole() -> None:
    pointwise, deep = nn.Conv2d(6, 4, 1, bias=False), nn.Conv2d(6, 6, 3, groups=6, bias=False)
    matrix = nn.Linear(6, 4, bias=False)
    matrix.weight.data = pointwise.weight.data.view(4, 6).clone()
    flat = nn.Parameter(deep.weight.detach().flatten().clone())
    optimizer = Came(
        [pointwise.weight, matrix.weight, deep.weight, flat], lr=0.1, betas=(0.9, 0.99, 0.999), weight_decay=0
    )
    for step in range(3):
        gradients = torch.Generator().manual_seed(step)
        matrix.weight.grad = torch.randn(4, 6, generator=gradients)
        flat.grad = torch.randn(54, generator=gradients)
        pointwise.weight.grad, deep.weight.grad = matrix.weight.grad.view(4, 6, 1, 1), flat.grad.view(6, 1, 3, 3)
        optimizer.step()
    torch.testing.assert_close(pointwise.weight.view(4, 6), matrix.weight)
    torch.testing.assert_close(deep.weight.flatten(), flat)
    assert optimizer.state[pointwise.weight]["exp_avg_sq_row"].shape == (4,)
    assert optimizer.state[deep.weight]["exp_avg_sq"].shape == deep.weight.shape


@pytest.mark.parametrize("shape", [(16, 256), (256, 16)])
def test_muon_is_torchs(shape: tuple[int, int]) -> None:
    ours, theirs = (nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = MuonWithAdamW([{"params": [ours], "muon": True}], momentum=0.9, **options)
    reference = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        ours.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)


def test_biases_norms_embeddings_and_tables_decay_unless_they_are_excluded() -> None:
    model = Tiny()
    everything = [p for p in model.parameters() if p.requires_grad]
    (group,) = parameter_groups(section("adamw"), model)
    assert group["weight_decay"] == 0.1
    assert [id(p) for p in group["params"]] == [id(p) for p in everything]
    decays = {
        name
        for name, p in model.named_parameters()
        for group in parameter_groups(section("adamw", decay_all=False), model)
        if group["weight_decay"] and any(p is it for it in group["params"])
    }
    layers = [f"blocks.{i}.{layer}.weight" for i in (0, 1) for layer in ("fc", "proj", "adaLN_modulation.1")]
    assert decays == {*layers, "conv.weight", "deep.weight"}


@pytest.mark.parametrize("name", ["adamw8bit", "came", "muon"])
def test_a_run_resumes_with_every_optimizer_to_the_bit(
    name: str, label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "S", (2, 64, 2))
    for run, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        overrides = (f"run.steps={steps}", f"optimizer.name={name}", "run.checkpoint_every=2")
        run_to(train_recipe("dit-s-4", *overrides), label_store, tmp_path / run)
    assert bits(tmp_path / "whole", 4) == bits(tmp_path / "parts", 4)


def test_optimizers_and_averages_of_a_sharded_model_are_those_of_a_whole_one(tmp_path: Path) -> None:
    command = [SUPPORT / "sharded_ranks.py", tmp_path / "meeting", *NAMES]
    for rank in [ForkedPython([command[0], number, *command[1:]], stderr=subprocess.PIPE) for number in (0, 1)]:
        _, said = rank.communicate(timeout=200)
        assert rank.returncode == 0, said
