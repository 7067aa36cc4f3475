"""Moving averages of the weights, in float32.

The decay of an update depends on its step alone, so it is the same with every strategy and after a resume; a skipped
update does not change the averages. Averages are sharded like their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import TrainRecipe
from .state import local

NEGLIGIBLE = 1e-3


@dataclass(frozen=True)
class Exponential:
    """The same decay at each step, after a warm-up if there is one.

    Args:
      warmup: the decay of update n is at most (1 + n) / (10 + n), so that a young average covers about the last tenth
        of the run and soon forgets where it began.
    Source: of the warm-up, TensorFlow's ``ExponentialMovingAverage`` with ``num_updates``.
    """

    decay: float
    prefix: str = ""  # of its weights' names, to tell several averages apart
    warmup: bool = False

    def kept(self, step: int) -> float:
        """Share of the old average that stays at the update that makes step ``step`` (the first is 1)."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay


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
        """Prefix of its weights' names."""
        return f"{self.length:g}/"

    @property
    def exponent(self) -> float:
        """Gamma, from length^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)); the largest root of that cubic."""
        inverse = self.length**-2
        return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())

    def kept(self, step: int) -> float:
        """Share of the old average that stays."""
        return (1 - 1 / step) ** (self.exponent + 1)


Rule = Exponential | Power


def first_share(rule: Rule, steps: int) -> float:
    """Share of an average after some updates that is still the weights that it began with; 0 below a thousandth."""
    share = 1.0
    for step in range(1, steps + 1):
        share *= rule.kept(step)
        if share < NEGLIGIBLE:
            return 0.0
    return share


class Ema:
    """Moving averages of parameters.

    Args:
      parameters: by name, sharded or not; they are the initial averages.
      rules: one for each average; snapshots hold the first.
    """

    def __init__(self, parameters: Mapping[str, Tensor], rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self.averages = [{name: p.detach().clone().float() for name, p in parameters.items()} for _ in self.rules]
        # Once, not in each step: of a sharded tensor it takes long.
        self._parameters = [local(parameter.detach()) for parameter in parameters.values()]
        self._local = [[local(weight) for weight in average.values()] for average in self.averages]

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor | None = None) -> None:
        """Move the averages towards the parameters: average += (1 - kept) * (parameters - average).

        Args:
          step: just made; the first is 1.
          skipped: () float32 on the device, 1 if the optimizer skipped the update, else 0; None: never skipped.
        """
        parameters = [parameter.float() for parameter in self._parameters]
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


def build_rules(recipe: TrainRecipe) -> list[Rule]:
    """The averages of a recipe."""
    if recipe.ema.kind == "exponential":
        return [Exponential(recipe.run.ema_decay, warmup=recipe.ema.warmup)]
    return [Power(length) for length in recipe.ema.lengths]
