"""The benchmarks of training run and print their figures; what count_kernels.py counts is what was launched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from count_kernels import Work, count, count_steps
from gpu_cells import TINY
from making import CPU
from plain_dit import made_up_fast_dit
from training import DIFFUSERS, OURS, DiffusersText, Setting, Step, fast_dit_step

from leandit.datasets.errors import RecipeError
from leandit.tools.plan.workload import TrainingWorkload, workload_at_resolution
from leandit.tools.synthetic.batches import synthetic_batch
from leandit.train.config import load
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioner

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY_SETTINGS = ["run.global_batch=2", "run.precision=fp32", "run.compile=false"]
ROWS, WIDTH = 4, 8
ONE = ROWS * WIDTH * 4  # bytes of a float32 tensor (4, 8)


def run_script(name: str, *options: object) -> str:
    """Run a script of benchmarks/; its stdout."""
    command = [sys.executable, str(BENCHMARKS / name), *map(str, options)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200).stdout


def tiny_work(*overrides: str) -> TrainingWorkload:
    return workload_at_resolution(load("dit-s-2-256", [*TINY_SETTINGS, *overrides]), 64)


def test_every_kind_of_cell_of_the_gpu_benchmark_runs_in_its_tiny_form(tmp_path: Path) -> None:
    checkout, out = made_up_fast_dit(tmp_path), tmp_path / "out"
    run_script("gpu.py", "run", "--tiny", "--device", "cpu", "--out", out, "--fast-dit", checkout)
    text = run_script("gpu.py", "table", out)
    assert "Tiny sizes" in text
    assert "not yet measured" not in text
    not_done = text.partition("**Not done**")[2]
    assert [line.split(" | ")[0].strip("| ") for line in not_done.splitlines() if "DiT-" in line or ":" in line] == [
        cell.name for cell in TINY if cell.table == "attention"
    ]


def test_our_step_stands_beside_others(tmp_path: Path) -> None:
    sizes = ["--resolution", 64, "--rounds", 2, "--steps", 1]
    settings = [part for each in ["model.name=DiT-Ti/4", *TINY_SETTINGS] for part in ("--set", each)]
    text = run_script("training.py", "dit-s-2-256", *sizes, *settings)
    assert f"| {OURS} |" in text
    assert f"| {DIFFUSERS} |" in text


@pytest.mark.parametrize("recipe", ["pixart-sigma-512", "sana-1600m-1024", "sd3.5-medium-512"])
def test_the_models_of_diffusers_are_the_same_functions_as_ours(recipe: str) -> None:
    tiny = recipe.partition("-")[0].removesuffix(".5") + "-tiny"
    changes = [*TINY_SETTINGS, f"model.name={tiny}", "optimizer.name=adamw"]
    work = workload_at_resolution(load(recipe, changes), 64)
    ours, theirs = build_model(work.spec, seed=0), DiffusersText(work.spec)
    theirs.net.load_state_dict(ours.net.state_dict())
    batch = synthetic_batch(work.store, "64x64", 2, work.tokens, CPU)
    given = Conditioner(work.spec, None)(batch.labels, batch.texts)
    t = torch.tensor([3.0, 900.0])
    torch.testing.assert_close(theirs(batch.latents, t, given), ours(batch.latents, t, given), rtol=1e-4, atol=1e-4)


def test_fast_dit_trains_its_own_model_on_whole_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("models", "diffusion"):
        monkeypatch.setitem(sys.modules, name, sys)  # so that they are gone afterwards
        del sys.modules[name]
    checkout = made_up_fast_dit(tmp_path)
    step = fast_dit_step(
        Setting(tiny_work("model.name=DiT-S/8", "run.microbatch=1", "model.num_classes=3"), CPU), checkout
    )
    models, diffusion = sys.modules["models"], sys.modules["diffusion"]
    before = models.MADE[0].table.weight.detach().clone()
    step()
    assert diffusion.STEPS == [(2, 4, 8, 8)]
    assert (models.MADE[0].table.weight != before).any()
    assert str(checkout) not in sys.path
    assert not torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(RecipeError, match="no models and no diffusion"):
        fast_dit_step(Setting(tiny_work(), CPU), tmp_path)


def pointwise(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).view(-1).exp()


def step_of(function: Any, *sizes: tuple[int, ...]) -> Any:
    def make() -> Step:
        given = [torch.randn(size) for size in sizes]
        return lambda: function(*given)

    return make


def test_each_operation_that_is_no_view_is_a_kernel_that_reads_and_writes() -> None:
    assert count(step_of(pointwise, (ROWS, WIDTH))) == Work(kernels=3, bytes=6 * ONE)


def test_what_the_compiler_fuses_is_one_kernel() -> None:
    assert count(step_of(torch.compile(pointwise), (ROWS, WIDTH))) == Work(kernels=1, bytes=2 * ONE)


@pytest.mark.parametrize("compiled", [False, True])
def test_products_are_counted_with_their_flops(compiled: bool) -> None:
    function = torch.compile(torch.mm) if compiled else torch.mm
    found = count(step_of(function, (ROWS, WIDTH), (WIDTH, 2)))
    assert found == Work(1, 1, ONE + 4 * (WIDTH * 2 + ROWS * 2), 2 * ROWS * WIDTH * 2)


def test_the_gradients_of_a_depthwise_convolution_are_twice_its_forward() -> None:
    def convolve(x: torch.Tensor, weight: torch.Tensor) -> None:
        x, weight = x.requires_grad_(), weight.requires_grad_()
        torch.nn.functional.conv2d(x, weight, padding=1, groups=6).backward(torch.ones(2, 6, 5, 5))

    assert count(step_of(convolve, (2, 6, 5, 5), (6, 1, 3, 3))).flops == 3 * 2 * (2 * 6 * 5 * 5) * 9


def test_an_expanded_axis_is_read_once() -> None:
    assert count(step_of(lambda x: x.expand(ROWS, WIDTH) + 1, (1, WIDTH))).bytes == 4 * WIDTH + ONE


def test_our_compiled_step_asks_for_less_than_the_usual_loop() -> None:
    recipe = load("dit-s-2-256", ["model.name=DiT-Ti/4", "run.global_batch=4", "run.microbatch=2"])
    counted = count_steps(Setting(workload_at_resolution(recipe, 64), CPU))
    ours, eager, usual = (counted[name] for name in (OURS, "not compiled", DIFFUSERS))
    assert ours.kernels < eager.kernels < usual.kernels
    assert ours.bytes < min(eager.bytes, usual.bytes)
    assert ours.flops == eager.flops == pytest.approx(usual.flops, rel=0.05)
