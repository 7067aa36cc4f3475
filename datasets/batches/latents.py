"""From stored rows to the model's input: draw from the posterior, then shift and scale, once.

This runs on the device, after the copy, which halves the copied bytes and the load of the CPU. The draw is keyed by
(seed, epoch, record) and uses only integer and exactly rounded arithmetic, so it is equal on every device and
independent of rank, worker, batch and call order.
"""

from __future__ import annotations

from functools import cache, lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch

from ...errors import RecipeError
from ..format.schema import LOGVAR_RANGE, LatentSpec, LatentStatistics
from ..format.token_dtypes import GROUP_WIDTH, num_latent_channels
from ..order.shuffle import FACTORS, GOLDEN, PURPOSE_DRAW, keyed_hash, mix

QUANTILE_BITS = 16
Normalise = Literal["encoder", "store", "none"]


def draw_keys(seed: int, epochs: np.ndarray, records: np.ndarray) -> torch.Tensor:
    """Key of each record's draw, (B,) int64.

    Args:
      epochs, records: (B,) the epoch in which a record is seen, its position in the records table.
    """
    found, which = np.unique(epochs, return_inverse=True)
    base = np.array([keyed_hash(seed, epoch, PURPOSE_DRAW) for epoch in found.tolist()], np.uint64)[which]
    return torch.from_numpy(mix(mix(records.astype(np.uint64)) ^ base).view(np.int64))


