"""Moving averages of the weights, in float32.

The decay of an update depends on the step alone; a skipped update does not change the averages. Averages are sharded
like their parameters.
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
    """Decay of an average."""

    @property
    def prefix(self) -> str:
        """Prefix of its weights' names, to tell several averages apart."""
        ...

    def kept(self, step: int) -> float:
        """Share of the old average that stays at the update that makes step ``step`` (the first is 1)."""
        ...


@dataclass(frozen=True)
class Exponential:
    """The same decay at each step."""

    decay: float
    prefix: str = ""

    def kept(self, step: int) -> float:
        return self.decay


@dataclass(frozen=True)
class Power:
    """Weights of step t count as t to a power, so that the average lengthens with the run.

    Args:
      length: standard deviation of the profile, as a share of the run so far.
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
    """A model, as averages use it."""

    def parameters(self) -> Iterator[Any]:
        """Its parameters."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Its parameters, with their names."""
        ...


class Ema:
    """Moving averages of a model's parameters.

    Args:
      model: its parameters are the initial averages.
      rules: one for each average; snapshots hold the first.
    """

    def __init__(self, model: HasParameters, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self.averages = [{name: p.detach().clone().float() for name, p in model.named_parameters()} for _ in self.rules]
        # Once, not in each step: of a sharded tensor it takes long. The model's own may be replaced by FSDP.
        self._local = [[local(weight) for weight in average.values()] for average in self.averages]

    @torch.no_grad()
    def update(self, model: HasParameters, step: int, skipped: Tensor | None = None) -> None:
        """Move the averages towards the model: average += (1 - kept) * (weights - average).

        Args:
          step: just made by the model; the first is 1.
          skipped: () float32 on the device, 1 if the optimizer skipped the update, else 0; None: never skipped.
        """
        parameters = [local(p.detach()).float() for p in model.parameters()]
        for rule, weights in zip(self.rules, self._local, strict=True):
            share = 1 - rule.kept(step)
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


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build_rules(recipe: TrainRecipe) -> list[Rule]:
    """The averages of a recipe."""
    if recipe.ema.kind == "exponential":
        return [Exponential(recipe.run.ema_decay)]
    return [Power(length) for length in recipe.ema.lengths]
