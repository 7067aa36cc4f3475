"""torchao's AdamW with 8-bit moments and a scale for every 256 of them.

torchao rather than bitsandbytes: it supports sharded parameters (FSDP2), and compiles its kernels for every device.
Both quantize alike (Dettmers et al. 2021, block-wise dynamic quantization).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from ..models.diffusers.model import without_warnings
from .state import CODES, SCALE

with without_warnings():  # about missing extensions that are not used here
    import torchao.optim
    from torchao.optim.subclass_8bit import OptimState8bit

warnings.filterwarnings("ignore", message="OptimState8bit does not implement _stable_hash_for_caching")


class AdamW8bit(torchao.optim.AdamW8bit):
    """torchao's optimizer, whose learning rates are tensors: torch would compile a number as a constant.

    On a CPU it runs eagerly: compilation takes more than a second for each shape of a parameter.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have a gradient."""
        on_gpu = any(p.device.type == "cuda" for group in self.param_groups for p in group["params"])
        with contextlib.nullcontext() if on_gpu else torch.compiler.set_stance("force_eager"):
            super().step(closure)


def fit_moments(tensors: dict[str, Tensor], names: Iterable[str]) -> None:
    """Turn whole moments into codes and scales, or back into numbers, as the names of a state have them.

    Numbers are rounded: the blocks of a sharded moment, which is stored as numbers, depend on the number of ranks.

    Args:
      tensors: on the CPU, "<parameter>.<field>", with ".codes" and ".scale" or without; changed in place.
    """
    for name in names:
        moment, field = name.removesuffix(CODES), name.removesuffix(CODES).rpartition(".")[2]
        if name in tensors or not (name.endswith(CODES) or name + CODES in tensors):
            continue
        shape = tensors[moment if name.endswith(CODES) else moment + CODES].shape
        held = OptimState8bit.zeros(shape, signed=field == "exp_avg")
        if name.endswith(CODES) and held.scale.numel() * held.block_size == held.codes.numel():
            held.copy_(tensors.pop(moment))
            tensors |= {name: held.codes, moment + SCALE: held.scale}
        elif moment + SCALE in tensors and tensors[moment + SCALE].shape == held.scale.shape:
            held.codes.copy_(tensors.pop(moment + CODES))
            held.scale.copy_(tensors.pop(moment + SCALE))
            tensors[moment] = held.dequantize()
