"""Linear layers of the blocks in FP8, by torchao: products of 8-bit floats, scaled at each use.

Weights, gradients and optimizer stay as they are and keep their names, so checkpoints do not depend on it.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from ...datasets.errors import RecipeError
from ..config import TrainRecipe
from ..models.build import Denoiser
from ..parallel.ranks import Ranks
from ..parallel.strategy import choose_strategy

LEAST_CAPABILITY = (8, 9)  # Ada, then Hopper and Blackwell
SIDE = 16  # the kernels take matrices whose sides are multiples of it
MODULATIONS = ("adaLN_modulation", "norm1", "norm1_context")  # of DiT and SD3: their rows are images, which are few


def check_fp8(recipe: TrainRecipe, ranks: Ranks, device: torch.device, *, compiled: bool) -> None:
    """Raise if ``run.fp8`` asks for what the run cannot have.

    Args:
      compiled: the blocks go through torch.compile.
    Raises: RecipeError.
    """
    run = recipe.run
    if run.fp8 == "none":
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    has_fp8 = capability is not None and capability >= LEAST_CAPABILITY
    found = ".".join(map(str, capability)) if capability else "none"
    problems = {
        f"it is for run.precision 'bf16', not '{run.precision}'. Set that": run.precision != "bf16",
        f"adapters (lora.rank {recipe.lora.rank}) have layers of their own. Train all weights": recipe.lora.rank > 0,
        "DeepSpeed has an engine of its own. Use parallel.strategy 'fsdp'": choose_strategy(recipe.parallel, ranks)
        == "deepspeed",
        f"device '{device}' has compute capability {found}, needed 8.9 or higher (Ada, Hopper). Use such a GPU": (
            not has_fp8
        ),
        "scales are slow unless they are compiled into the blocks. Set run.compile to true": not compiled,
    }
    if problem := next((problem for problem, is_so in problems.items() if is_so), None):
        raise RecipeError(f"run.fp8 '{run.fp8}': {problem}, or run.fp8 to 'none'.")
    if find_spec("torchao") is None:
        raise RecipeError(
            f"run.fp8 '{run.fp8}': it needs the package 'torchao', which is not installed. Install leandit with its "
            "extra 'optimizers', or set run.fp8 to 'none'."
        )


def use_fp8(model: Denoiser, kind: str, *, emulate: bool = False) -> None:
    """Compute the linear layers of tokens in the blocks in FP8; call it before they are compiled or sharded.

    Args:
      kind: of scales, as torchao names them.
      emulate: compute on numbers that are rounded to FP8, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Tokens are padded where their number is not a multiple: the product that gives a weight's gradient sums over them.
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(kind), pad_inner_dim=True, emulate=emulate)
    for block in model.blocks:
        convert_to_float8_training(block, config=config, module_filter_fn=_takes_fp8)
        for layer in fp8_layers(block).values():
            layer.register_forward_pre_hook(_dense)


def fp8_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that have been converted, by name."""
    from torchao.float8.float8_linear import Float8Linear

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Float8Linear)}


def _dense(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Numbers with a scale a row cannot be reshaped by a copy, as those of transposed tokens would be."""
    return inputs[0].contiguous()


def _takes_fp8(layer: nn.Module, name: str) -> bool:
    """Whether a layer of a block, by its name in it, is converted."""
    if type(layer) is not nn.Linear or name.split(".")[0] in MODULATIONS:
        return False
    return layer.in_features % SIDE == 0 and layer.out_features % SIDE == 0
