"""What a step asks of a device is counted: operations, bytes, FLOPs, and what the compiler has fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from leandit.tools.bench.training.kernels import Work, count, render, run
from leandit.tools.bench.training.steps import Step, StepRequest
from leandit.tools.plan.workload import workload_at_resolution
from leandit.tools.terminal.progress import ProgressLine
from leandit.train.config import load

ROWS, WIDTH = 4, 8
ONE = ROWS * WIDTH * 4  # bytes of a float32 tensor (4, 8)


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
    request = StepRequest(workload_at_resolution(recipe, 64), torch.device("cpu"), 1, 1, "synthetic")
    with ProgressLine() as progress:
        result = run(request, progress)
    ours, eager, usual = (result["steps"][name] for name in ("leandit", "not compiled", "diffusers"))
    assert ours["kernels"] < eager["kernels"] < usual["kernels"]
    assert ours["bytes"] < min(eager["bytes"], usual["bytes"])
    assert ours["flops"] == eager["flops"] == pytest.approx(usual["flops"], rel=0.05)
    assert f"{usual['kernels'] / ours['kernels']:.2f}x" in render(result)
