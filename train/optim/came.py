"""CAME: Adam with a second moment kept as row and column means, and a confidence in each step kept the same way.

Source: Luo et al. 2023, "CAME: Confidence-guided Adaptive Memory Efficient Optimization", algorithm 2; as in Sana,
matrices and 1x1 convolutions are factored. Library versions factor every tensor by its last two dimensions, which saves
nothing for a 1x1 convolution, and do not support sharded parameters.
"""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false
# (torch names its foreach functions with a leading underscore)

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .state import is_sharded

SQUARE_EPS, CONFIDENCE_EPS = 1e-30, 1e-16  # added to squared gradients and to squared residuals; as published
CLIP_THRESHOLD = 1.0  # largest root mean square of an update; as published
CHUNK = 2**26  # elements of parameters updated at once, with three temporary tensors of that size


class Came(torch.optim.Optimizer):
    """The optimizer.

    Args:
      params: parameters or groups of them; plain or sharded tensors.
      betas: decay of the update, of the squared gradient and of the squared residual.
      weight_decay: decoupled, as AdamW's.
    """

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have a gradient."""
        assert closure is None, "the loss is computed before"
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None]
            for parameter in ready:
                if not self.state[parameter]:
                    self.state[parameter] |= _new_state(parameter)
            for factored in (True, False):
                for chunk in _chunks([p for p in ready if is_factored(p.shape) == factored]):
                    (self._step_matrices if factored else self._step_others)(group, chunk)

    def _step_matrices(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        fast, second, third = group["betas"]
        gradients = [_as_matrix(p.grad) for p in parameters]

        updates = _squares(gradients, SQUARE_EPS)
        self._follow("exp_avg_sq", parameters, updates, 1 - second)
        updates = self._inverse_roots("exp_avg_sq", parameters)
        torch._foreach_mul_(updates, gradients)
        _clip(updates)
        average = [_as_matrix(self.state[p]["exp_avg"]) for p in parameters]
        torch._foreach_lerp_(average, updates, 1 - fast)

        # The confidence in an update falls with its distance from the average.
        torch._foreach_sub_(updates, average)
        self._follow("exp_avg_res", parameters, _squares(updates, CONFIDENCE_EPS), 1 - third)
        updates = self._inverse_roots("exp_avg_res", parameters)
        torch._foreach_mul_(updates, average)
        _apply(group, [_as_matrix(p) for p in parameters], updates)

    def _step_others(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        fast, second, _ = group["betas"]
        gradients = [p.grad for p in parameters if p.grad is not None]
        moments, average = ([self.state[p][field] for p in parameters] for field in ("exp_avg_sq", "exp_avg"))
        torch._foreach_lerp_(moments, _squares(gradients, SQUARE_EPS), 1 - second)
        roots: Any = torch._foreach_sqrt(moments)
        updates = list(torch._foreach_div(gradients, roots))
        _clip(updates)
        torch._foreach_lerp_(average, updates, 1 - fast)
        _apply(group, parameters, average)

    def _follow(self, name: str, parameters: list[Tensor], values: list[Tensor], weight: float) -> None:
        """Update the moving averages of row and column means."""
        for field, dim in ((f"{name}_row", 1), (f"{name}_col", 0)):
            factors = [self.state[p][field] for p in parameters]
            means = [_placed_like(value.mean(dim), factor) for value, factor in zip(values, factors, strict=True)]
            torch._foreach_lerp_(factors, means, weight)

    def _inverse_roots(self, name: str, parameters: list[Tensor]) -> list[Tensor]:
        """One over the root of rows times columns over the mean, (N, M) each (Shazeer, Stern 2018, algorithm 2)."""
        roots = []
        for parameter in parameters:
            row, column = self.state[parameter][f"{name}_row"], self.state[parameter][f"{name}_col"]
            roots.append((row / row.mean()).rsqrt()[:, None] * column.rsqrt()[None, :])
        return roots


def is_factored(shape: Sequence[int]) -> bool:
    """Matrices and 1x1 convolutions."""
    return len(shape) == 2 or (len(shape) == 4 and tuple(shape[2:]) == (1, 1))


def _new_state(parameter: Tensor) -> dict[str, Tensor]:
    state = {"exp_avg": torch.zeros_like(parameter)}
    if not is_factored(parameter.shape):
        return state | {"exp_avg_sq": torch.zeros_like(parameter)}
    for name in ("exp_avg_sq", "exp_avg_res"):
        for field, kept in ((f"{name}_row", 0), (f"{name}_col", 1)):
            zeros = torch.zeros_like(_as_matrix(parameter).mean(1 - kept))
            if is_sharded(parameter):  # a factor is sharded along its own axis, else replicated
                from torch.distributed.tensor import Replicate, Shard

                assert is_sharded(zeros)
                places = [Shard(0) if place.is_shard(kept) else Replicate() for place in parameter.placements]
                zeros = zeros.redistribute(placements=places)
            state[field] = zeros
    return state


def _placed_like(value: Tensor, like: Tensor) -> Tensor:
    return value.redistribute(placements=like.placements) if is_sharded(value) else value  # type: ignore


def _as_matrix(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor if tensor.ndim == 2 else tensor.view(tensor.shape[:2])


def _squares(tensors: list[Any], eps: float) -> list[Tensor]:
    squares = list(torch._foreach_mul(tensors, tensors))
    torch._foreach_add_(squares, eps)
    return squares


def _clip(updates: list[Tensor]) -> None:
    """Bound the root mean square of each update."""
    norms = [n.full_tensor() if is_sharded(n) else n for n in torch._foreach_norm(updates)]
    torch._foreach_div_(norms, [CLIP_THRESHOLD * math.sqrt(update.numel()) for update in updates])
    torch._foreach_clamp_min_(norms, 1.0)
    torch._foreach_div_(updates, norms)


def _apply(group: dict[str, Any], parameters: list[Tensor], updates: list[Tensor]) -> None:
    if group["weight_decay"]:
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_add_(parameters, updates, alpha=-group["lr"])


def _chunks(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of at most ``CHUNK`` elements, or of one parameter."""
    chunk, size = [], 0
    for parameter in parameters:
        if chunk and size + parameter.numel() > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(parameter)
        size += parameter.numel()
    if chunk:
        yield chunk
