"""Low-rank adapters of linear layers, added by peft; all other parameters are frozen.

A layer with weight W computes (W + alpha / rank * B A) x, with A (rank, inputs) drawn at random and B (outputs, rank)
zero at the start, so that training begins with the function of W.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ....datasets.order.shuffle import keyed_hash
from ....errors import RecipeError, needs_extra
from ..spec import AdapterSpec
from .model import without_warnings

ADAPTER = "default"  # peft's name of the adapters of a model
DOWN, UP = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"  # A and B behind the name of their layer
IN_A_BLOCK = re.compile(r"[a-z_.]*(?:blocks|layers)\.\d+\.(.+)")
DRAW = 0x10AA  # key of the random numbers of A, apart from those of the model


def add_adapters(model: nn.Module, spec: AdapterSpec, *, seed: int) -> None:
    """Add adapters to a model of diffusers, and freeze the rest.

    An adapted weight "X.weight" is called "X.base_layer.weight" afterwards.

    Raises: RecipeError: peft is not installed, or the model has no such layers.
    """
    adapted_layers(model, spec.targets)
    with needs_extra("lora", f"lora.rank {spec.rank}", "set lora.rank to 0"), without_warnings():
        from peft import LoraConfig, inject_adapter_in_model
    config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=list(spec.targets))  # pyright: ignore
    device = next(model.parameters()).device
    with torch.device("meta"):  # else peft would move its matrices, which fake tensors cannot be
        inject_adapter_in_model(config, model.get_submodule("net"), ADAPTER)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_hash(seed, DRAW) % 2**63)
        for name, parameter in trained_parameters(model).items():
            matrix = torch.zeros(parameter.shape, device=device)
            if name.endswith(DOWN):
                nn.init.kaiming_uniform_(matrix, a=5**0.5)  # as a linear layer of torch
            model.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(matrix)


def narrow_frozen(
    blocks: nn.ModuleList, kind: Literal["float32", "bf16", "int8"], autocast: torch.dtype | None, *, sharded: bool
) -> None:
    """Hold the frozen linear layers of blocks in 16 or 8 bits; call it once they have their weights.

    Autocast rounds float32 weights to bfloat16 before each product, so bfloat16 ones give the same numbers.

    Args:
      autocast: dtype of products; None, float32, where the device has no bfloat16: then "bf16" changes nothing.
      sharded: the model will be sharded, by FSDP or DeepSpeed.
    Raises: RecipeError: the precision or the strategy does not fit, or torchao is not installed.
    """
    if kind == "float32":
        return
    if autocast == torch.float16:
        raise RecipeError(f"lora.frozen '{kind}': it is for run.precision 'bf16', not 'fp16'. Set that, or 'float32'.")
    linear = [
        module
        for block in blocks
        for module in block.modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad
    ]
    if kind == "bf16":
        for layer in linear if autocast else ():
            for name, parameter in list(layer.named_parameters(recurse=False)):
                setattr(layer, name, nn.Parameter(parameter.to(torch.bfloat16), requires_grad=False))
        return
    if sharded:
        raise RecipeError(
            "lora.frozen 'int8': FSDP and DeepSpeed cannot shard 8-bit weights. Use 'bf16', or parallel.strategy 'ddp'."
        )
    with needs_extra("optimizers", "lora.frozen 'int8'", "use 'bf16'"):
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    chosen = set(linear)
    for block in blocks:
        quantize_(block, Int8WeightOnlyConfig(), filter_fn=lambda module, name: module in chosen)


def adapted_layers(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The layers of a model without adapters that targets name, by their names in the model.

    Raises: RecipeError: a target names none, or another kind of layer.
    """
    layers: dict[str, nn.Linear] = {}
    for target in targets:
        named = {name: module for name, module in model.named_modules() if name.endswith(f".{target}")}
        linear = {name: module for name, module in named.items() if isinstance(module, nn.Linear)}
        if not linear or len(linear) < len(named):
            other = next((name for name in named if name not in linear), None)
            kind = f"'{other}' is a {type(named[other]).__name__}" if other else "the model has no such layer"
            names = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
            known = dict.fromkeys(match[1] for name in names if (match := IN_A_BLOCK.fullmatch(name)))
            raise RecipeError(
                f"lora.targets '{target}': {kind}. Expected name suffixes of linear layers; those of the blocks are "
                f"{', '.join(known)}."
            )
        layers |= linear
    return layers


def adapter_shapes(model: nn.Module, spec: AdapterSpec) -> dict[str, Tensor]:
    """Meta tensors with the names, shapes and dtypes that the adapters of a model have, from the model without them."""
    shapes: dict[str, Tensor] = {}
    for name, layer in adapted_layers(model, spec.targets).items():
        shapes[name + DOWN] = torch.empty(spec.rank, layer.in_features, device="meta")
        shapes[name + UP] = torch.empty(layer.out_features, spec.rank, device="meta")
    return shapes


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that train, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
