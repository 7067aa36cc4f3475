"""Linear layers of the blocks in FP8, by torchao: products of 8-bit floats, scaled at each use.

Weights, gradients and optimizer stay as they are and keep their names, so checkpoints do not depend on it.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import torch
from torch import nn

from ...datasets.errors import RecipeError
from ..config import TrainRecipe
from ..models.build import Denoiser
from ..optim.muon import is_modulation

LEAST_CAPABILITY = (8, 9)  # Ada, then Hopper and Blackwell
SIDE = 16  # the kernels take matrices whose sides are multiples of it


def check_fp8(recipe: TrainRecipe, device: torch.device, strategy: str, *, compiled: bool) -> None:
    """Raise RecipeError if ``run.fp8`` cannot be used; ``compiled``: the blocks go through torch.compile."""
    run = recipe.run
    if run.fp8 == "none":
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    found = ".".join(map(str, capability)) if capability else "none"
    for is_wrong, problem in (
        (run.precision != "bf16", f"it is for run.precision 'bf16', not '{run.precision}'. Set that"),
        (recipe.lora.rank > 0, f"adapters (lora.rank {recipe.lora.rank}) have their own layers. Train all weights"),
        (strategy == "deepspeed", "DeepSpeed has its own engine. Use parallel.strategy 'fsdp'"),
        (
            capability is None or capability < LEAST_CAPABILITY,
            f"device '{device}' has compute capability {found}, expected 8.9 or higher (Ada, Hopper). Use such a GPU",
        ),
        (not compiled, "scales are slow unless they are compiled into the blocks. Set run.compile to true"),
        (
            find_spec("torchao") is None,
            "package 'torchao' is not installed. Install leandit with its extra 'optimizers'",
        ),
    ):
        if is_wrong:
            raise RecipeError(f"run.fp8 '{run.fp8}': {problem}, or run.fp8 to 'none'.")


def use_fp8(model: Denoiser, kind: str, *, emulate: bool = False) -> None:
    """Compute the linear layers of tokens in the blocks in FP8; call it before they are compiled or sharded.

    Args:
      kind: of scales, as torchao names them.
      emulate: compute on numbers that are rounded to FP8, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    def takes_fp8(layer: nn.Module, name: str) -> bool:
        """Modulations do not: their rows are images, which are few."""
        if type(layer) is not nn.Linear or is_modulation(name):
            return False
        return layer.in_features % SIDE == layer.out_features % SIDE == 0

    # Tokens are padded where their number is not a multiple: the product that gives a weight's gradient sums over them.
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(kind), pad_inner_dim=True, emulate=emulate)
    for block in model.blocks:
        convert_to_float8_training(block, config=config, module_filter_fn=takes_fp8)
        for layer in block.modules():
            if isinstance(layer, Float8Linear):  # numbers with a scale a row cannot be reshaped by a copy
                layer.register_forward_pre_hook(lambda _, inputs: inputs[0].contiguous())
