"""Settings of torch on a GPU, for the whole process."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch

from ..config import TrainRecipe
from ..models.spec import ModelSpec

ALLOCATION = "PYTORCH_CUDA_ALLOC_CONF"
ALLOCATION_NAMES = (ALLOCATION, "PYTORCH_ALLOC_CONF")  # torch reads either
EXPANDABLE = "expandable_segments:True"


def expand_segments(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Let torch's allocator grow its segments, unless the user has configured it or CUDA has started.

    Batches of many shapes would otherwise split its memory into pieces that fit none of the next.

    Returns: whether it was set.
    """
    if torch.cuda.is_initialized() or any(name in environment for name in ALLOCATION_NAMES):
        return False
    environment[ALLOCATION] = EXPANDABLE
    return True


def choose_kernels(recipe: TrainRecipe, spec: ModelSpec) -> None:
    """Precision of float32 products, and whether convolutions are timed, which each new shape pays for once."""
    # Layers that stay float32 under autocast, as the time embedding, need its precision.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = recipe.run.precision == "tf32"
    torch.backends.cudnn.benchmark = spec.name.startswith("sana")  # its feed-forward layers are convolutions
