"""Steps on a GPU: the host never waits, few graphs without a break, and what float16 skips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_steps import BUCKETS, FULL, KINDS, LEFTOVER, LENGTHS, LIMIT, RECIPES, TinySteps
from torch._dynamo.utils import counters

from leandit.errors import RecipeError
from leandit.train.optim.precision import LEAST_CAPABILITY, LossScale
from leandit.train.weights.checkpoint import EMA, MODEL, OPTIMIZER

pytestmark = pytest.mark.usefixtures("tiny_models")
# Largest relative difference of the losses of a new model's first steps from those of float32.
NEAR = {"bf16": 0.02, "fp16": 0.02, "tf32": 0.01}


@pytest.mark.parametrize(("model", "precision"), [*((model, "bf16") for model in RECIPES), ("captions", "fp16")])
def test_the_host_waits_for_nothing_in_twenty_steps(
    model: str, precision: str, device: torch.device, no_waits: Any
) -> None:
    steps, times = TinySteps(model, device, f"run.precision={precision}"), 20 if device.type == "cuda" else 1
    batches = [steps.batch().to(device) for _ in range(times)]
    steps.step()  # makes the optimizer's state, and tables of positions
    with no_waits():
        results = [steps.step_on(batch) for batch in batches]
    assert all(result.loss.isfinite() and not result.skipped for result in results)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", RECIPES)
def test_compiled_steps_have_few_graphs_no_break_and_the_same_losses(
    model: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: real(f, **how | {"fullgraph": True}))
    torch._dynamo.reset()
    counters.clear()
    settings = "run.precision=fp32", f"run.microbatch={LIMIT}"
    ours, plain = (TinySteps(model, gpu, *settings, compiled=compiled) for compiled in (True, False))
    lengths = (LENGTHS[0],) if model in ("labels", "sd3") else LENGTHS
    buckets = BUCKETS if model in ("labels", "captions") else BUCKETS[:2]  # others take long to compile
    for bucket in buckets:
        for tokens in lengths:
            for images in (FULL, LEFTOVER):
                torch.manual_seed(0)
                batch = ours.batch(images, bucket, tokens).to(gpu)
                found, wanted = (steps.step_on(batch).losses for steps in (ours, plain))
                torch.testing.assert_close(found, wanted, rtol=0.01, atol=1e-3)
    assert counters["stats"]["unique_graphs"] <= KINDS.get(model, 1) * 2
    torch._dynamo.reset()


@pytest.mark.parametrize("precision", NEAR)
@pytest.mark.parametrize("model", RECIPES)
def test_losses_are_near_those_of_float32(model: str, precision: str, gpu: torch.device) -> None:
    losses = []
    for each in ("fp32", precision):
        torch.manual_seed(0)
        steps = TinySteps(model, gpu, f"run.precision={each}")
        losses.append(torch.stack([steps.step().loss for _ in range(2)]))
    torch.testing.assert_close(losses[1], losses[0], rtol=NEAR[precision], atol=0)


def test_an_overflow_skips_the_update_and_the_averages(device: torch.device) -> None:
    steps = TinySteps("labels", device, "run.precision=fp16")
    engine = steps.learner.engine
    assert isinstance(engine.loss_scale, LossScale)
    assert not steps.step().skipped
    for scale, is_skipped in ((2.0**40, True), (2.0**10, False)):
        before = {name: value.clone() for group in (MODEL, EMA, OPTIMIZER) for name, value in named(engine, group)}
        engine.loss_scale.scale.fill_(scale)
        assert bool(steps.step().skipped) == is_skipped
        assert engine.loss_scale.value() == (scale / 2 if is_skipped else scale)
        after = {name: value for group in (MODEL, EMA, OPTIMIZER) for name, value in named(engine, group)}
        same = [name for name in before if torch.equal(before[name], after[name])]
        assert (len(same) == len(before)) == is_skipped, same


def named(engine: Any, group: str) -> list[tuple[str, torch.Tensor]]:
    return [(f"{group} {name}", value) for name, value in engine.tensors(group)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_fp8_is_refused_or_near_bf16(kind: str, gpu: torch.device) -> None:
    if torch.cuda.get_device_capability(gpu) < LEAST_CAPABILITY:
        with pytest.raises(RecipeError, match="compute capability"):
            TinySteps("labels", gpu, f"run.fp8={kind}", compiled=True)
        return
    losses = []
    for each in ("none", kind):
        torch.manual_seed(0)
        torch._dynamo.reset()
        steps = TinySteps("labels", gpu, "run.precision=bf16", f"run.fp8={each}", compiled=True)
        losses.append(torch.stack([steps.step().loss for _ in range(20)]))
    assert not torch.equal(*losses)
    torch.testing.assert_close(losses[1], losses[0], rtol=0.03, atol=0)
    torch._dynamo.reset()
