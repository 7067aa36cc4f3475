"""Which weights of every family are hidden matrices, modulations, embeddings, heads: and who asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILY_SPECS, inputs_of
from torch import nn

from leandit.train.config import OptimizerSection
from leandit.train.models.build import FAMILIES, build_model
from leandit.train.models.roles import layers_of, parameter_roles
from leandit.train.models.spec import AdapterSpec
from leandit.train.optim.build import build_optimizer
from leandit.train.optim.precision import use_fp8

pytestmark = pytest.mark.usefixtures("tiny_models")
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILY_SPECS)
LENGTHS = (4, 3, 5)  # tokens of the captions of three images


def build(family: str) -> Any:
    return build_model(FAMILY_SPECS[family], seed=0)


def layers_of_tokens(family: str, model: Any) -> tuple[set[str], set[str]]:
    """Names of the linear layers of the blocks that multiply tokens, and of those that give modulations.

    A modulation has a row an image; in DiT^DH's head it has a row a token of the narrow part.
    """
    spec, multiply_tokens, modulate = FAMILY_SPECS[family], set[str](), set[str]()
    names = {layer: name for name, layer in model.named_modules()}

    def see(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        name = names[layer]
        is_packed = spec.takes_text and len(inputs[0]) == sum(LENGTHS)  # captions without padding
        has_row_an_image = inputs[0].ndim == 2 and not is_packed
        (modulate if has_row_an_image or "adaLN" in name else multiply_tokens).add(name)

    for block in model.blocks:
        for layer in block.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(see)
    model(*inputs_of(spec, *LENGTHS))
    return multiply_tokens, modulate


def test_every_family_is_tested() -> None:
    assert set(FAMILIES) < set(FAMILY_SPECS)


@EVERY_FAMILY
def test_muon_and_fp8_take_the_layers_that_multiply_tokens_and_never_those_that_modulate(family: str) -> None:
    float8 = pytest.importorskip("torchao.float8.float8_linear")
    model = build(family)
    multiply_tokens, modulate = layers_of_tokens(family, model)
    optimizer = build_optimizer(OptimizerSection(name="muon"), model)
    by_muon = {id(p) for group in optimizer.param_groups if group["muon"] for p in group["params"]}
    names_by_muon = {name for name, parameter in model.named_parameters() if id(parameter) in by_muon}
    assert names_by_muon == {f"{name}.weight" for name in multiply_tokens}
    assert set(layers_of(model, "modulation")) >= modulate
    sides = {name: {*model.get_submodule(name).weight.shape} for name in multiply_tokens}
    use_fp8(model, "rowwise", emulate=True)
    in_fp8 = {name for name, layer in model.named_modules() if isinstance(layer, float8.Float8Linear)}
    assert in_fp8 == {name for name in multiply_tokens if not any(side % 16 for side in sides[name])}
    assert in_fp8


@EVERY_FAMILY
def test_decay_without_all_parameters_is_of_linear_layers_and_convolutions(family: str) -> None:
    model = build(family)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    optimizer = build_optimizer(OptimizerSection(weight_decay=0.1, decay_all=False), model)
    decaying = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decaying == {id(layer.weight) for layer in layers}


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_of_hidden_layers_and_muon_takes_their_matrices(family: str) -> None:
    adapter = AdapterSpec(rank=2, alpha=2, targets=FAMILIES[family].adapted)
    model = build_model(FAMILY_SPECS[family].model_copy(update={"adapter": adapter}), seed=0)
    trained = {name: role for name, role in parameter_roles(model).items() if ".lora_" in name}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(trained)
    assert set(trained.values()) == {"hidden"}
    optimizer = build_optimizer(OptimizerSection(name="muon"), model)
    assert [group["muon"] for group in optimizer.param_groups] == [True]


def test_a_layer_of_no_role_or_of_two_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FAMILY_SPECS["qwen-image"]
    declared = dict(FAMILIES["qwen-image"].roles)
    monkeypatch.setattr(FAMILIES["qwen-image"], "roles", declared | {"modulation": ("*.img_mod.1", "norm_out.linear")})
    with pytest.raises(ValueError, match=r"QwenImage\.roles: layer 'transformer_blocks\.0\.txt_mod\.1' has no role"):
        build_model(spec, seed=0)
    monkeypatch.setattr(FAMILIES["qwen-image"], "roles", declared | {"head": ("proj_out", "*.img_mlp.*")})
    with pytest.raises(ValueError, match=r"'transformer_blocks\.0\.img_mlp\.net\.0\.proj' has hidden and head"):
        build_model(spec, seed=0)
