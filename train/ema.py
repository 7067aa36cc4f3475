"""Averaged weights: a float32 copy of the parameters that follows them, updated in one fused call."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Ema:
    """Exponential moving average of a model's parameters.

    Args:
      model: begins as a copy of its parameters.
      decay: share of the old average kept at each update.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: p.detach().clone().float() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the model: average += (1 - decay) * (weights - average)."""
        weights, parameters = list(self.weights.values()), [p.detach() for p in model.parameters()]
        torch._foreach_lerp_(weights, parameters, 1 - self.decay)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def copy_from(self, model: nn.Module) -> None:
        """Begin anew from the parameters of the model."""
        for weight, parameter in zip(self.weights.values(), model.parameters(), strict=True):
            weight.copy_(parameter)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights by parameter name."""
        return self.weights

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take the averaged weights from a checkpoint."""
        for name, weight in self.weights.items():
            weight.copy_(state[name])
