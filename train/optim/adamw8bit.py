"""AdamW whose moments are held in 8 bits, a scale for each 256 of them: torchao's, behind the loop's float rates.

torchao and not bitsandbytes: it also takes parameters that are sharded (FSDP2), and its kernels are compiled for every
device. Both quantise alike (Dettmers et al. 2021, block-wise dynamic quantisation).
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """torchao tells of extensions that it does not find, which nobody here calls."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


with _without_noise():
    import torchao.optim
    from torchao.optim.subclass_8bit import OptimState8bit

warnings.filterwarnings("ignore", message="OptimState8bit does not implement _stable_hash_for_caching")


class AdamW8bit(torchao.optim.AdamW8bit):
    """torchao's optimizer, with learning rates that are plain numbers between steps.

    On a CPU it runs without being compiled: that would take a second and more for each shape of a parameter.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self._rates = [
            group["lr"] for group in self.param_groups
        ]  # tensors: a number would be part of what is compiled
        for group, rate in zip(self.param_groups, self._rates, strict=True):
            group["lr"] = float(rate)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have a gradient."""
        numbers = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, self._rates, strict=True):
            group["lr"] = rate.fill_(group["lr"])
        on_gpu = any(p.device.type == "cuda" for group in self.param_groups for p in group["params"])
        with contextlib.nullcontext() if on_gpu else torch.compiler.set_stance("force_eager"):
            super().step(closure)
        for group, number in zip(self.param_groups, numbers, strict=True):
            group["lr"] = number

    def parts(self, value: Tensor) -> dict[str, Tensor]:
        """What a field of the state is written as: codes and scales, or numbers where it is sharded.

        The blocks of a sharded moment are those of one number of processes, so its numbers are what others can read.
        """
        if isinstance(value, DTensor) and isinstance(local := value.to_local(), OptimState8bit):
            numbers, like = local.dequantize(), {"shape": value.shape, "stride": value.stride()}
            return {"": DTensor.from_local(numbers, value.device_mesh, value.placements, **like)}
        if isinstance(value, OptimState8bit):
            return {"/codes": value.codes, "/scale": value.scale}
        return {"": value}

    def join(self, parameter: Tensor, field: str, parts: dict[str, Tensor]) -> Tensor:
        """Undo ``parts``: the same bits of codes and scales, or the nearest of numbers.

        Args:
          field: "exp_avg" or "exp_avg_sq".
        """
        buffer = self._new_buffer(parameter, signed=field == "exp_avg")
        if "" in parts:
            buffer.copy_(parts[""])
        else:
            assert isinstance(buffer, OptimState8bit), "codes of a parameter that is held in numbers"
            buffer.codes.copy_(parts["/codes"])
            buffer.scale.copy_(parts["/scale"])
        return buffer
