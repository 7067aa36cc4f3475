"""Sampling of flow matching by its stochastic differential equation, with Euler-Maruyama.

With time t from 0 (data) to 1 (noise), x = (1 - t) data + t noise and velocity v = noise - data, the noise in x is
x + (1 - t) v in the mean, and the score is minus that over t. For any diffusion coefficient D(t) >= 0,

    dx = (-v + D(t) score) ds + sqrt(2 D(t)) dW,   s = 1 - t,

has the marginals of the flow. Source: Ma et al. 2024 (SiT, arXiv 2401.08740), section 3 and table 2, and its code,
whose time is s. REPA, REG and contrastive flow sample with D = t ("sigma") and the last step "mean".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..objectives.losses import TRAIN_STEPS

Diffusion = Literal["sigma", "linear", "constant", "decreasing", "increasing-decreasing"]
LastStep = Literal["mean", "euler", "tweedie"]
LAST_STEP = 0.04  # time at which the last step, without noise, begins; of SiT and REPA, whatever the number of steps


class Stepped(NamedTuple):
    """As diffusers' schedulers return it."""

    prev_sample: Tensor


class EulerMaruyama:
    """A scheduler with the calls of diffusers' that sampling uses.

    Args:
      shift: of the times towards noise, which are evenly spaced without it (1).
      diffusion: D(t). On this path "sigma" and "linear" are both t.
      last_step: without noise: "mean" by the drift above, "euler" by the velocity alone, "tweedie" to the mean of the
        data, which on this path is "euler".
    """

    def __init__(self, *, shift: float, diffusion: Diffusion, last_step: LastStep) -> None:
        self._shift, self._last_step = shift, last_step
        self._diffusion: Diffusion = diffusion
        self._times: list[float] = []
        self._index = 0

    @property
    def timesteps(self) -> Tensor:
        """Times of the steps in 0..1000, (steps,) float64."""
        return torch.tensor(self._times[:-1], dtype=torch.float64) * TRAIN_STEPS

    def set_timesteps(self, steps: int) -> None:
        """Begin to draw with so many steps, of which the last has no noise; at least 2."""
        shift = self._shift
        even = torch.linspace(1, LAST_STEP / (shift - (shift - 1) * LAST_STEP), steps, dtype=torch.float64)
        self._times = [*(shift * even / (1 + (shift - 1) * even)).tolist(), 0.0]
        self._index = 0

    def step(self, velocity: Tensor, _time: Tensor, x: Tensor, *, generator: Sequence[torch.Generator]) -> Stepped:
        """One step.

        Args:
          velocity, x: (B, ...) float32, at the time of this step.
          generator: one for each of the batch, on the CPU.
        """
        t, following = self._times[self._index : self._index + 2]
        self._index += 1
        width, is_last = t - following, not following
        if is_last and self._last_step != "mean":
            return Stepped(x - width * velocity)
        diffusion = diffusion_at(t, self._diffusion)
        score = -(x + (1 - t) * velocity) / t
        mean = x + width * (diffusion * score - velocity)
        if is_last:
            return Stepped(mean)
        noise = torch.stack([torch.randn(x.shape[1:], generator=one) for one in generator]).to(x.device)
        return Stepped(mean + math.sqrt(2 * diffusion * width) * noise)


def diffusion_at(t: float, form: Diffusion) -> float:
    """D(t) of SiT's forms, of norm 1; "SBDM" is left out, as it is infinite at t = 1."""
    match form:
        case "sigma" | "linear":
            return t
        case "constant":
            return 1.0
        case "decreasing":  # in SiT's time, from noise to data
            return 0.25 * (math.cos(math.pi * (1 - t)) + 1) ** 2
        case "increasing-decreasing":
            return math.sin(math.pi * t) ** 2
