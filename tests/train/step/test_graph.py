"""How often a run compiles: one graph for each kind of block and shape, and few shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from making import CPU
from torch._dynamo.testing import CompileCounterWithBackend

from leandit.tools.plan.workload import TrainingWorkload, workload_at_resolution
from leandit.tools.synthetic.batches import synthetic_batch, synthetic_learner
from leandit.train.config import load
from leandit.train.metrics.window import StepResult
from leandit.train.models import cross_attention
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioning
from leandit.train.models.spec import ModelSpec
from leandit.train.parallel.build import compile_blocks
from leandit.train.step.learner import Learner
from leandit.train.step.train_step import train_step

pytestmark = pytest.mark.usefixtures("tiny_models")
BUCKETS = ("64x64", "48x80", "32x64", "96x32", "80x64")  # each with another number of tokens, else they share code
SHARED = ("optimizer.name=adamw", "optimizer.betas=[0.9, 0.99]", "run.precision=fp32", "model.num_classes=10")
RECIPES = {
    "labels": ("dit-s-2-256", ()),
    "captions": ("dit-s-2-256", ("conditioning.kind=caption",)),
    "pixart": ("pixart-sigma-256", ("model.name=pixart-tiny",)),
    "sana": ("sana-600m-512", ("model.name=sana-tiny",)),
    "sd3": ("sd3.5-medium-512", ("model.name=sd3-tiny",)),
}
SLOW_TO_COMPILE = {"pixart": 3, "sana": 2, "sd3": 2}  # buckets
KINDS = {"sd3": 3}  # blocks with two attentions, with one, and the last one, which gives no captions
LENGTHS = (5, 60, 64, 65, 128)  # of the longest caption of a batch: two, once they are padded
FULL, LEFTOVER, LIMIT = 7, 4, 3  # microbatches of 3, 3 and 1; of 2 and 2


class Compiled:
    """A learner with compiled blocks; a break of a graph raises."""

    def __init__(self, model: str, *settings: str) -> None:
        recipe, own = RECIPES[model]
        self.work: TrainingWorkload = workload_at_resolution(load(recipe, [*SHARED, *own, *settings]), 256)
        self.learner: Learner = synthetic_learner(
            self.work.recipe, self.work.spec, self.work.tokens, CPU, store=self.work.store, compiled=True
        )

    def step(self, bucket: str, images: int, tokens: int, *, scale: int = 1) -> StepResult:
        sides = (int(side) * scale for side in bucket.split("x"))
        size = "x".join(map(str, sides))
        return train_step(self.learner, synthetic_batch(self.work.store, size, images, tokens, CPU))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts the graphs of ``compile_blocks``, which are run as they are."""
    counter, real = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: real(f, backend=counter, fullgraph=True, **how))
    with torch._dynamo.config.patch({"recompile_limit": 8, "accumulated_recompile_limit": 256, "optimize_ddp": True}):
        torch._dynamo.reset()
        yield counter
        torch._dynamo.reset()


@pytest.mark.parametrize("model", RECIPES)
def test_a_bucket_is_compiled_once_for_each_kind_of_block_and_for_its_leftovers(
    model: str, graphs: CompileCounterWithBackend
) -> None:
    run, scale = Compiled(model, f"run.microbatch={LIMIT}"), 4 if model == "sana" else 1
    buckets = BUCKETS[: SLOW_TO_COMPILE.get(model)]
    for _ in range(2):
        for bucket in buckets:
            for images in (FULL, LEFTOVER):
                run.step(bucket, images, LENGTHS[0], scale=scale)
    assert graphs.frame_count == KINDS.get(model, 1) * len(buckets) * 2


@pytest.mark.parametrize("model", ["captions", "pixart", "sana"])
def test_captions_of_many_lengths_have_few_shapes(model: str, graphs: CompileCounterWithBackend) -> None:
    run, scale = Compiled(model), 4 if model == "sana" else 1
    for tokens in LENGTHS:
        run.step(BUCKETS[0], 2, tokens, scale=scale)
    assert graphs.frame_count == 2


@pytest.mark.parametrize(("images", "limit"), [(7, 3), (8, 3), (5, 4), (6, 2), (5, 0)])
def test_microbatches_of_a_batch_have_one_shape(images: int, limit: int, graphs: CompileCounterWithBackend) -> None:
    run = Compiled("labels", f"run.microbatch={limit}")
    run.step("64x64", images, 0)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("model", ["captions", "pixart", "sana"])
def test_packed_captions_are_in_the_graph(
    model: str, graphs: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variable-length attention has no kernel on a CPU, so the shapes alone go through the model."""
    monkeypatch.setattr(cross_attention, "has_varlen", lambda x, head_width: True)
    name = {"captions": "DiT-S/2", "pixart": "pixart-tiny", "sana": "sana-tiny"}[model]
    spec = ModelSpec(name=name, channels=4, out_channels=4, num_classes=0, caption_width=6, base_size=8)
    denoiser: Any = build_model(spec, seed=0).to("meta")
    compile_blocks(denoiser)
    x, captions = (torch.empty(size, device="meta") for size in ((3, 4, 8, 8), (3, 7, 6)))
    given = Conditioning(captions=captions, caption_mask=torch.ones(3, 7, dtype=torch.bool, device="meta"))
    denoiser(x, torch.empty(3, device="meta"), given).square().sum().backward()
    assert graphs.frame_count == 1
