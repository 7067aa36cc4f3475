"""torchao's AdamW with 8-bit moments and a scale for every 256 of them.

torchao rather than bitsandbytes: it supports sharded parameters (FSDP2), and compiles its kernels for every device.
Both quantise alike (Dettmers et al. 2021, block-wise dynamic quantisation).
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
    """Silence torchao's warnings about missing extensions that are not used here."""
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

    On a CPU it runs eagerly: compilation takes more than a second for each shape of a parameter.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self._rates = [
            group["lr"] for group in self.param_groups
        ]  # tensors: torch would compile a number as a constant
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
        """A field of the state as tensors: codes and scales, or numbers if it is sharded.

        The blocks of a sharded moment depend on the number of processes, its numbers do not.
        """
        if isinstance(value, DTensor) and isinstance(local := value.to_local(), OptimState8bit):
            numbers, like = local.dequantize(), {"shape": value.shape, "stride": value.stride()}
            return {"": DTensor.from_local(numbers, value.device_mesh, value.placements, **like)}
        if isinstance(value, OptimState8bit):
            return {"/codes": value.codes, "/scale": value.scale}
        return {"": value}

    def join(self, parameter: Tensor, field: str, parts: dict[str, Tensor]) -> Tensor:
        """Undo ``parts``: exact for codes and scales, rounded for numbers.

        Args:
          field: "exp_avg" or "exp_avg_sq".
        """
        buffer = self._new_buffer(parameter, signed=field == "exp_avg")
        if "" in parts:
            buffer.copy_(parts[""])
        else:
            assert isinstance(buffer, OptimState8bit), "8-bit codes for a parameter that is not quantised"
            buffer.codes.copy_(parts["/codes"])
            buffer.scale.copy_(parts["/scale"])
        return buffer
