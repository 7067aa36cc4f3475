"""How often a run compiles: one graph for each kind of block and shape, and few shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as gradients
from making import CPU
from tiny_steps import BUCKETS, FULL, KINDS, LEFTOVER, LENGTHS, LIMIT, RECIPES, TinySteps
from torch._dynamo.testing import CompileCounterWithBackend

from leandit.train.models import cross_attention
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioning
from leandit.train.models.spec import ModelSpec
from leandit.train.parallel.build import compile_blocks

pytestmark = pytest.mark.usefixtures("tiny_models")
QUICK = {"labels": 5, "captions": 2, "pixart": 2, "sana": 1, "sd3": 1}  # buckets; a graph takes a second


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts the graphs of ``compile_blocks``, which are run as they are."""
    counter, real = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: real(f, **how | {"backend": counter, "fullgraph": True}))
    limits = {"recompile_limit": 8, "accumulated_recompile_limit": 256, "optimize_ddp": True}
    with torch._dynamo.config.patch(limits), gradients.patch(backward_pass_autocast=gradients.backward_pass_autocast):
        torch._dynamo.reset()
        yield counter
        torch._dynamo.reset()


def compiled(model: str, *settings: str) -> TinySteps:
    return TinySteps(model, CPU, "run.precision=fp32", *settings, compiled=True)


@pytest.mark.parametrize(
    ("model", "num_buckets"),
    [*QUICK.items(), *(pytest.param(model, len(BUCKETS), marks=pytest.mark.slow) for model in RECIPES)],
)
def test_a_bucket_is_compiled_once_for_each_kind_of_block_and_for_its_leftovers(
    model: str, num_buckets: int, graphs: CompileCounterWithBackend
) -> None:
    run, buckets = compiled(model, f"run.microbatch={LIMIT}"), BUCKETS[:num_buckets]
    for _ in range(2):
        for bucket in buckets:
            for images in (FULL, LEFTOVER):
                run.step(images, bucket)
    assert graphs.frame_count == KINDS.get(model, 1) * len(buckets) * 2


@pytest.mark.parametrize("model", ["captions", "pixart", "sana"])
def test_captions_of_many_lengths_have_few_shapes(model: str, graphs: CompileCounterWithBackend) -> None:
    run = compiled(model)
    for tokens in LENGTHS:
        run.step(tokens=tokens)
    assert graphs.frame_count == 2


@pytest.mark.parametrize(("images", "limit"), [(7, 3), (8, 3), (5, 4), (6, 2), (5, 0)])
def test_microbatches_of_a_batch_have_one_shape(images: int, limit: int, graphs: CompileCounterWithBackend) -> None:
    compiled("labels", f"run.microbatch={limit}").step(images)
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
    given = Conditioning(
        captions=captions, caption_mask=torch.ones(3, 7, dtype=torch.bool, device="meta"), mean_tokens=5
    )
    denoiser(x, torch.empty(3, device="meta"), given).square().sum().backward()
    assert graphs.frame_count == 1
