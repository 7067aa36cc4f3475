"""What the model learns: DDPM and flow matching. Pure functions of latents, noise, time and the model's output.

Sign and direction, once and for all: t = 0 is data, t = 1 is noise, and the velocity of "flow" is noise - data (as in
Sana, SD3 and Flux; SiT and LightningDiT run the other way). The model is given its time as t * 1000. The "v" of DDPM
is signal * noise - noise_share * data (Salimans and Ho 2022), where x_t = signal * data + noise_share * noise. Nothing
here waits for the device.

All that is random in a step is a function of (seed, step, image) alone, drawn on the device. An image of a global batch
has the same draws on whichever rank it is, at whichever world size and microbatch: they are made for groups of
neighbors, and a rank makes the groups that its slice touches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ...datasets.order.shuffle import keyed_hash
from ..data_recipe import Objective

PLAIN = "plain"
TRAIN_STEPS = 1000
DROPPED = 0xD20  # key of the draws of dropped captions on the host, apart from those of the device
GROUP = 16  # images of a generator: enough to keep the device busy, few enough to waste little at a slice's ends
BETA_START, BETA_END = 1e-4, 0.02  # DDPM's linear schedule (Ho et al. 2020, section 4), as DiT and PixArt use it


def num_outputs(section: Objective, channels: int) -> int:
    """Channels that the model puts out for so many latent channels: twice as many where it learns its variance."""
    return channels * (2 if section.kind == "ddpm" and section.variance == "learned" else 1)


def draw_times(section: Objective, count: int, generator: torch.Generator) -> Tensor:
    """Times of a batch, (B,) float32: whole numbers 0..999 for "ddpm", 0..1 for "flow".

    Args:
      section: with a shift for the size of the batch, as ``objective_at`` makes it.
    """
    device = generator.device
    if section.kind == "ddpm":
        return torch.randint(TRAIN_STEPS, (count,), generator=generator, device=device).float()
    if section.time == "uniform":
        t = torch.rand(count, generator=generator, device=device)
    else:  # logit-normal (Esser et al. 2024, equation 19)
        normal = torch.randn(count, generator=generator, device=device)
        t = (section.time_mean + section.time_std * normal).sigmoid()
    assert section.shift != "resolution", "objective_at makes it a number"
    return section.shift * t / (1 + (section.shift - 1) * t)  # Esser et al. 2024, equation 23


def time_share(section: Objective, t: Tensor) -> Tensor:
    """Times of ``draw_times`` as shares of the way from data to noise, 0..1."""
    return t / TRAIN_STEPS if section.kind == "ddpm" else t


def noised(section: Objective, x: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """What the model sees: noisy latents (B, C, H, W), and their time (B,) in 0..1000.

    Args:
      x, noise: (B, C, H, W) float32 latents; standard normal.
      t: (B,) from ``draw_times``.
    """
    if section.kind == "flow":
        return on_path(x, noise, t), t * TRAIN_STEPS
    tables, at = ddpm_schedule(x.device), t.long()
    return _per_image(tables["signal"][at]) * x + _per_image(tables["noise_share"][at]) * noise, t


def on_path(x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """What lies at the times (B,) on the straight path from data to noise, (B, ...)."""
    share = t.view(-1, *[1] * (x.ndim - 1))
    return (1 - share) * x + share * noise


def objective_losses(section: Objective, output: Tensor, x: Tensor, noise: Tensor, t: Tensor) -> dict[str, Tensor]:
    """Plain loss of each image by the name ``PLAIN``, and the weighted loss of its direction.

    Args:
      output: (B, out_channels, H, W) float32 of the model, given ``noised(section, x, noise, t)``.
    Returns: (B,) float32 of each.
    """
    if section.kind == "ddpm":
        return {PLAIN: _ddpm_loss(section, output, x, noise, t)}
    losses = {PLAIN: velocity_error(output, noise - x)}
    if section.cosine_weight:
        losses["cosine"] = section.cosine_weight * direction_error(output, noise - x)
    return losses


def velocity_error(velocity: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of velocities (B, ...), (B,) (Lipman et al. 2023, equation 23)."""
    return (velocity.float() - target).square().flatten(1).mean(1)


def direction_error(velocity: Tensor, target: Tensor) -> Tensor:
    """1 - cosine between the channels of velocity and target, the mean over the places.

    Args:
      velocity, target: (B, C, H, W).
    Returns: (B,).
    Source: Yao et al. 2024 (FasterDiT), section 3.3; Yao and Wang 2025 (LightningDiT), section 4.
    """
    return (1 - F.cosine_similarity(velocity, target, dim=1)).flatten(1).mean(1)


