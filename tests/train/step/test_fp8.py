"""FP8: which layers compute in it, what they compute, and where a run is refused; torchao emulates it on a CPU."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, RefuseWaits, fake_cuda, gradients_of_zeros
from making import CPU, train_recipe
from tiny_steps import RECIPES, TinySteps
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError
from leandit.train.config import TrainRecipe
from leandit.train.loop import train
from leandit.train.optim.precision import check_fp8, use_fp8
from leandit.train.parallel.stop import StopRequest
from leandit.train.run import state

Float8Linear = pytest.importorskip("torchao.float8.float8_linear").Float8Linear
KINDS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
STEPS = 6
NEAR = 0.001  # largest relative difference of losses found in 12 steps of the tiny models: 0.0002


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """``run.fp8`` on a CPU."""
    monkeypatch.setattr(state, "check_fp8", lambda *_, **__: None)
    monkeypatch.setattr(state, "use_fp8", functools.partial(use_fp8, emulate=True))


def fp8_layers(model: nn.Module) -> set[str]:
    return {name for name, layer in model.named_modules() if isinstance(layer, Float8Linear)}


def losses_of(steps: TinySteps) -> torch.Tensor:
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        losses.append(steps.step(3).loss)
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("labels", kind) for kind in KINDS),
        *(pytest.param(m, "rowwise", marks=[pytest.mark.slow] * (m == "sd3")) for m in ("pixart", "sana", "sd3")),
    ],
)
@pytest.mark.usefixtures("tiny_models", "emulated")
def test_layers_of_tokens_keep_their_names_and_losses_are_near_those_of_float32(model: str, kind: str) -> None:
    how = ("optimizer.lr=1e-3", "schedule.warmup_steps=0")
    plain, steps = TinySteps(model, CPU, *how), TinySteps(model, CPU, f"run.fp8={kind}", *how)
    network: Any = steps.learner.engine.model
    axes = {name: list[int]() for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    for name, seen in axes.items():
        network.get_submodule(name).register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].ndim))
    names = [[(name, p.shape) for name, p in one.learner.engine.model.named_parameters()] for one in (plain, steps)]
    assert names[0] == names[1]
    wanted, found = losses_of(plain), losses_of(steps)
    assert not torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=NEAR, atol=0)
    of_tokens = {name for name, seen in axes.items() if "blocks." in name and seen and min(seen) > 2}
    assert fp8_layers(network) == of_tokens


class Products(TorchDispatchMode):
    """Records the sides of products in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.sides: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # torchao takes it apart
        if func is torch.ops.aten._scaled_mm.default:
            assert {one.dtype.itemsize for one in args[:2]} == {1}
            self.sides.append((*args[0].shape, args[1].shape[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=[pytest.mark.slow] if m in ("sd3", "sana") else []) for m in RECIPES]
)
@pytest.mark.usefixtures("tiny_models")
def test_a_step_waits_for_nothing_and_multiplies_in_8_bits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors, with the products of the forward in FP8."""
    with fake_cuda(monkeypatch):
        gradients_of_zeros(monkeypatch)
        monkeypatch.setattr("leandit.train.run.state.compile_blocks", lambda *_, **__: None)
        steps = TinySteps(model, CUDA, "run.fp8=rowwise", compiled=True)
        steps.step(3)
        with RefuseWaits(), Products() as seen:
            steps.step(3)
    assert len(seen.sides) == len(fp8_layers(steps.learner.engine.model))
    assert all(inner % 16 == columns % 16 == 0 for _, inner, columns in seen.sides)


@pytest.mark.usefixtures("tiny_models", "emulated")
def test_a_run_goes_on_without_fp8_and_with_it(label_store: LatentStore, tmp_path: Path) -> None:
    def run_to(steps: int, fp8: str) -> int | None:
        recipe = train_recipe("dit-s-4", f"run.steps={steps}", f"run.fp8={fp8}", "schedule.kind=constant")
        how: dict[str, Any] = {"device": CPU, "report": lambda _: None, "stop": StopRequest()}
        return train(recipe, store_path=label_store.path, run=tmp_path / "run", **how).first_step

    assert [run_to(2, "rowwise"), run_to(4, "none"), run_to(6, "tensorwise")] == [1, 3, 5]


@pytest.mark.parametrize(
    ("settings", "how", "words"),
    [
        (["run.precision=fp16"], {}, "run.precision 'bf16', not 'fp16'"),
        (["lora.rank=4", "model.init_from=x"], {}, r"lora.rank 4.*Train all weights"),
        (["parallel.deepspeed_config=ds.json"], {"strategy": "deepspeed"}, "DeepSpeed.*parallel.strategy 'fsdp'"),
        ([], {"device": CPU}, "'cpu' has compute capability none, expected 8.9"),
        ([], {"compiled": False}, "run.compile to true"),
        ([], {"capability": (8, 0)}, "capability 8.0, expected 8.9"),
        ([], {"torchao": None}, "'torchao'.*extra 'optimizers'"),
    ],
)
def test_what_a_run_cannot_have_is_refused(
    settings: list[str], how: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"device": CUDA, "compiled": True, "strategy": "single"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_fp8(recipe_of("run.fp8=rowwise"), **given)
    given |= how
    if capability := given.pop("capability", None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if "torchao" in given:
        monkeypatch.setitem(sys.modules, "torchao", given.pop("torchao"))
    with pytest.raises(RecipeError, match=f"run.fp8 'rowwise'.*{words}.*run.fp8 to 'none'"):
        check_fp8(recipe_of("run.fp8=rowwise", *settings), **given)
    check_fp8(recipe_of(*settings), **given)


def recipe_of(*settings: str) -> TrainRecipe:
    return train_recipe("pixart-tiny", "run.precision=bf16", *settings)
