"""How many images of a bucket fit a forward on a GPU: all of a rank's, halved while memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from ...datasets.batches.batch import Batch
from ...datasets.errors import ResourceError
from ...datasets.units import plural
from .state import Run

LOG = logging.getLogger(__name__)
KEPT_FREE = 0.05  # share of the GPU's memory, for fragmentation and longer captions


def fit_microbatch(run: Run, batch: Batch, train_step: Callable[[Run, Batch], object]) -> None:
    """Set ``run.microbatches`` of the batch's bucket if not all of a rank's images fit, alike on all ranks.

    A trial is a step that updates nothing and sends nothing, so only this rank runs out of memory. It is made before
    the first step of a bucket, again once the optimizer has its state, and for a larger batch than was tried. Not
    tried: CPUs, DeepSpeed, sharded models (a rank without memory would leave the others waiting), ``run.microbatch``.

    Raises: ResourceError: not even the fewest images fit.
    """
    limits, bucket, images = run.microbatches, batch.bucket, -(-batch.global_size // run.ranks.world_size)
    if run.device.type != "cuda" or not run.engine.allows_trial or run.recipe.run.microbatch:
        return
    tried = run.tried.get(bucket, 0)
    if images <= tried or (tried and bucket in limits):
        return
    fewest = 2 if any(technique.compares_images for technique in run.techniques) else 1
    while not _fits(run, batch, train_step):
        size = min(limits.get(bucket, images), images)
        if size <= fewest:
            raise ResourceError(
                f"device '{run.device}': {plural(size, 'image')} of bucket '{bucket}' do not fit in memory with the "
                "model. Use run.activation_checkpointing, parallel.strategy 'fsdp', or a smaller model."
            )
        limits[bucket] = max(fewest, -(-size // 2))
    if run.engine.optimizer.state:
        run.tried[bucket] = images
    LOG.info("bucket %s: at most %d images in a microbatch", bucket, limits.get(bucket, images))


def _fits(run: Run, batch: Batch, train_step: Callable[[Run, Batch], object]) -> bool:
    """Whether a trial has enough memory on all ranks."""
    engine, step, num_images = run.engine, run.step, run.num_images
    free = torch.cuda.get_device_properties(run.device).total_memory * KEPT_FREE
    engine.is_trial, failed = True, 0
    try:
        kept = torch.empty(int(free), dtype=torch.uint8, device=run.device)
        train_step(run, batch)
        del kept
    except torch.OutOfMemoryError:
        failed = 1
    finally:
        engine.is_trial, run.step, run.num_images = False, step, num_images
        engine.optimizer.zero_grad(set_to_none=True)
    if failed:
        torch.cuda.empty_cache()
    if run.ranks.world_size > 1:
        failures = torch.tensor(failed, device=run.device)
        dist.all_reduce(failures)
        failed = failures.item()
    return not failed
