"""Precision that holds whatever autocast does."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Compute in the dtype of the inputs; a no-op on meta, which has no autocast."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def product_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast makes of matrix products on a device; None without it, as on meta, which has none."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def at_least_float32(x: Tensor) -> Tensor:
    """Widen 16 bits, leave float64."""
    return x if x.dtype == torch.float64 else x.float()
