"""Linear layers by oneDNN are torch's own but for rounding, whatever goes in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from leandit.tools.plan.workload import workload_at_resolution
from leandit.tools.synthetic.batches import synthetic_batch, synthetic_learner
from leandit.train.config import load
from leandit.train.models.build import build_model
from leandit.train.models.numerics import OneDnnLinear, has_onednn, use_onednn
from leandit.train.step.train_step import train_step

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")
CPU, PRODUCT = torch.device("cpu"), torch.ops.mkldnn._linear_pointwise.default

WIDTH, OUT = 16, 24
SHAPES = [(7, WIDTH), (2, 5, WIDTH), (2, 3, 5, WIDTH), (1, WIDTH), (WIDTH,), (0, WIDTH)]


def spread(tensor: Tensor, order: str) -> Tensor:
    """The same numbers, lying in memory in another way."""
    if order == "gaps":
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if order == "turned" else tensor


def results(layer: nn.Linear, x: Tensor, order: str) -> list[Tensor]:
    """Output and all gradients."""
    x = spread(x, order).detach().requires_grad_()
    output = layer(x)
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    output.backward(spread(weights.to(output), order))
    found = [output, x.grad, *(p.grad for p in layer.parameters())]
    return [tensor.detach().clone() for tensor in found if tensor is not None]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", ["plain", "gaps", "turned"])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_torch(shape: tuple[int, ...], order: str, bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, OUT, bias=bias), torch.randn(shape)
    expected = results(layer, x, order)
    layer.zero_grad()
    use_onednn(layer)
    assert type(layer) is OneDnnLinear
    found = results(layer, x, order)
    assert len(found) == len(expected) == 3 + bias
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_gradient_that_is_one_number_everywhere_has_no_memory_of_its_own_and_is_right() -> None:
    layer, x = nn.Linear(WIDTH, OUT), torch.randn(5, WIDTH)
    use_onednn(layer)
    layer(x).sum().backward()  # an expanded tensor
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(OUT, WIDTH))


class Counter(TorchDispatchMode):
    """Counts the products by oneDNN."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is PRODUCT
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("tiny_models")
def test_a_step_on_a_cpu_takes_it_for_every_layer_and_selective_recomputation_keeps_it() -> None:
    counted = {}
    for mode in ("none", "blocks", "selective"):
        settings = ["run.global_batch=2", "model.num_classes=10", f"run.activation_checkpointing={mode}"]
        work = workload_at_resolution(load("dit-s-2-256", settings), 64)
        learner = synthetic_learner(work.recipe, work.spec, 0, CPU)
        with Counter() as counter:
            train_step(learner, synthetic_batch(work.store, work.largest_bucket, 2, 0, CPU))
        counted[mode] = counter.count
    layers = [module for module in build_model(work.spec, seed=0).modules() if isinstance(module, nn.Linear)]
    assert 3 * len(layers) >= counted["none"] > 2.5 * len(layers)  # not all have an input that wants a gradient
    assert counted["blocks"] > counted["none"] == counted["selective"]


def test_it_is_left_out_where_it_is_turned_off() -> None:
    layer = nn.Linear(WIDTH, OUT)
    with torch.backends.mkldnn.flags(enabled=False):
        use_onednn(layer)
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    layer = nn.Linear(WIDTH, OUT)
    use_onednn(layer)
    x = torch.randn(3, WIDTH)
    assert layer.to(dtype)(x.to(dtype)).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.float()(x).dtype == torch.bfloat16


def test_frozen_weights_get_no_gradient_and_names_stay() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, OUT), nn.GELU(), nn.Linear(OUT, WIDTH))
    before = list(model.state_dict())
    use_onednn(model)
    model[2].requires_grad_(False)
    model(torch.randn(3, WIDTH)).sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [True, True, False, False]
    assert list(model.state_dict()) == before
    assert all(isinstance(model[i], nn.Linear) for i in (0, 2))
