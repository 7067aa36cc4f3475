"""How many images of a bucket fit a forward on a GPU: all of a rank's, halved while memory runs out."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from ...datasets.batches.batch import Batch
from ...datasets.errors import ResourceError
from .learner import Learner
from .train_step import train_step

LOG = logging.getLogger(__name__)
KEPT_FREE = 0.05  # share of the GPU's memory, for fragmentation and longer captions


def fit_microbatch(learner: Learner, batch: Batch) -> None:
    """Set ``learner.microbatches`` of the batch's bucket before its first step, to the same number on all ranks.

    A trial is a step that updates nothing and sends nothing, so only this rank runs out of memory. It is repeated at
    the second step, when the optimizer has its state. Not tried: CPUs, DeepSpeed, sharded models (a rank that ran out
    of memory would leave the others waiting), and ``run.microbatch``.

    Raises: ResourceError: not even one image fits.
    """
    engine, known, bucket = learner.engine, learner.microbatches, batch.bucket
    is_known = bool(learner.recipe.run.microbatch) or (bucket in known and learner.step > 1)
    if learner.device.type != "cuda" or not engine.allows_trial or is_known:
        return
    known.setdefault(bucket, -(-batch.global_size // learner.ranks.world_size))
    while not _fits(learner, batch):
        if known[bucket] == 1:
            raise ResourceError(
                f"device '{learner.device}': one image of bucket '{bucket}' does not fit beside the model. Use "
                "run.activation_checkpointing, parallel.strategy 'fsdp', or a smaller model."
            )
        known[bucket] = -(-known[bucket] // 2)
    LOG.info("bucket %s: %d images in a microbatch", bucket, known[bucket])


def _fits(learner: Learner, batch: Batch) -> bool:
    """Whether a trial has enough memory on all ranks."""
    engine, step, num_images = learner.engine, learner.step, learner.num_images
    free = torch.cuda.get_device_properties(learner.device).total_memory * KEPT_FREE
    engine.is_trial, failed = True, 0
    try:
        kept = torch.empty(int(free), dtype=torch.uint8, device=learner.device)
        train_step(learner, batch)
        del kept
    except torch.OutOfMemoryError:
        failed = 1
    finally:
        engine.is_trial, learner.step, learner.num_images = False, step, num_images
        engine.optimizer.zero_grad(set_to_none=True)
    if failed:
        torch.cuda.empty_cache()
    if learner.ranks.world_size > 1:
        failures = torch.tensor(failed, device=learner.device)
        dist.all_reduce(failures)
        failed = failures.item()
    return not failed
