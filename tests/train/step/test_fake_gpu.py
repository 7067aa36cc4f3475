"""A whole step on a GPU of fake tensors: it waits for nothing, mixes no devices, and multiplies in 16 bits.

What a GPU does with it is in ``tests/gpu``.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.attention.varlen  # registers its operation
from fake_cuda import CUDA, RefuseWaits, fake_cuda, gradients_of_zeros
from tiny_steps import RECIPES, TinySteps
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from leandit.train.metrics.meter import StepResult

pytestmark = pytest.mark.usefixtures("tiny_models")
aten: Any = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward}


class Product(NamedTuple):
    """A kernel of tensor cores, its factors' dtypes, and its module, * for a number; "" in the backward pass."""

    module: str
    kernel: str
    dtypes: frozenset[torch.dtype]


class Products(TorchDispatchMode):
    """Records the products of a model by module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen: Counter[Product] = Counter()
        self._names: list[str] = []
        self._within_attention = False
        for name, module in model.named_modules():
            general = re.sub(r"\d+", "*", name)
            module.register_forward_pre_hook(lambda *_, name=general: self._names.append(name))
            module.register_forward_hook(lambda *_: (self._names.pop(), None)[1], always_call=True)

    def add(self, kernel: str, factors: list[Tensor]) -> None:
        module = self._names[-1] if self._names else ""
        self.seen[Product(module, kernel, frozenset(one.dtype for one in factors))] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in PRODUCTS and not self._within_attention:
            factors = [one for one in args[:3] if isinstance(one, Tensor) and one.ndim > 1][-2:]
            self.add(packet.__name__, factors)
        if packet is torch.ops.torch_attn._varlen_attn:
            self.add("attention", list(args[:3]))
        return func(*args, **(kwargs or {}))


class Attention(TorchFunctionMode):
    """Counts each call of attention as one kernel; a GPU chooses it, fake tensors take it apart."""

    def __init__(self, products: Products) -> None:
        super().__init__()
        self._products = products

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self._products._within_attention = True
        try:
            attended = function(*args, **(kwargs or {}))
        finally:
            self._products._within_attention = False
        # In the dtype of the result: autocast has converted what the kernel reads.
        self._products.add("attention", [attended])
        return attended


def steps_on_fake_gpu(model: str, patch: pytest.MonkeyPatch, *settings: str) -> tuple[StepResult, Counter[Product]]:
    """Two steps of two microbatches, the second of which may not wait, from the batch in memory of the host."""
    with fake_cuda(patch):
        gradients_of_zeros(patch)
        steps = TinySteps(model, CUDA, "run.microbatch=4", *settings)
        steps.step(6)
        products = Products(steps.learner.engine.model)
        with RefuseWaits(), products, Attention(products):
            return steps.step(6), products.seen


@functools.cache
def products_of(model: str, precision: str) -> Counter[Product]:
    with pytest.MonkeyPatch.context() as patch:
        result, products = steps_on_fake_gpu(model, patch, f"run.precision={precision}")
    assert {one.device for one in (result.loss, result.grad_norm, result.skipped)} == {CUDA}
    return products


QUICK = [*((model, "bf16") for model in RECIPES), ("captions", "fp16")]
LONG = [pair for pair in itertools.product(RECIPES, ("fp16", "fp32")) if pair not in QUICK]
SETTINGS = {
    "muon": ("optimizer.name=muon",),
    "came": ("optimizer.name=came", "optimizer.betas=[0.9, 0.99, 0.999]"),
    "averages of two lengths": ("ema.kind=power", "objective.predict=v", "objective.min_snr_gamma=5"),
    "features, routed tokens and a class token": (),
    "a teacher": ("objective.kind=flow", "self_align.weight=0.5", "self_align.block=1", "self_align.teacher_block=2"),
}


@pytest.mark.parametrize(
    ("model", "precision"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in LONG)]
)
def test_the_host_waits_for_nothing_in_a_step(model: str, precision: str) -> None:
    assert products_of(model, precision)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_nor_with_other_settings(settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model = "labels" if settings else "aligned"
    result, _ = steps_on_fake_gpu(model, monkeypatch, *settings)
    assert model == "labels" or set(result.terms) >= {"align.dinov2", "class.dinov2"}


# In float32 on purpose, by module: the embedding of times in 0..1000, whose products have only (B, E) rows.
FLOAT32 = {"labels": {"t_embedder.mlp.*"}, "captions": {"t_embedder.mlp.*"}}


@pytest.mark.parametrize("model", RECIPES)
def test_products_are_of_16_bits_but_for_those_listed(model: str) -> None:
    seen = products_of(model, "bf16")
    wide = {one for one in seen if one.dtypes != {torch.bfloat16}}
    assert all(one.dtypes == {torch.float32} for one in wide), wide  # and none has factors of two dtypes
    assert {one.module for one in wide} == FLOAT32.get(model, set())
    assert {one.kernel for one in wide} <= {"addmm"}
