"""Muon for the hidden matrices and AdamW for the rest, as one optimizer.

Muon makes every step of a matrix orthogonal, so it is for matrices that map hidden activations to hidden activations
(Jordan et al. 2024): the linear layers whose role is "hidden" (``models/roles.py``). AdamW updates modulations,
embeddings, heads, projectors, convolutions, biases and norms. Steps are scaled to the size of AdamW's, so that both
share one learning rate (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2).

``torch.optim.Muon`` computes the same; of a sharded matrix its iteration would communicate at each of its products.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..models.roles import layers_of
from .state import is_sharded, sharded_like

IS_MUON = "muon"  # key of a group
MOMENTUM = "momentum_buffer"
QUINTIC, ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # as published
SIZE = 0.2  # root mean square of AdamW's steps


class MuonWithAdamW(torch.optim.AdamW):
    """AdamW, with Muon for some groups.

    Args:
      groups: each with ``muon``, true for a group of matrices that Muon updates.
      momentum: of Muon.
      options: of AdamW; both have its learning rate and weight decay.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self._momentum = momentum
        self._step_supports_amp_scaling = False  # matrices do not skip on the device, as the fused kernel does

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have a gradient."""
        assert closure is None, "the loss is computed before"
        groups = self.param_groups
        for group in groups:
            for parameter in group["params"] if group[IS_MUON] else ():
                if parameter.grad is not None:
                    self._step_matrix(group, parameter, parameter.grad)
        try:
            self.param_groups = [group for group in groups if not group[IS_MUON]]
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrix(self, group: dict[str, Any], matrix: Tensor, gradient: Tensor) -> None:
        if MOMENTUM not in self.state[matrix]:
            self.state[matrix][MOMENTUM] = torch.zeros_like(matrix)
        average = self.state[matrix][MOMENTUM]
        average.lerp_(gradient, 1 - self._momentum)
        update = orthogonal(gradient.lerp(average, self._momentum))
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(update, alpha=-group["lr"] * SIZE * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly the nearest orthogonal matrix, by Newton and Schulz's iteration in bf16.

    A sharded matrix is gathered once, and every rank computes the whole, as with DDP.
    """
    if is_sharded(matrix):
        return sharded_like(orthogonal(matrix.full_tensor()), matrix)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16().T if is_tall else matrix.bfloat16()
    x = x / x.norm().clamp(min=EPS)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        square = x @ x.T
        polynomial = torch.addmm(square, square, square, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return (x.T if is_tall else x).to(matrix.dtype)


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the weights that Muon updates: those of the linear layers whose role is "hidden"."""
    hidden = layers_of(model, "hidden")
    return {f"{name}.weight" for name, layer in hidden.items() if isinstance(layer, nn.Linear)}