def _ddpm_loss(section: Objective, output: Tensor, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Error of noise or v, weighted, plus the variational bound of the variance, its mean held fixed.

    The bound is not weighted: it moves the variance alone, whose best value no weight changes.
    Source: Nichol and Dhariwal 2021, equation 16.
    """
    tables, at = ddpm_schedule(x.device), t.long()
    signal, noise_share = _per_image(tables["signal"][at]), _per_image(tables["noise_share"][at])
    prediction, variance = output.chunk(2, dim=1) if section.variance == "learned" else (output, None)
    target = noise if section.predict == "epsilon" else signal * noise - noise_share * x
    error = (prediction - target).square().flatten(1).mean(1)
    if section.min_snr_gamma:
        error = error * min_snr_weight(section, tables["snr"][at])
    if variance is None:
        return error
    held, x_t = prediction.detach(), noised(section, x, noise, t)[0]
    epsilon = held if section.predict == "epsilon" else signal * held + noise_share * x_t
    return error + variational_bound(tables, x, x_t, at, epsilon, variance)


def min_snr_weight(section: Objective, snr: Tensor) -> Tensor:
    """Weight of an image's squared error, so that no step's error of the data counts more than gamma times.

    Args:
      snr: (B,) signal-to-noise ratio, signal^2 / noise_share^2.
    Returns: (B,), min(snr, gamma) / snr for noise, min(snr, gamma) / (snr + 1) for v.
    Source: Hang et al. 2023, section 3.4.
    """
    return snr.clamp_max(section.min_snr_gamma) / (snr if section.predict == "epsilon" else snr + 1)


def _per_image(values: Tensor) -> Tensor:
    """(B,) to (B, 1, 1, 1)."""
    return values[:, None, None, None]


@functools.cache
def ddpm_schedule(device: torch.device) -> dict[str, Tensor]:
    """The linear schedule's tables, each (1000,) float32; made once for a device.

    Those that training reads are computed in float64: at the first steps, 1 - alpha_bar has four digits in float32.
    """
    beta = torch.linspace(BETA_START, BETA_END, TRAIN_STEPS, dtype=torch.float64)
    alpha_bar = torch.cumprod(1 - beta, 0)
    before = torch.cat([torch.ones(1, dtype=torch.float64), alpha_bar[:-1]])
    posterior = beta * (1 - before) / (1 - alpha_bar)  # Ho et al. 2020, equation 7
    posterior[0] = posterior[1]  # is zero there, and its logarithm is wanted
    tables = {
        "alpha_bar": alpha_bar,
        "signal": alpha_bar.sqrt(),
        "noise_share": (1 - alpha_bar).sqrt(),
        "snr": alpha_bar / (1 - alpha_bar),
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
        return _per_image(schedule[name][at])

    true_mean = table("mean_x") * x + table("mean_x_t") * x_t
    predicted_x = (x_t - table("noise_share") * epsilon) / table("signal")
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
    nats = torch.where(_per_image(at == 0), likelihood, kl)
    return nats.flatten(1).mean(1) / math.log(2)


def discretized_log_likelihood(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-probability of 8-bit values in -1..1 under a Gaussian (Ho et al. 2020, equation 13); elementwise.

    The cumulative distribution is exact. DiT's code approximates it by a tanh, to 2e-4, so that its loss at step 0, the
    only step that has this likelihood, differs by about 1e-3.
    """
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


# -------------------------------------------------------------------------------------------------------------- draws


def draw_dropped(share: float, *, seed: int, step: int, rows: slice) -> Tensor:
    """Which captions become null, (B,) bool on the CPU, for a model whose null has a length of its own.

    Args:
      share: of the captions.
      rows: the images, by their place in the global batch.
    """
    images = range(rows.start, rows.stop)
    return torch.tensor([keyed_hash(seed, step, image, DROPPED) < share * 2**64 for image in images], dtype=torch.bool)


def draw(
    objective: Objective,
    shape: tuple[int, ...],
    more: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    seed: int,
    step: int,
    rows: slice,
    device: torch.device,
) -> dict[str, Tensor]:
    """Draw for some images of the global batch of a step.

    Args:
      shape: (C, H, W) of a latent.
      more: "normal" or "uniform" and a shape for each image, by name, in the order of drawing; it changes nothing of
        what is always drawn.
      rows: the images, by their place in the global batch.
    Returns: "noise" (B, C, H, W), standard normal; "times" (B,) as the objective draws them; "drop" (B,), uniform:
      conditioning becomes null below the recipe's share; and (B, ...) of ``more``.
    """
    generator = torch.Generator(device)
    how = {"generator": generator, "device": device}
    groups = range(rows.start // GROUP, max(-(-rows.stop // GROUP), rows.start // GROUP + 1))
    drawn = list[dict[str, Tensor]]()
    for group in groups:
        generator.manual_seed(keyed_hash(seed, step, group) % 2**63)
        of_group = {"noise": torch.randn((GROUP, *shape), **how)}
        of_group["times"] = draw_times(objective, GROUP, generator)
        of_group["drop"] = torch.rand(GROUP, **how)
        for name, (kind, of_image) in more.items():
            of_group[name] = (torch.randn if kind == "normal" else torch.rand)((GROUP, *of_image), **how)
        drawn.append(of_group)
    first = groups.start * GROUP
    return {name: torch.cat([one[name] for one in drawn])[rows.start - first : rows.stop - first] for name in drawn[0]}
