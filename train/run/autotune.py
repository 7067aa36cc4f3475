"""Measure the microbatch and the fastest attention kernel on a GPU, before the first step.

Forward and backward are measured at two sizes in the largest bucket; activations grow with images times pixels. The
sizes are saved in checkpoints, so that a resumed run sums in the same order.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from ...datasets.errors import ResourceError
from ...datasets.format.buckets import bucket_size
from ..metrics.flops import latent_size_of
from ..models.diffusers.adapters import trained_parameters
from ..objective_recipe import SELF
from ..objectives.draws import draw
from ..parallel.engine import TorchEngine
from ..parallel.watchdog import Watchdog
from ..step.attention_kernels import attention_calls, fastest_kernels, install_flash, preferred
from ..step.image_losses import Microbatch, Teacher, image_losses, num_routed_tokens, token_grid
from ..weights.checkpoint import OPTIMIZER
from .state import TrainState
from .texts import longest_caption, zero_texts

LOG = logging.getLogger(__name__)
TRIED = ((2, 4), (1, 2))  # images; fewer if those do not fit
TRIED_IMAGES = 32  # for attention: enough to fill a GPU
KEPT_FREE = 0.08  # share of memory for fragmentation and for workspaces of kernels


def tune(state: TrainState, watchdog: Watchdog) -> None:
    """Measure what neither recipe nor checkpoint sets; all ranks get the same values.

    DeepSpeed would keep the gradients of a trial: with it, a rank's images are one microbatch.

    Raises: ResourceError: not even one image fits.
    """
    if state.device.type != "cuda":
        return
    LOG.info("attention kernels of the checkpoint: %s", state.attention_kernels or "none, so they are measured")
    buckets = dict.fromkeys(bucket for store in state.stores for bucket in store.buckets)  # in order, for ties
    largest = max(buckets, key=area)
    if not state.attention_kernels:
        state.attention_kernels = watchdog.announce(_fastest_attention(state, largest))
        LOG.info("attention kernels for bucket %s, the fastest first: %s", largest, state.attention_kernels)
    install_flash(state.attention_kernels)
    if not (state.recipe.run.microbatch or state.microbatches) and isinstance(state.engine, TorchEngine):
        most = min(watchdog.gather(_most_images(state, largest)))
        state.microbatches = microbatch_sizes(buckets, largest, most)
        LOG.info("images of a microbatch, measured in bucket %s: %s", largest, state.microbatches)


def _fastest_attention(state: TrainState, bucket: str) -> list[str]:
    size = latent_size_of(bucket, state.stores[0].spec.latent)
    calls = attention_calls(state.spec, size, longest_caption(state.spec, state.stores[0].spec))
    dtype = state.autocast_dtype or torch.float32
    return fastest_kernels(calls, min(state.recipe.run.global_batch, TRIED_IMAGES), dtype, state.device)


def _most_images(state: TrainState, largest: str) -> int:
    """Images of the largest bucket that fit.

    Raises: ResourceError: not one fits; with several ranks, not two, because DDP and FSDP cannot be used again after
      a backward that failed.
    """
    device = state.device
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - _bytes_to_come(state)
    is_alone = state.ranks.world_size == 1
    for tried in TRIED if is_alone else TRIED[-1:]:
        peaks = _peaks(state, largest, tried)
        most = most_that_fit(tried, peaks, free * (1 - KEPT_FREE)) if peaks else 0
        if most >= 1:
            return most
    needed = "one image" if is_alone else "a trial with two images"
    raise ResourceError(
        f"device '{device}': {needed} of bucket '{largest}' does not fit beside the model, {free / 2**30:.1f} GiB are "
        "free. Use run.activation_checkpointing, parallel.strategy 'fsdp', or a smaller model"
        f"{'' if is_alone else '; or try run.microbatch=1'}."
    )


def _peaks(state: TrainState, bucket: str, tried: tuple[int, int]) -> tuple[float, float] | None:
    """Peak bytes of two microbatches, or None if memory ran out."""
    try:
        return _peak(state, bucket, tried[0]), _peak(state, bucket, tried[1])
    except torch.OutOfMemoryError:
        _drop_gradients(state)
        torch.cuda.empty_cache()
        return None


def most_that_fit(tried: tuple[int, int], peaks: tuple[float, float], free: float) -> int:
    """Images that fit, from the peaks of two sizes in bytes: a constant and a part for each image."""
    each = (peaks[1] - peaks[0]) / (tried[1] - tried[0])
    constant = peaks[0] - each * tried[0]
    return int((free - constant) // each) if each > 0 else int(free >= peaks[0])


def microbatch_sizes(buckets: Iterable[str], largest: str, most: int) -> dict[str, int]:
    """Images for each bucket, with at most as many pixels together as in the largest bucket."""
    return {bucket: most * area(largest) // area(bucket) for bucket in buckets}


def area(bucket: str) -> int:
    """Pixels of a picture."""
    height_px, width_px = bucket_size(bucket)
    return height_px * width_px


def _bytes_to_come(state: TrainState) -> float:
    """Bytes of this rank's GPU that the first step will allocate: gradients, and the optimizer state."""
    parameters = list(trained_parameters(state.engine.model).values())
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    if shards[0].device.type == "cpu":  # offloaded
        return 0.0
    gradients = sum(p.nbytes for p in shards)
    if state.step:
        return gradients
    held, total = sum(p.numel() for p in shards), sum(p.numel() for p in parameters)
    whole = sum(t.numel() * t.element_size() for t in state.engine.expected(OPTIMIZER, in_codes=held == total).values())
    return gradients + whole * held / total