def keyed_noise(keys: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Standard normal numbers, (B, *shape) float32: the same for the same key on every device.

    Each is the sum of two of 65,536 quantiles of the normal distribution, divided by the root of two: variance 1 and
    kurtosis 3.000 (2.9996), the largest 6.1. No logarithm or cosine, which differ between devices, and no rejection.

    Args:
      keys: (B,) int64.
    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 12 (the integers).
    """
    count = int(np.prod(shape))
    steps = torch.arange(1, (count + 1) // 2 + 1, device=keys.device) * _signed(GOLDEN)
    bits = _mix(keys[:, None] + steps)  # 64 for two numbers
    table, mask = _quantiles(keys.device), (1 << QUANTILE_BITS) - 1
    first, second, third, fourth = (table[(bits >> shift) & mask] for shift in (0, 16, 32, 48))
    numbers = torch.stack([first + second, third + fourth], dim=2)
    return numbers.flatten(1)[:, :count].reshape(len(keys), *shape)


def final_latents(stored: torch.Tensor, spec: LatentSpec, keys: torch.Tensor | None) -> torch.Tensor:
    """The model's input of a batch of stored rows, on their device.

    Args:
      stored: (B, 2C, H, W) moments or (B, C, H, W) latents, raw; of int8 with the bytes of the scales.
      spec: of the store.
      keys: (B,) int64, of ``draw_keys``; needed for a stored posterior.
    Returns: (B, C, H, W) float32, shifted and scaled.
    Source: Kingma and Welling 2014, section 2.4 (reparameterization); (z - shift) * scale as in diffusers.
    """
    values = _numbers(stored)
    if spec.has_posterior:
        assert keys is not None
        mean, spread = values.chunk(2, dim=1)
        std = spread if spec.kind == "mean_std" else torch.exp(0.5 * spread.clamp(*LOGVAR_RANGE))
        values = mean + std * keyed_noise(keys, tuple(mean.shape[1:]))
    return normalise(values, spec)


def mean_latents(stored: torch.Tensor, spec: LatentSpec) -> torch.Tensor:
    """As ``final_latents`` without a draw: the mean of a stored posterior; (B, C, H, W) float32."""
    return normalise(_numbers(stored)[:, : spec.channels], spec)


def _numbers(stored: torch.Tensor) -> torch.Tensor:
    """``token_dtypes.widen_latents`` on the device; float32."""
    if stored.dtype != torch.int8:
        return stored.float()
    num_channels = num_latent_channels(stored.shape[1])
    scales = stored[:, num_channels:].movedim(1, -1).contiguous().view(torch.float16)  # (B, H, W, groups)
    return widen_int8(stored[:, :num_channels].movedim(1, -1), scales[..., None, :]).movedim(-1, 1)


def widen_int8(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``token_dtypes.widen`` of int8 numbers on their device: one product each, which float32 holds exactly.

    Args:
      rows: (..., D) int8.
      scales: (..., layers, groups) float16.
    Returns: (..., D) float32.
    """
    num_layers, num_groups = scales.shape[-2:]
    layer_width = rows.shape[-1] // num_layers
    group_width = min(GROUP_WIDTH, layer_width)
    layers = rows.unflatten(-1, (num_layers, layer_width))
    num_missing = num_groups * group_width - layer_width
    if num_missing:  # the last group of a layer is shorter
        layers = torch.nn.functional.pad(layers, (0, num_missing))
    numbers = layers.unflatten(-1, (num_groups, group_width)) * scales.float()[..., None]
    return numbers.flatten(-2)[..., :layer_width].flatten(-2)


def normalised_as(spec: LatentSpec, how: Normalise, statistics: LatentStatistics | None = None) -> LatentSpec:
    """A spec whose shift and scale give the model's input of another normalisation.

    Args:
      how: "encoder": as the spec says; "store": mean 0 and deviation 1 in each channel; "none": raw latents of the VAE.
      statistics: needed for "store": of the encoder's normalisation.
    Raises: RecipeError: "store" without statistics, or with a channel that never changes.
    """
    if how == "encoder":
        return spec
    shift, scale = np.array(spec.shift), np.array(spec.scale)
    if how == "none":
        applied = (spec.decoding.shift, spec.decoding.scale) if spec.decoding else (np.zeros_like(shift), 1 + 0 * scale)
        shift, scale = -np.array(applied[0]) * applied[1], 1 / np.array(applied[1])
    elif statistics is None or min(statistics.channel_std) <= 0:
        what = "none" if statistics is None else "a channel with standard deviation 0"
        raise RecipeError(
            f'latent normalisation "store": the store has {what} in its statistics; expected a mean and a standard '
            'deviation above 0 for each channel. An incomplete store has them once it is finished. Or use "encoder".'
        )
    else:
        shift = shift + np.array(statistics.channel_mean) / scale
        scale = scale / np.array(statistics.channel_std)
    return spec.model_copy(update={"shift": shift.tolist(), "scale": scale.tolist()})


def normalise(latents: torch.Tensor, spec: LatentSpec) -> torch.Tensor:
    """(z - shift) * scale per channel; (B, C, H, W) float32."""
    shift, scale = _shift_scale(tuple(spec.shift), tuple(spec.scale), latents.device)
    return (latents - shift) * scale


def denormalise(latents: torch.Tensor, spec: LatentSpec) -> torch.Tensor:
    """Undo ``normalise``: the input of the VAE's decoder; (B, C, H, W) float32."""
    shift, scale = _shift_scale(tuple(spec.shift), tuple(spec.scale), latents.device)
    return raw_latents(latents / scale + shift, spec)


def raw_latents(rows: torch.Tensor, spec: LatentSpec) -> torch.Tensor:
    """Undo the scaling of imported rows, if there is one; (B, C, H, W) float32."""
    if spec.decoding is None:
        return rows
    shift, scale = _shift_scale(tuple(spec.decoding.shift), tuple(spec.decoding.scale), rows.device)
    return rows / scale + shift


@lru_cache(maxsize=8)
def _shift_scale(
    shift: tuple[float, ...], scale: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (
        torch.tensor(values, dtype=torch.float32, device=device)[:, None, None] for values in (shift, scale)
    )
    return first, second


@cache
def _quantiles(device: torch.device) -> torch.Tensor:
    """(65536,) float32 quantiles, of variance one half."""
    count = 1 << QUANTILE_BITS
    values = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    return torch.tensor(values / values.std() / np.sqrt(2), dtype=torch.float32, device=device)


def _mix(values: torch.Tensor) -> torch.Tensor:
    """``shuffle.mix`` on int64: the same bits, since multiplication wraps around alike."""
    values = values + _signed(GOLDEN)
    values = (values ^ _shifted(values, 30)) * _signed(FACTORS[0])
    values = (values ^ _shifted(values, 27)) * _signed(FACTORS[1])
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
