"""The VAE's encoder through ``torch.compile``: one graph for each shape, never a silent fallback to eager.

By default dynamo compiles eight shapes of a function and then silently runs it eagerly: a store of forty buckets would
mix two kinds of bits. Here the limit exceeds any bucket table, and a fallback is an error. Another batch size is
another shape, so the last batch of a shard is padded to a power of two with black images.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ...datasets.errors import RecipeError, ResourceError

BACKEND = "inductor"
MAX_SHAPES = 4096  # buckets of a table, times the batch sizes that its last rows make


def compile_encoder(model: Any) -> None:
    """Compile the encoder of a diffusers autoencoder lazily, at its first batch.

    Raises: RecipeError: the model has no encoder module.
    """
    encoder = getattr(model, "encoder", None)
    if not isinstance(encoder, torch.nn.Module):
        raise RecipeError(f"vae.compile: {type(model).__name__} has no encoder of its own. Set vae.compile = false.")
    encoder.compile(backend=BACKEND, dynamic=False, fullgraph=True)


@contextmanager
def compiling() -> Iterator[None]:
    """Context for code that runs or triggers compilation.

    Raises: ResourceError: no working compiler. RecipeError: the encoder does not compile to one graph.
    """
    from torch._dynamo import config as dynamo_config  # takes a second to import
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, Unsupported
    from torch._inductor.exc import InductorError

    limits = {
        "recompile_limit": MAX_SHAPES,
        "accumulated_recompile_limit": MAX_SHAPES,
        "fail_on_recompile_limit_hit": True,
    }
    try:
        with dynamo_config.patch(limits):
            yield
    except (Unsupported, FailOnRecompileLimitHit) as error:
        raise RecipeError(
            f"vae.compile: the encoder cannot be compiled ({_first_line(error)}). Set vae.compile = false."
        ) from error
    except (BackendCompilerFailed, InductorError) as error:
        inner = error.inner_exception
        if isinstance(inner, torch.OutOfMemoryError):
            raise inner from error  # then a smaller batch is tried
        raise ResourceError(
            f"vae.compile: torch cannot compile here ({_first_line(inner)}). Expected: a C++ compiler (on Debian: apt "
            "install g++), on a GPU Triton too, which comes with torch; or set vae.compile = false."
        ) from error


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled modules eagerly: for single images in another dtype."""
    with torch.compiler.set_stance("force_eager"):
        yield


def filled_up(pixels: np.ndarray, batch_size: int) -> np.ndarray:
    """Pad a batch with black images to a power of two, at most ``batch_size``.

    A pure function of the number of rows, so the bits of a row depend on nothing else. A batch that was halved for lack
    of memory never grows beyond its size.

    Args:
      pixels: (B, height_px, width_px, 3) uint8.
      batch_size: of the recipe.
    """
    rows = len(pixels)
    wanted = min(1 << (rows - 1).bit_length(), batch_size)
    if rows >= wanted:
        return pixels
    return np.concatenate([pixels, np.zeros((wanted - rows, *pixels.shape[1:]), np.uint8)])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
