"""How the times of a flow are shifted towards noise: by a number, or by the size of an image as pipelines do it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Rule = Literal["constant", "tokens", "tokens and steps"]
FLOW_MATCHING = "FlowMatch"  # how the names of diffusers' schedulers begin that are for flows alone

# FLUX.2's mu is linear in the image tokens at 10 and at 200 steps, and linear in the steps between (and beyond) them.
# Beyond 4300 tokens it is that of 200 steps. Source: ``compute_empirical_mu`` in diffusers' pipeline_flux2.py.
MU_10_SLOPE, MU_10_START = 8.73809524e-05, 1.89833333
MU_200_SLOPE, MU_200_START = 0.00016927, 0.45666666
MOST_TOKENS_BY_STEPS = 4300


@dataclass(frozen=True)
class TimeShift:
    """A shift t' = s t / (1 + (s - 1) t) of times from 0 (data) to 1 (noise) (Esser et al. 2024, equation 23).

    Args:
      rule: s is "constant", or exp(mu) with mu by the image tokens, or by them and the steps of the solver (FLUX.2).
      constant: s of "constant".
      base, most: mu of "tokens" at ``base_tokens`` and at ``most_tokens``, between and beyond which it is linear.
      is_exponential: else s is mu itself.
      terminal: time of the last step, to which all times are stretched; 0: they are not.
    """

    rule: Rule = "constant"
    constant: float = 1.0
    base: float = 0.5
    most: float = 1.15
    base_tokens: int = 256
    most_tokens: int = 4096
    is_exponential: bool = True
    terminal: float = 0.0

    def at(self, tokens: int, steps: int) -> float:
        """The shift s.

        Args:
          tokens: of the image, without those of captions and of a reference.
          steps: of the solver.
        """
        if self.rule == "constant":
            return self.constant
        mu = self._mu_by_steps(tokens, steps) if self.rule == "tokens and steps" else self._mu(tokens)
        return math.exp(mu) if self.is_exponential else mu

    def _mu(self, tokens: int) -> float:
        slope = (self.most - self.base) / (self.most_tokens - self.base_tokens)
        return self.base + slope * (tokens - self.base_tokens)

    def _mu_by_steps(self, tokens: int, steps: int) -> float:
        at_200 = MU_200_SLOPE * tokens + MU_200_START
        if tokens > MOST_TOKENS_BY_STEPS:
            return at_200
        at_10 = MU_10_SLOPE * tokens + MU_10_START
        return at_200 + (at_200 - at_10) / 190 * (steps - 200)


def parse_scheduler(text: str) -> dict[str, Any]:
    """The content of a scheduler_config.json of diffusers, ``_class_name`` included.

    JSON has no infinite numbers, which diffusers writes nevertheless (``lambda_min_clipped`` of DPM-Solver++): they are
    the defaults of its classes, so they are left out.

    Raises: ValueError: it is no JSON object; RecursionError.
    """
    config = json.loads(text)
    if not isinstance(config, dict):
        raise ValueError("expected a JSON object")
    arguments: dict[str, Any] = {}
    for key, value in config.items():
        is_private = key.startswith("_") and key != "_class_name"
        is_infinite = isinstance(value, float) and not math.isfinite(value)
        if not is_private and not is_infinite:
            arguments[key] = value
    return arguments


def is_of_flow(scheduler: Mapping[str, Any]) -> bool:
    """Whether the config of a scheduler is of a flow, not of a diffusion process."""
    name = str(scheduler.get("_class_name"))
    return name.startswith(FLOW_MATCHING) or bool(scheduler.get("use_flow_sigmas"))


def scheduler_shift(scheduler: Mapping[str, Any], by_size: TimeShift | None) -> TimeShift | None:
    """The shift of the config of a scheduler, or None if it is of no flow.

    Args:
      scheduler: with ``_class_name``.
      by_size: what the pipeline computes from the size of an image, for one with ``use_dynamic_shifting``.
    Raises: ValueError: a key is not a number, or out of range.
    """
    if not is_of_flow(scheduler):
        return None
    is_flow_matching = str(scheduler.get("_class_name")).startswith(FLOW_MATCHING)
    terminal = _number(scheduler, "shift_terminal", 0.0, low=0, high=0.999)
    if not scheduler.get("use_dynamic_shifting"):
        key = "shift" if is_flow_matching else "flow_shift"
        return TimeShift(constant=_number(scheduler, key, 1.0, low=1e-3, high=1e3), terminal=terminal)
    base_tokens = _number(scheduler, "base_image_seq_len", 256, low=1, high=1e6)
    return TimeShift(
        rule=by_size.rule if by_size else "tokens",
        base=_number(scheduler, "base_shift", 0.5, low=-10, high=10),
        most=_number(scheduler, "max_shift", 1.15, low=-10, high=10),
        base_tokens=int(base_tokens),
        most_tokens=int(_number(scheduler, "max_image_seq_len", 4096, low=base_tokens + 1, high=1e6)),
        is_exponential=scheduler.get("time_shift_type", "exponential") != "linear",
        terminal=terminal,
    )


def _number(scheduler: Mapping[str, Any], key: str, default: float, *, low: float, high: float) -> float:
    """A number of a config; null is the default."""
    value = scheduler.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{key} is {str(value)[:80]!r}, expected a number from {low:g} to {high:g}")
    return float(value)
