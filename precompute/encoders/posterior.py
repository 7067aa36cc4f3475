"""One draw from each posterior, frozen into the store: what ``vae.keep = "sample"`` keeps."""

from __future__ import annotations

import numpy as np

from ...datasets.format.schema import LOGVAR_RANGE


def sample_once(moments: np.ndarray, records: np.ndarray) -> np.ndarray:
    """mean + std * noise, (B, C, H, W) float32; the noise depends on the record alone.

    Args:
      moments: (B, 2C, H, W) float32, mean then log-variance.
      records: (B,) positions in the records table.
    Source: Kingma and Welling 2014, section 2.4 (reparameterization).
    """
    drawn = []
    for row, record in zip(moments, records, strict=True):  # alone, so its bits depend on no other row
        mean, logvar = np.split(row, 2)
        # Philox is counter-based, so any record can be drawn alone.
        generator = np.random.Generator(np.random.Philox(key=[0, 0], counter=[0, 0, 0, int(record)]))
        noise = generator.standard_normal(mean.shape, dtype=np.float32)
        drawn.append(mean + np.exp(0.5 * np.clip(logvar, *LOGVAR_RANGE)) * noise)
    return np.stack(drawn)
