"""How numbers are computed: precision that holds whatever autocast does, and linear layers on a CPU by oneDNN.

torch computes float32 products by MKL, which reaches half of the speed of oneDNN on CPUs that are not Intel's.
Shapes: K inputs, N outputs, any leading axes.
"""

# pyright: reportIncompatibleMethodOverride=false
# (torch declares the arguments of an autograd function as *args)

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


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


def has_onednn() -> bool:
    """Whether this torch has the operation, and ``torch.backends.mkldnn.enabled``."""
    return bool(torch.backends.mkldnn.enabled) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def use_onednn(model: nn.Module) -> None:
    """Run the linear layers of a model by oneDNN if available; parameters keep their names."""
    if not has_onednn():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


class OneDnnLinear(nn.Linear):
    """torch's linear layer, with oneDNN for float32 on a CPU outside of autocast. Once differentiable."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        plain = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu"
        if not plain or torch.is_autocast_enabled("cpu") or not x.numel():
            return super().forward(x)
        return _Products.apply(x, weight, self.bias)  # pyright: ignore[reportReturnType]


class _Products(torch.autograd.Function):
    """(..., K), weights (N, K), bias (N,) or None to (..., N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        for_x, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            _product(gradient, weight.t(), None) if for_x else None,
            # oneDNN would make this copy itself, in memory that torch does not count.
            _product(rows.t().contiguous(), x.reshape(-1, x.shape[-1]).t(), None) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
