"""Adapters in a model: where it starts, what trains, and how many graphs its blocks compile to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from making import TINY_SD3, shake

from leandit.datasets.batches.captions import Captions
from leandit.datasets.errors import RecipeError
from leandit.train.models.blocks import compile_blocks
from leandit.train.models.build import FAMILIES, build_model
from leandit.train.models.conditioning import Conditioning
from leandit.train.models.diffusers import pixart, sana, sd3
from leandit.train.models.diffusers.adapters import DOWN, UP, adapter_shapes, narrow_frozen, trained_parameters
from leandit.train.models.spec import AdapterSpec, ModelSpec, TextInput

PLAIN = ModelSpec(name="", channels=4, out_channels=4, num_classes=0, caption_width=6, base_size=8)
SPECS = {
    family: PLAIN.model_copy(
        update={
            "name": f"{family}-tiny",
            "adapter": AdapterSpec(rank=2, alpha=2, targets=FAMILIES[family].adapted),
            "texts": (TextInput(name="", tokens=5, width=6, pooled_width=7),) if family == "sd3" else (),
        }
    )
    for family in ("pixart", "sana", "sd3")
}


@pytest.fixture(autouse=True)
def _three_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pixart.PixArt.sizes, "pixart-tiny", pixart.size(3, 2, 16))
    monkeypatch.setitem(sana.Sana.sizes, "sana-tiny", sana.size(3, 2, 16, 2, 16))
    monkeypatch.setitem(sd3.SD3.sizes, "sd3-tiny", TINY_SD3)


def inputs(family: str) -> tuple[torch.Tensor, torch.Tensor, Conditioning]:
    generator = torch.Generator().manual_seed(0)
    captions = torch.randn((2, 5, 6), generator=generator)
    x = torch.randn((2, 4, 8, 8), generator=generator)
    given = Conditioning(captions=captions if family == "sd3" else Captions.of(list(captions)), pooled=torch.ones(2, 7))
    return x, torch.tensor([3.0, 900.0]), given


@pytest.mark.parametrize("family", SPECS)
def test_a_model_with_new_adapters_computes_what_it_does_without(family: str) -> None:
    spec = SPECS[family]
    plain, model = build_model(spec.plain, seed=0), build_model(spec, seed=0)
    assert torch.equal(model(*inputs(family)), plain(*inputs(family)))
    found = trained_parameters(model)
    assert spec.adapter
    expected = adapter_shapes(plain, spec.adapter)
    assert {name: p.shape for name, p in found.items()} == {name: t.shape for name, t in expected.items()}
    assert all(p.eq(0).all() for name, p in found.items() if name.endswith(UP))
    down = {name: p for name, p in found.items() if name.endswith(DOWN)}
    assert all(0.5 < p.std() * (3 * p.shape[1]) ** 0.5 < 1.5 for p in down.values())  # uniform to 1 / sqrt(inputs)
    other = trained_parameters(build_model(spec, seed=1))
    assert not any(torch.equal(p, other[name]) for name, p in down.items())
    assert all(torch.equal(p, trained_parameters(build_model(spec, seed=0))[name]) for name, p in down.items())


@pytest.mark.parametrize("family", ["pixart", pytest.param("sana", marks=pytest.mark.integration)])
def test_blocks_with_adapters_compile_whole_and_to_two_graphs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, compile_by = [], torch.compile

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda forward, **how: compile_by(forward, backend=keep, **how))
    torch._dynamo.reset()
    plain, model = build_model(SPECS[family], seed=0), build_model(SPECS[family], seed=0)
    with torch._dynamo.config.patch({"recompile_limit": 8, "accumulated_recompile_limit": 256, "optimize_ddp": True}):
        compile_blocks(model.blocks)
        found = model(*inputs(family))
    assert len(graphs) == 2  # of the first block, whose input has no gradient, and of all others
    wanted = plain(*inputs(family))
    torch.testing.assert_close(found, wanted)
    for output in (found, wanted):
        output.square().mean().backward()
    for (name, one), other in zip(trained_parameters(model).items(), trained_parameters(plain).values(), strict=True):
        assert one.grad is not None, name
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("family", SPECS)
def test_frozen_layers_of_16_bits_give_the_same_numbers_and_those_of_8_bits_nearly(family: str) -> None:
    outputs, gradients, frozen_bytes = {}, {}, {}
    for kind in ("float32", "bf16", "int8"):
        model = shake(build_model(SPECS[family], seed=0))
        narrow_frozen(model.blocks, kind, torch.bfloat16, sharded=False)
        with torch.autocast("cpu", torch.bfloat16):
            outputs[kind] = model(*inputs(family))
        outputs[kind].float().square().mean().backward()
        found = [p.grad.flatten() for p in trained_parameters(model).values() if p.grad is not None]
        gradients[kind] = torch.cat(found)
        layers = [module for block in model.blocks for module in block.modules() if isinstance(module, torch.nn.Linear)]
        weights: list[Any] = [layer.weight for layer in layers if not layer.weight.requires_grad]
        frozen_bytes[kind] = sum(weight.qdata.nbytes if kind == "int8" else weight.nbytes for weight in weights)
    assert torch.equal(outputs["bf16"], outputs["float32"])
    assert torch.equal(gradients["bf16"], gradients["float32"])
    for one in (outputs, gradients):
        assert 0 < (one["int8"] - one["float32"]).norm() < 0.05 * one["float32"].norm()
    assert frozen_bytes["float32"] == 2 * frozen_bytes["bf16"] == 4 * frozen_bytes["int8"]


def test_narrow_weights_that_do_not_fit_are_refused_and_float32_products_keep_float32_weights() -> None:
    model = build_model(SPECS["sana"], seed=0)
    with pytest.raises(RecipeError, match=r"it is for run\.precision 'bf16', not 'fp16'"):
        narrow_frozen(model.blocks, "bf16", torch.float16, sharded=False)
    with pytest.raises(RecipeError, match="FSDP and DeepSpeed cannot shard 8-bit"):
        narrow_frozen(model.blocks, "int8", torch.bfloat16, sharded=True)
    narrow_frozen(model.blocks, "bf16", None, sharded=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
