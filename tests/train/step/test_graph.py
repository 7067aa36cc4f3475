"""How often a run compiles: two graphs a kind of block at most, whatever the shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as gradients
from making import CPU
from tiny_steps import BUCKETS, FULL, KINDS, LEFTOVER, LENGTHS, LIMIT, RECIPES, TinySteps
from torch._dynamo.utils import counters
from torch.fx.experimental import _config as shapes

from leandit.datasets.batches.captions import Captions
from leandit.train.models import blocks, cross_attention
from leandit.train.models.blocks import compile_blocks
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioning
from leandit.train.models.spec import ModelSpec

pytestmark = pytest.mark.usefixtures("tiny_models")
BACKEND = "eager"  # "aot_eager", which traces backward passes too, makes as many graphs, and takes ten times as long


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """The number of graphs so far of ``compile_blocks``, which are run as they are."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: real(f, **how | {"backend": BACKEND}))
    limits = {"recompile_limit": 8, "accumulated_recompile_limit": 256, "optimize_ddp": True}
    own = shapes.patch(use_duck_shape=True), gradients.patch(backward_pass_autocast="same_as_forward")
    with torch._dynamo.config.patch(limits), own[0], own[1]:
        torch._dynamo.reset()
        counters.clear()
        yield lambda: counters["stats"]["unique_graphs"]
        torch._dynamo.reset()


def steps_of(model: str, *settings: str, compiled: bool = True) -> TinySteps:
    return TinySteps(model, CPU, "run.precision=fp32", *settings, compiled=compiled)


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[] if name == "captions" else [pytest.mark.integration]) for name in RECIPES]
)
def test_two_graphs_a_kind_of_block_serve_all_shapes(model: str, graphs: Callable[[], int]) -> None:
    steps = steps_of(model, f"run.microbatch={LIMIT}")
    for bucket, tokens in zip(BUCKETS, LENGTHS, strict=True):
        for images in (FULL, LEFTOVER):
            steps.step(images, bucket, tokens)
    assert graphs() <= 2 * KINDS.get(model, 1)  # one image alone has the second


def test_shapes_beyond_the_limit_run_eagerly_and_are_named_once(
    graphs: Callable[[], int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocks, "MOST_GRAPHS", 1)
    ours, plain = (steps_of("labels", compiled=compiled) for compiled in (True, False))
    for images in (FULL, 1, 1):  # one image alone needs a second graph
        batch = ours.batch(images, BUCKETS[0])
        torch.testing.assert_close(ours.step_on(batch).losses, plain.step_on(batch).losses, rtol=1e-3, atol=1e-4)
    assert graphs() == 1
    (said,) = [record.message for record in caplog.records if "graphs" in record.message]
    assert said == "DiTBlock: 1 graphs are compiled, so a batch of the shapes 1x16x32, 1x32 runs eagerly"


@pytest.mark.integration
@pytest.mark.parametrize("name", ["DiT-S/2", "pixart-tiny", "sana-tiny"])
def test_packed_captions_have_one_graph(name: str, graphs: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Variable-length attention has no kernel on a CPU, so the shapes alone go through the model."""
    monkeypatch.setattr(cross_attention, "has_varlen", lambda x, head_width: True)
    spec = ModelSpec(name=name, channels=4, out_channels=4, num_classes=0, caption_width=6, base_size=8)
    denoiser: Any = build_model(spec, seed=0).to("meta")
    compile_blocks(denoiser.blocks)
    for lengths, size in (((4, 1, 7), (8, 8)), ((2, 9), (4, 12)), ((30, 5, 6, 11), (8, 4))):
        captions = Captions.packed(torch.empty(sum(lengths), 6, device="meta"), lengths)
        x, t = (torch.empty(shape, device="meta") for shape in ((len(lengths), 4, *size), (len(lengths),)))
        denoiser(x, t, Conditioning(captions=captions)).square().sum().backward()
    assert graphs() == 1


@pytest.mark.integration
@pytest.mark.parametrize(
    ("model", "dtype"), [("sana", torch.bfloat16), ("pixart", torch.float16), ("sd3", torch.bfloat16)]
)
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_under_autocast_and_with_recomputation_blocks_of_a_kind_share_one_graph(
    model: str, dtype: torch.dtype, mode: str, graphs: Callable[[], int]
) -> None:
    steps = steps_of(model, f"run.activation_checkpointing={mode}")
    steps.learner.autocast_dtype = dtype
    assert steps.step().loss.isfinite()
    assert graphs() == KINDS.get(model, 1)
