"""From a stored row to the model's input: draw from the posterior, then shift and scale, once.

The draw is keyed by (seed, epoch, record): it depends on no rank, worker, batch or call order, so a resumed run and a
run on other hardware see the same latents.
"""

from __future__ import annotations

import numpy as np

from .schema import LatentSpec

LOGVAR_RANGE = (-30.0, 20.0)  # as diffusers' DiagonalGaussianDistribution clamps it


def record_generator(seed: int, epoch: int, record: int) -> np.random.Generator:
    """Random generator of one record in one epoch (Philox: counter-based, so any record can be asked for alone)."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch % 2**64], counter=[0, 0, 0, record]))


def draw_noise(shape: tuple[int, ...], *, seed: int, epoch: int, records: np.ndarray) -> np.ndarray:
    """Standard normal noise for a batch, (B, *shape) float32, each record from its own generator."""
    noise = np.empty((len(records), *shape), np.float32)
    for i, record in enumerate(records):
        record_generator(seed, epoch, int(record)).standard_normal(dtype=np.float32, out=noise[i])
    return noise


def final_latents(stored: np.ndarray, spec: LatentSpec, *, seed: int, epoch: int, records: np.ndarray) -> np.ndarray:
    """The model's input of a batch of stored rows.

    Args:
      stored: (B, 2C, H, W) moments or (B, C, H, W) latents, raw.
      spec: of the store.
      seed, epoch: key of the draw.
      records: (B,) positions in the records table, the rest of the key.
    Returns: (B, C, H, W) float32, shifted and scaled.
    Source: Kingma and Welling 2014, section 2.4 (reparameterization); (z - shift) * scale as in diffusers.
    """
    values = stored.astype(np.float32)
    if spec.kind == "mean_logvar":
        values = sample_posterior(
            values, draw_noise(values[0, : spec.channels].shape, seed=seed, epoch=epoch, records=records)
        )
    return normalise(values, spec)


def sample_posterior(moments: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """mean + std * noise, (B, C, H, W) float32.

    Args:
      moments: (B, 2C, H, W) float32, mean then log-variance.
      noise: (B, C, H, W) float32.
    """
    mean, logvar = np.split(moments, 2, axis=1)
    return mean + np.exp(0.5 * np.clip(logvar, *LOGVAR_RANGE)) * noise


def normalise(latents: np.ndarray, spec: LatentSpec) -> np.ndarray:
    """(z - shift) * scale per channel; (B, C, H, W) float32."""
    shift, scale = (np.asarray(values, np.float32)[:, None, None] for values in (spec.shift, spec.scale))
    return (latents - shift) * scale


def denormalise(latents: np.ndarray, spec: LatentSpec) -> np.ndarray:
    """Undo ``normalise``: what the VAE's decoder wants; (B, C, H, W) float32."""
    shift, scale = (np.asarray(values, np.float32)[:, None, None] for values in (spec.shift, spec.scale))
    return latents / scale + shift
