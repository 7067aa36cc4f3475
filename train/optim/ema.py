"""Averaged weights: float32 copies of the parameters that follow them.

How much of an average is kept at an update depends on the number of the step alone; where the optimizer has skipped
its update, an average does not move. Parameters that are sharded have averages that are sharded alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..config import TrainRecipe


class Rule(Protocol):
    """How an average follows."""

    @property
    def prefix(self) -> str:
        """Of the names of its weights, among those of several averages."""
        ...

    def kept(self, step: int) -> float:
        """Share of the old average that stays at the update that makes step ``step`` (the first is 1)."""
        ...


@dataclass(frozen=True)
class Exponential:
    """The same share at each step.

    Args:
      decay: the share.
    """

    decay: float
    prefix: str = ""

    def kept(self, step: int) -> float:
        return self.decay


@dataclass(frozen=True)
class Power:
    """Weights of step t count as t to a power, so that the average grows longer with the run.

    Args:
      length: standard deviation of the weights' place on the time axis, as a share of the run up to now.
    Source: Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3.1.
    """

    length: float

    @property
    def prefix(self) -> str:
        return f"{self.length:g}/"

    @property
    def exponent(self) -> float:
        """Gamma, from length^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)); the largest root of that cubic."""
        inverse = self.length**-2
        return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())

    def kept(self, step: int) -> float:
        return (1 - 1 / step) ** (self.exponent + 1)


class HasParameters(Protocol):
    """A model, as far as averages care."""

    def parameters(self) -> Iterator[Any]:
        """Its parameters."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Its parameters, with their names."""
        ...


class Ema:
    """Moving averages of a model's parameters.

    Args:
      model: all begin as a copy of its parameters.
      rules: one for each average; the first is the one that snapshots hold.
    """

    def __init__(self, model: HasParameters, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self.averages = [{name: p.detach().clone().float() for name, p in model.named_parameters()} for _ in self.rules]

    @torch.no_grad()
    def update(self, model: HasParameters, step: int, skipped: Tensor | None = None) -> None:
        """Move the averages towards the model: average += (1 - kept) * (weights - average).

        Args:
          step: that the model has just made; the first is 1.
          skipped: () float32, 1 where the optimizer has left the update out, else 0; None: it never does. It stays on
            its device: as the weight of the interpolation it is read there.
        """
        parameters = [_local(p.detach()).float() for p in model.parameters()]
        for rule, average in zip(self.rules, self.averages, strict=True):
            weights, share = [_local(weight) for weight in average.values()], 1 - rule.kept(step)
            moved = share if skipped is None else [(1 - skipped) * share] * len(weights)
            torch._foreach_lerp_(weights, parameters, moved)  # pyright: ignore[reportPrivateImportUsage]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The first average, by parameter name."""
        return self.averages[0]

    def state_dict(self) -> dict[str, Tensor]:
        """All averages, by the prefix of the rule and the parameter's name."""
        both = zip(self.rules, self.averages, strict=True)
        return {f"{rule.prefix}{name}": weight for rule, average in both for name, weight in average.items()}


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of a sharded tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build_rules(recipe: TrainRecipe) -> list[Rule]:
    """How the averages of a recipe follow."""
    if recipe.ema.kind == "exponential":
        return [Exponential(recipe.run.ema_decay)]
    return [Power(length) for length in recipe.ema.lengths]
