"""What is measured on a GPU before the first step: how many images go through the model at once, and the attention.

The bucket of most pixels is measured with two sizes of real forwards and backwards, the rest follows: what a forward
keeps grows with images times pixels. The sizes stand in the checkpoint, so a run that resumes makes the same sums.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...datasets.errors import ResourceError
from ...datasets.format.buckets import bucket_size
from ..metrics.flops import latent_size_of
from ..models.conditioning import Conditioning
from ..objectives.draws import Draws, draw
from ..parallel.engine import TorchEngine
from ..parallel.watchdog import Watchdog
from ..step.attention_kernels import attention_calls, fastest_kernels, preferred
from ..step.train_step import image_losses
from ..weights.checkpoint import OPTIMIZER
from .state import TrainState

TRIED = ((2, 4), (1, 2))  # images; fewer where those do not fit
TRIED_IMAGES = 32  # of attention: enough to fill a GPU
KEPT_FREE = 0.08  # of the memory, for what the allocator cannot use and for what kernels want on the way


def tune(state: TrainState, watchdog: Watchdog) -> None:
    """Measure on a GPU what the recipe leaves to us and the checkpoint does not hold: how many images go through the
    model at once, and which attention is fastest. All ranks end with the same. DeepSpeed keeps gradients that were
    only tried, so with it all images of a rank go at once.

    Raises: ResourceError: not even one image fits.
    """
    if state.device.type != "cuda":
        return
    largest = max(state.store.buckets, key=area)
    if not state.attention_kernels:
        state.attention_kernels = watchdog.announce(_fastest_attention(state, largest))
    if not (state.recipe.run.microbatch or state.microbatches) and isinstance(state.engine, TorchEngine):
        most = min(watchdog.gather(_most_images(state, largest)))
        state.microbatches = microbatch_sizes(state.store.buckets, largest, most)


def _fastest_attention(state: TrainState, bucket: str) -> list[str]:
    text = state.store.spec.text
    size = latent_size_of(bucket, state.store.spec.latent)
    calls = attention_calls(state.spec, size, text.max_tokens if text and state.spec.takes_text else 0)
    dtype = state.autocast_dtype or torch.float32
    return fastest_kernels(calls, min(state.recipe.run.global_batch, TRIED_IMAGES), dtype, state.device)


def _most_images(state: TrainState, largest: str) -> int:
    """Images of the largest bucket that fit.

    Raises: ResourceError: not one; of several ranks, not two, since what a backward that fails leaves of DDP and FSDP
      cannot be used again.
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
        "there. Use run.activation_checkpointing, parallel.strategy 'fsdp', or a smaller model"
        f"{'' if is_alone else '; or try run.microbatch=1'}."
    )


def _peaks(state: TrainState, bucket: str, tried: tuple[int, int]) -> tuple[float, float] | None:
    """The peaks of two tried sizes, or None where memory ran out."""
    try:
        return _peak(state, bucket, tried[0]), _peak(state, bucket, tried[1])
    except torch.OutOfMemoryError:
        _drop_gradients(state)
        torch.cuda.empty_cache()
        return None


def most_that_fit(tried: tuple[int, int], peaks: tuple[float, float], free: float) -> int:
    """Images that fit, from the peaks of two tried sizes in bytes: a constant part and one for each image."""
    each = (peaks[1] - peaks[0]) / (tried[1] - tried[0])
    constant = peaks[0] - each * tried[0]
    return int((free - constant) // each) if each > 0 else int(free >= peaks[0])


def microbatch_sizes(buckets: dict[str, int], largest: str, most: int) -> dict[str, int]:
    """For each bucket, as many images as have no more pixels together than the most of the largest bucket."""
    return {bucket: most * area(largest) // area(bucket) for bucket in buckets}


def area(bucket: str) -> int:
    """Pixels of a picture."""
    height_px, width_px = bucket_size(bucket)
    return height_px * width_px


def _bytes_to_come(state: TrainState) -> float:
    """On this rank's GPU: the optimizer's state, which its first step makes, and the gradients, which from the second
    microbatch of a step on are there all the time."""
    parameters = list(state.engine.model.parameters())
    here = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    if here[0].device.type == "cpu":  # offloaded
        return 0.0
    gradients = sum(p.nbytes for p in here)
    if state.step:
        return gradients
    is_whole = sum(p.numel() for p in here) == sum(p.numel() for p in parameters)
    whole = sum(t.numel() * t.element_size() for t in state.engine.expected(OPTIMIZER, in_codes=is_whole).values())
    return gradients + whole * sum(p.numel() for p in here) / sum(p.numel() for p in parameters)


def synthetic_microbatch(state: TrainState, bucket: str, images: int) -> tuple[Tensor, Draws, Conditioning]:
    """Images of noise, of a bucket, with captions of full length: as large as a microbatch gets."""
    latent, text = state.store.spec.latent, state.store.spec.text
    shape = (latent.channels, *(side // latent.downscale for side in bucket_size(bucket)))
    recipe, rows = state.recipe, slice(0, images)
    draws = draw(recipe.objective, 0.0, seed=0, step=0, rows=rows, shape=shape, device=state.device)
    labels = torch.zeros(images, dtype=torch.int64, device=state.device)
    captions = lengths = None
    if state.spec.takes_text and text:
        dtype = torch.float32 if state.autocast_dtype is None else torch.float16
        captions = torch.zeros(images, text.max_tokens, text.width, dtype=dtype, device=state.device)
        lengths = torch.full((images,), text.max_tokens, device=state.device)
    given = state.conditioner(labels, captions, lengths, labels, widen=state.autocast_dtype is None)
    return draws.noise, draws, given


def _peak(state: TrainState, bucket: str, images: int) -> float:
    """Bytes that a forward and backward of so many images of a bucket take at most, all that is there counted."""
    for _ in range(2):  # the first one compiles, and tries kernels, which takes memory of its own
        torch.cuda.reset_peak_memory_stats(state.device)
        with state.engine.microbatch(last=True), preferred(state.attention_kernels):
            losses = image_losses(state, *synthetic_microbatch(state, bucket, images))
            state.engine.backward(losses.sum() / images)
        torch.cuda.synchronize(state.device)
        _drop_gradients(state)
    return float(torch.cuda.max_memory_allocated(state.device))


def _drop_gradients(state: TrainState) -> None:
    for parameter in state.engine.model.parameters():
        parameter.grad = None