def synthetic_microbatch(state: TrainState, bucket: str, images: int) -> Microbatch:
    """A microbatch of noise, with captions of full length: the largest that a bucket can have."""
    store = state.stores[0].spec
    latent = store.latent
    shape = (latent.channels, *(side // latent.downscale for side in bucket_size(bucket)))
    recipe, rows = state.recipe, slice(0, images)
    draws = draw(
        recipe.objective,
        0.0,
        seed=0,
        step=0,
        rows=rows,
        shape=shape,
        device=state.device,
        class_width=state.spec.class_width,
        num_tokens=num_routed_tokens(state, shape, state.step + 1),
        less_time=recipe.self_align.weight > 0,
    )
    labels = torch.zeros(images, dtype=torch.int64, device=state.device)
    dtype = torch.float32 if state.autocast_dtype is None else torch.float16
    texts = zero_texts(state.spec, store, images, dtype, state.device)
    conditioning = state.conditioner(labels, texts, labels, widen=state.autocast_dtype is None)
    tokens = math.prod(token_grid(state, shape))
    teachers = {
        name: Teacher(
            torch.zeros(images, tokens, spec.width, device=state.device),
            torch.zeros(images, spec.width, device=state.device),
        )
        for name, spec in state.feature_specs.items()
    }
    if own := state.spec.projectors.get(SELF):
        teachers[SELF] = Teacher(torch.zeros(images, tokens, own.feature_width, device=state.device), None)
    return Microbatch(draws.noise, draws, conditioning, teachers)


def _peak(state: TrainState, bucket: str, images: int) -> float:
    """Peak bytes of the GPU in a forward and backward, with everything allocated before."""
    for _ in range(2):  # the first compiles and tries kernels, which takes extra memory
        torch.cuda.reset_peak_memory_stats(state.device)
        with state.engine.microbatch(last=True), preferred(state.attention_kernels):
            losses = image_losses(state, synthetic_microbatch(state, bucket, images), state.step + 1)
            state.engine.backward(torch.stack(list(losses.values())).sum() / images)
        torch.cuda.synchronize(state.device)
        _drop_gradients(state)
    return float(torch.cuda.max_memory_allocated(state.device))


def _drop_gradients(state: TrainState) -> None:
    for parameter in state.engine.model.parameters():
        parameter.grad = None
