"""What the model learns: DDPM with learned variance, and flow matching. Pure functions of latents, noise and time.

Sign and direction, once and for all: t = 0 is data, t = 1 is noise, and the velocity of "flow" is noise - data (as in
Sana, SD3 and Flux; SiT and LightningDiT run the other way). The model is given its time as t * 1000.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .config import ObjectiveSection

TRAIN_STEPS = 1000
BETA_START, BETA_END = 1e-4, 0.02  # DDPM's linear schedule (Ho et al. 2020, section 4), as DiT and PixArt use it

Predict = Callable[[Tensor, Tensor], Tensor]
"""(noisy latents (B, C, H, W), time (B,) in 0..1000) -> the model's output."""


def draw_times(section: ObjectiveSection, count: int, generator: torch.Generator) -> Tensor:
    """Times of a batch, (B,) float32: whole numbers 0..999 for "ddpm", 0..1 for "flow"."""
    device = generator.device
    if section.kind == "ddpm":
        return torch.randint(TRAIN_STEPS, (count,), generator=generator, device=device).float()
    if section.time == "uniform":
        t = torch.rand(count, generator=generator, device=device)
    else:  # logit-normal (Esser et al. 2024, equation 19, with location 0 and scale 1)
        t = torch.randn(count, generator=generator, device=device).sigmoid()
    return section.shift * t / (1 + (section.shift - 1) * t)  # Esser et al. 2024, equation 23


def loss_per_image(section: ObjectiveSection, predict: Predict, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Loss of each image.

    Args:
      predict: the model.
      x: (B, C, H, W) float32 latents.
      noise: (B, C, H, W) standard normal.
      t: (B,) from ``draw_times``.
    Returns: (B,) float32.
    """
    return (_ddpm_loss if section.kind == "ddpm" else _flow_loss)(predict, x, noise, t)


def _flow_loss(predict: Predict, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Mean squared error of the velocity along the straight path (Lipman et al. 2023, equation 23)."""
    weight = t[:, None, None, None]
    velocity = predict((1 - weight) * x + weight * noise, t * TRAIN_STEPS).float()
    return (velocity - (noise - x)).square().flatten(1).mean(1)


def _ddpm_loss(predict: Predict, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Noise error plus the variational bound of the variance, its mean held fixed (Nichol, Dhariwal 2021, eq. 16)."""
    schedule = ddpm_schedule(x.device)
    at = t.long()
    alpha_bar = schedule["alpha_bar"][at][:, None, None, None]
    x_t = alpha_bar.sqrt() * x + (1 - alpha_bar).sqrt() * noise
    output = predict(x_t, t).float()
    epsilon, variance = output.chunk(2, dim=1)
    error = (epsilon - noise).square().flatten(1).mean(1)
    return error + variational_bound(schedule, x, x_t, at, epsilon.detach(), variance)


def ddpm_schedule(device: torch.device) -> dict[str, Tensor]:
    """The linear schedule's tables, each (1000,) float32."""
    beta = torch.linspace(BETA_START, BETA_END, TRAIN_STEPS, dtype=torch.float64)
    alpha_bar = torch.cumprod(1 - beta, 0)
    before = torch.cat([torch.ones(1, dtype=torch.float64), alpha_bar[:-1]])
    posterior = beta * (1 - before) / (1 - alpha_bar)  # Ho et al. 2020, equation 7
    posterior[0] = posterior[1]  # is zero there, and its logarithm is wanted
    tables = {
        "alpha_bar": alpha_bar,
        "log_beta": beta.log(),
        "log_posterior": posterior.log(),
        "mean_x": beta * before.sqrt() / (1 - alpha_bar),
        "mean_x_t": (1 - before) * (1 - beta).sqrt() / (1 - alpha_bar),
    }
    return {name: table.float().to(device) for name, table in tables.items()}


def variational_bound(
    schedule: dict[str, Tensor], x: Tensor, x_t: Tensor, at: Tensor, epsilon: Tensor, variance: Tensor
) -> Tensor:
    """One term of the bound, in bits per dimension: KL to the true posterior, or the decoder's likelihood at t = 0.

    Args:
      at: (B,) int64 step.
      epsilon: (B, C, H, W) predicted noise.
      variance: (B, C, H, W) model output, -1..1 between the smallest and the largest log-variance.
    Returns: (B,).
    Source: Nichol and Dhariwal 2021, equation 15; Ho et al. 2020, equations 7 and 13.
    """

    def table(name: str) -> Tensor:
        return schedule[name][at][:, None, None, None]

    true_mean = table("mean_x") * x + table("mean_x_t") * x_t
    alpha_bar = table("alpha_bar")
    predicted_x = (x_t - (1 - alpha_bar).sqrt() * epsilon) / alpha_bar.sqrt()
    mean = table("mean_x") * predicted_x + table("mean_x_t") * x_t
    share = (variance + 1) / 2
    log_variance = share * table("log_beta") + (1 - share) * table("log_posterior")
    true_log_variance = table("log_posterior")
    kl = 0.5 * (
        log_variance
        - true_log_variance
        - 1
        + (true_log_variance - log_variance).exp()
        + (true_mean - mean).square() * (-log_variance).exp()
    )
    likelihood = -discretized_log_likelihood(x, mean, 0.5 * log_variance)
    nats = torch.where((at == 0)[:, None, None, None], likelihood, kl)
    return nats.flatten(1).mean(1) / math.log(2)


def discretized_log_likelihood(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-probability of 8-bit values in -1..1 under a Gaussian (Ho et al. 2020, equation 13); elementwise."""
    centred, inverse_std = x - mean, (-log_std).exp()
    upper = torch.special.ndtr(inverse_std * (centred + 1 / 255))
    lower = torch.special.ndtr(inverse_std * (centred - 1 / 255))
    smallest = 1e-12
    inside = (upper - lower).clamp_min(smallest).log()
    return torch.where(
        x < -0.999,
        upper.clamp_min(smallest).log(),
        torch.where(x > 0.999, (1 - lower).clamp_min(smallest).log(), inside),
    )
