"""How many images of a bucket fit a forward on a GPU: all of a rank's, halved while memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from ...datasets.batches.batch import Batch
from ...datasets.errors import ResourceError
from .state import Run

LOG = logging.getLogger(__name__)
KEPT_FREE = 0.05  # share of the GPU's memory, for fragmentation and longer captions


def fit_microbatch(run: Run, batch: Batch, train_step: Callable[[Run, Batch], object]) -> None:
    """Set ``run.microbatches`` of the batch's bucket before its first step, to the same number on all ranks.

    A trial is a step that updates nothing and sends nothing, so only this rank runs out of memory. It is repeated at
    the second step, when the optimizer has its state. Not tried: CPUs, DeepSpeed, sharded models (a rank that ran out
    of memory would leave the others waiting), and ``run.microbatch``.

    Raises: ResourceError: not even one image fits.
    """
    engine, known, bucket = run.engine, run.microbatches, batch.bucket
    is_known = bool(run.recipe.run.microbatch) or (bucket in known and run.step > 1)
    if run.device.type != "cuda" or not engine.allows_trial or is_known:
        return
    known.setdefault(bucket, -(-batch.global_size // run.ranks.world_size))
    while not _fits(run, batch, train_step):
        if known[bucket] == 1:
            raise ResourceError(
                f"device '{run.device}': one image of bucket '{bucket}' does not fit beside the model. Use "
                "run.activation_checkpointing, parallel.strategy 'fsdp', or a smaller model."
            )
        known[bucket] = -(-known[bucket] // 2)
    LOG.info("bucket %s: %d images in a microbatch", bucket, known[bucket])


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
