"""One draw from each posterior, frozen into the store: what ``vae.keep = "sample"`` keeps."""

from __future__ import annotations

import numpy as np

from ..datasets.schema import LOGVAR_RANGE


def sample_once(moments: np.ndarray, records: np.ndarray) -> np.ndarray:
    """mean + std * noise, (B, C, H, W) float32; the noise depends on the record alone.

    Args:
      moments: (B, 2C, H, W) float32, mean then log-variance.
      records: (B,) positions in the records table.
    Source: Kingma and Welling 2014, section 2.4 (reparameterization).
    """
    mean, logvar = np.split(moments, 2, axis=1)
    noise = np.empty(mean.shape, np.float32)
    for i, record in enumerate(records):  # Philox is counter-based, so any record can be drawn alone
        generator = np.random.Generator(np.random.Philox(key=[0, 0], counter=[0, 0, 0, int(record)]))
        generator.standard_normal(dtype=np.float32, out=noise[i])
    return mean + np.exp(0.5 * np.clip(logvar, *LOGVAR_RANGE)) * noise
