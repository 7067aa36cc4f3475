"""Peak memory of the host in a process of its own: with the VAE encoding alone, and in a whole precompute.

    python -m leandit.tools.bench.encode.memory JOB

The difference is what a precompute takes beyond its model: the table of the plan, decoded pictures that wait, a shard
that is packed, decoders. On a CPU the activations are memory of the host too, so they are in both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....precompute.config import PrecomputeRecipe
from ....precompute.encoders.vae import ImageEncoder
from ....precompute.pipeline import precompute
from ..harness.fresh_process import run_in_fresh_process
from ..harness.meters import PeakMemory

FORWARDS = 2


def peak_mb(job: dict[str, Any]) -> float:
    """Peak anonymous memory of a job in a fresh process, in MB.

    Args:
      job: "recipe" as a dict, "device", "batch" (B, height_px, width_px); and "source" and "store" for a whole run.
    Raises: ResourceError: it failed.
    """
    return run_in_fresh_process(__name__, json.dumps(job), command="bench precompute, memory")


def measure(job: dict[str, Any]) -> float:
    """Do a job in this process, and tell its peak."""
    recipe, device = PrecomputeRecipe.model_validate(job["recipe"]), torch.device(job["device"])
    with PeakMemory() as peak:
        if "store" in job:
            precompute(
                recipe,
                source_path=job["source"],
                store_path=Path(job["store"]),
                device=device,
                progress=lambda stage, done, total: None,
            )
        else:
            encoder, pixels = ImageEncoder(recipe.vae, device), np.zeros((*job["batch"], 3), np.uint8)
            for _ in range(FORWARDS):
                encoder.encode(pixels)
    return peak.mb


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
