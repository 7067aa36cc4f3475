"""The dtype of forward and backward, and the loss scale of float16.

The scale lifts small gradients into the range of 16 bits; updates that overflow are skipped. It stays on the device.
torch's GradScaler is not used: but for fused optimizers it waits for the device in every step, and it searches this
rank's gradients for infinities, which the norm of all ranks' gradients, computed anyway, already shows.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FIRST_SCALE = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_STEPS = 2000  # updates without overflow before the scale grows
SMALLEST_SCALE = 2.0**-10  # below it the model itself overflows


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


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Dtype of autocast or None; bf16 only on a GPU that has it: a CPU is ten times slower with it."""
    if precision == "fp16":
        return torch.float16
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision == "bf16" and has_bf16 else None
