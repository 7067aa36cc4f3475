"""Peak host memory in a fresh process: of the VAE encoding alone, and of a whole precompute.

    python -m leandit.tools.bench.encode.memory JOB

The difference is what a precompute needs besides its model: the plan, queued pictures, the shard being packed,
decoders. On a CPU both include the activations.
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
    Raises: ResourceError: the process failed.
    """
    return run_in_fresh_process(__name__, json.dumps(job), command="bench precompute, memory")


def measure(job: dict[str, Any]) -> float:
    """Run a job in this process; its peak in MB."""
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
