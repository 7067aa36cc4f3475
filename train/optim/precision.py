"""The precision of forward and backward: dtype of autocast, loss scale of float16, TF32, linear layers in FP8.

The loss scale lifts small gradients into the range of 16 bits; updates that overflow are skipped. It stays on the
device. torch's GradScaler is not used: but for fused optimizers it waits for the device in every step, and it searches
this rank's gradients for infinities, which the norm of all ranks' gradients, computed anyway, already shows.

FP8 is torchao's: products of 8-bit floats, scaled at each use. Weights, gradients and optimizer stay as they are and
keep their names, so checkpoints do not depend on it.

Sources: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; Micikevicius et al. 2022, "FP8 Formats for
Deep Learning", arXiv 2209.05433.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import RecipeError
from ..config import TrainRecipe
from ..models.build import Denoiser, has_convolutions
from ..models.roles import layers_of
from ..models.spec import ModelSpec

FIRST_SCALE = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_STEPS = 2000  # updates without overflow before the scale grows
SMALLEST_SCALE = 2.0**-10  # below it the model itself overflows
LEAST_CAPABILITY = (8, 9)  # for FP8: Ada, then Hopper and Blackwell
SIDE = 16  # FP8 kernels take matrices whose sides are multiples of it


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Dtype of autocast or None; bf16 only on a GPU that has it: a CPU is ten times slower with it."""
    if precision == "fp16":
        return torch.float16
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision == "bf16" and has_bf16 else None


def set_precision(recipe: TrainRecipe, spec: ModelSpec) -> None:
    """Precision of float32 products on a GPU, and whether cuDNN times convolutions, once for each new shape."""
    # Layers that stay float32 under autocast, such as the time embedding, need its precision.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = recipe.run.precision == "tf32"
    torch.backends.cudnn.benchmark = has_convolutions(spec)


class LossScale:
    """A power of two that the loss is multiplied by, and the gradients are divided by.

    Args:
      device: of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), FIRST_SCALE, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, found_inf: Tensor) -> None:
        """Halve the scale after an overflow, double it after many updates without.

        Args:
          found_inf: () float32, 1 where a gradient was not finite, else 0.
        """
        update = torch._amp_update_scale_  # pyright: ignore[reportPrivateImportUsage]
        update(self.scale, self._good_steps, found_inf, GROWTH, BACKOFF, GROWTH_STEPS)

    def value(self) -> float:
        """The scale, from the device."""
        return self.scale.item()

    def state_dict(self) -> dict[str, Any]:
        """JSON values; the scale is a power of two, so exact."""
        return {"scale": self.value(), "good_steps": int(self._good_steps.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo ``state_dict``."""
        self.scale.fill_(state["scale"])
        self._good_steps.fill_(state["good_steps"])


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
    """Compute the hidden linear layers of the blocks in FP8; call it before they are compiled or sharded.

    Args:
      kind: of scales, as torchao names them.
      emulate: compute on numbers that are rounded to FP8, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    hidden = set(layers_of(model, "hidden").values())

    def takes_fp8(layer: nn.Module, _: str) -> bool:
        """Modulations do not: their rows are images, which are few."""
        if type(layer) is not nn.Linear or layer not in hidden:
            return False
        return layer.in_features % SIDE == 0 and layer.out_features % SIDE == 0

    # Tokens are padded where their number is not a multiple: the product that gives a weight's gradient sums over them.
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(kind), pad_inner_dim=True, emulate=emulate)
    for block in model.blocks:
        convert_to_float8_training(block, config=config, module_filter_fn=takes_fp8)
        for layer in block.modules():
            if isinstance(layer, Float8Linear):  # numbers with a scale a row cannot be reshaped by a copy
                layer.register_forward_pre_hook(lambda _, inputs: inputs[0].contiguous())
