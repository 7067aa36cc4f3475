"""The training benchmarks: equal models are compared, and what is told is what was measured."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from making import CPU
from plain_dit import PlainDiT, made_up_fast_dit

from leandit.datasets.errors import RecipeError
from leandit.tools.bench.training.fast_dit import check_checkout, fast_dit_step
from leandit.tools.bench.training.steps import StepRequest, our_step
from leandit.tools.bench.training.train import DIFFUSERS, OURS, ComputeTimer, render, run
from leandit.tools.bench.training.usual import DiffusersText
from leandit.tools.plan.workload import TrainingWorkload, workload_at_resolution
from leandit.tools.synthetic.batches import synthetic_batch
from leandit.train.config import load
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioner
from leandit.train.models.dit import DiT, size_of
from leandit.train.models.spec import ModelSpec
from leandit.train.parallel.engine import TorchEngine
from leandit.train.step import train_step as step_module

pytestmark = pytest.mark.usefixtures("tiny_models")
TINY = ["run.global_batch=2", "run.precision=fp32", "run.compile=false", "model.num_classes=3"]
NAMES = [  # ours, the plain one's
    ("x_embedder.proj", "to_tokens"),
    ("t_embedder.mlp", "time_mlp"),
    ("y_embedder.embedding_table", "label_table"),
    ("final_layer.linear", "head"),
    ("final_layer.adaLN_modulation", "modulation"),
    ("adaLN_modulation", "modulation"),
    ("attn.qkv", "attention.to_qkv"),
    ("attn.proj", "attention.to_out"),
    ("mlp.fc1", "mlp.0"),
    ("mlp.fc2", "mlp.2"),
    ("pos_embed", "positions"),
]


def quiet(*_: Any) -> None:
    """A progress line that shows nothing."""


def tiny_work(*overrides: str) -> TrainingWorkload:
    return workload_at_resolution(load("dit-s-2-256", [*TINY, *overrides]), 64)


def test_the_plain_dit_is_the_same_function_as_ours() -> None:
    spec = ModelSpec(name="DiT-S/2", channels=4, out_channels=8, num_classes=3, caption_width=0, base_size=8)
    ours = build_model(spec, seed=0).net
    assert isinstance(ours, DiT)
    torch.manual_seed(0)
    state = {
        name: torch.randn_like(tensor) if "pos" not in name else tensor for name, tensor in ours.state_dict().items()
    }
    ours.load_state_dict(state)
    depth, width, heads, patch = size_of(spec.name)
    sizes = {"depth": depth, "width": width, "heads": heads, "patch": patch, "num_classes": 3, "side": 8}
    plain = PlainDiT(**sizes, channels=4, out_channels=8)
    for one, other in NAMES:
        state = {name.replace(one, other): tensor for name, tensor in state.items()}
    plain.load_state_dict(state)
    x, t, y = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 900.0]), torch.tensor([1, 3])
    torch.testing.assert_close(plain(x, t, y), ours(x, t, y), rtol=1e-3, atol=1e-3)


def test_all_cells_are_measured_in_each_round() -> None:
    result = run(StepRequest(tiny_work(), CPU, 2, 1, "synthetic"), quiet)  # pyright: ignore[reportArgumentType]
    rates = result["images_per_second"]
    assert set(rates) == {OURS, DIFFUSERS}
    assert all(len(found) == 2 and min(found) > 0 for found in rates.values())
    said = [value for _, value in render(result)]
    low, high = sorted(a / b for a, b in zip(rates[OURS], rates[DIFFUSERS], strict=True))
    assert said[-1] == f"{OURS} of {DIFFUSERS}: {(low + high) / 2:.3f}x ({low:.3f}x to {high:.3f}x)"


@pytest.mark.parametrize("recipe", ["pixart-sigma-512", "sana-1600m-1024", "sd3.5-medium-512"])
def test_models_with_text_are_measured_beside_diffusers_own_too(recipe: str) -> None:
    tiny = recipe.partition("-")[0].removesuffix(".5") + "-tiny"
    changes = [*TINY[:3], f"model.name={tiny}", "optimizer.name=adamw"]
    work = workload_at_resolution(load(recipe, changes), 64)
    ours = build_model(work.spec, seed=0)
    theirs = DiffusersText(work.spec)
    theirs.net.load_state_dict(ours.net.state_dict())
    batch = synthetic_batch(work.store, "64x64", 2, work.tokens, CPU)
    given = Conditioner(work.spec, None)(batch.labels, batch.texts)
    t = torch.tensor([3.0, 900.0])
    torch.testing.assert_close(theirs(batch.latents, t, given), ours(batch.latents, t, given), rtol=1e-4, atol=1e-4)
    rates = run(StepRequest(work, CPU, 1, 1, "synthetic"), quiet)["images_per_second"]  # pyright: ignore
    assert set(rates) == {OURS, DIFFUSERS}


def test_fast_dit_trains_its_own_model_on_whole_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("models", "diffusion"):
        monkeypatch.setitem(sys.modules, name, sys)  # so that they are gone afterwards
        del sys.modules[name]
    checkout = made_up_fast_dit(tmp_path)
    work = tiny_work("model.name=DiT-S/8", "run.microbatch=1")
    step = fast_dit_step(StepRequest(work, CPU, 1, 1, "synthetic", fast_dit=checkout))
    models, diffusion = sys.modules["models"], sys.modules["diffusion"]
    before = models.MADE[0].table.weight.detach().clone()
    step()
    assert diffusion.STEPS == [(2, 4, 8, 8)]
    assert (models.MADE[0].table.weight != before).any()
    assert str(checkout) not in sys.path
    assert not torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(RecipeError, match="fast-DiT has none of this name"):
        fast_dit_step(StepRequest(tiny_work(), CPU, 1, 1, "synthetic", fast_dit=checkout))


def test_another_folder_than_fast_dit_is_refused(tmp_path: Path) -> None:
    check_checkout(made_up_fast_dit(tmp_path))
    with pytest.raises(RecipeError, match="no models and no diffusion"):
        check_checkout(tmp_path)


def test_the_real_loop_on_a_store_is_measured_beside_its_step() -> None:
    result = run(StepRequest(tiny_work(), CPU, 1, 1, "store"), quiet)  # pyright: ignore[reportArgumentType]
    assert set(result["images_per_second"]) == {"store", "synthetic"}
    assert 0 < result["outside_share"][0] < 1
    share = f"{result['outside_share'][0]:.2%}"
    wait = f"{result['data_wait_share'][0]:.2%}"
    assert [said for _, said in render(result)[-2:]] == [
        f"outside forward, backward, update: {share} ({share} to {share})",
        f"waits for data: {wait} ({wait} to {wait}), peak {result['peak_gib']:.1f} GiB",
    ]


def test_what_is_watched_is_as_before_afterwards() -> None:
    before = step_module.image_losses, TorchEngine.backward, TorchEngine.update
    step = our_step(StepRequest(tiny_work(), CPU, 1, 1, "synthetic"))
    with ComputeTimer() as timer:
        start = time.perf_counter()
        step()
        whole = time.perf_counter() - start
    assert 0.3 * whole < timer.seconds < whole
    assert (step_module.image_losses, TorchEngine.backward, TorchEngine.update) == before


def test_unknown_data_is_refused() -> None:
    with pytest.raises(RecipeError, match="needed synthetic or store"):
        run(StepRequest(tiny_work(), CPU, 1, 1, "none"), quiet)  # pyright: ignore[reportArgumentType]
