"""One step: from a batch to an update; and on a GPU, how many images of a bucket fit into a forward.

No step waits for the device, except those in fp16 with an optimizer other than AdamW.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..datasets.batches.batch import Batch
from ..datasets.order.slices import rank_slice
from ..errors import ResourceError
from ..units import plural
from .metrics.meter import StepResult
from .models.conditioning import Microbatch, select
from .objectives.losses import PLAIN, draw, draw_dropped, objective_losses, time_share
from .optim.build import learning_rate
from .run.state import Run
from .sampling.shift import objective_at
from .techniques.technique import Draw

LOG = logging.getLogger(__name__)
KEPT_FREE = 0.05  # share of the GPU's memory, for fragmentation and longer captions


def train_step(run: Run, batch: Batch) -> StepResult:
    """One update: accumulate the gradients of the microbatches, clip, step, average.

    Returns: losses and gradient norm, still on the device.
    """
    recipe, engine, step, size = run.recipe, run.engine, run.step + 1, batch.global_size
    images = prepare(run, batch, step)
    limit = recipe.run.microbatch or run.microbatches.get(batch.bucket, 0)
    parts = microbatches(size, run.ranks.world_size, limit)
    if not engine.model.training:  # after an evaluation; it walks over all modules
        engine.model.train()
    for technique in run.techniques:
        images = replace(images, targets=images.targets | technique.teach(run, images, parts, step, global_size=size))

    parts_losses: list[dict[str, Tensor]] = []
    for part in parts:
        with engine.microbatch(last=part is parts[-1]):
            losses = image_losses(run, select(images, part), step)
            engine.backward(torch.stack(list(losses.values())).sum() / size)
        parts_losses.append({name: loss.detach() for name, loss in losses.items()})

    rate = learning_rate(recipe.peak_lr, recipe.schedule, step, recipe.run.steps)
    bad_loss = _bad_loss(run, parts_losses) if recipe.run.skip_nonfinite else None
    grad_norm, skipped = engine.update(step, learning_rate=rate, grad_clip=recipe.run.grad_clip, bad_loss=bad_loss)
    run.step, run.num_images = step, run.num_images + size
    terms = {name: torch.cat([part[name] for part in parts_losses])[: len(batch)] for name in parts_losses[0]}
    losses = terms.pop(PLAIN)
    return StepResult(
        step=step,
        loss=losses.sum() / size,
        terms={name: term.sum() / size for name, term in terms.items()},
        grad_norm=grad_norm,
        skipped=skipped,
        losses=losses,
        time_shares=time_share(recipe.objective, images.times),
        records=batch.records,
        store=batch.store,
        epoch=batch.epoch,
        num_images=run.num_images,
        learning_rate=rate,
    )


def _bad_loss(run: Run, parts_losses: Sequence[dict[str, Tensor]]) -> Tensor:
    """() float32 on the device, 1 if a loss of any rank is not finite, else 0; a collective call.

    Args:
      parts_losses: of each microbatch of this rank.
    """
    losses = torch.cat([loss for part in parts_losses for loss in part.values()])
    bad_loss = (~losses.isfinite()).any().float()
    if run.ranks.world_size > 1 and not run.engine.is_trial:
        dist.all_reduce(bad_loss, op=dist.ReduceOp.MAX)
    return bad_loss


def prepare(run: Run, batch: Batch, step: int) -> Microbatch:
    """This rank's images with all that is drawn for them, and with what techniques read of the batch."""
    recipe = run.recipe
    grid = run.token_grid(batch.latents)
    rows = rank_slice(batch.global_size, run.ranks.rank, run.ranks.world_size)
    more = dict[str, Draw]()
    for technique in run.techniques:
        more |= technique.draws(run.spec, math.prod(grid), step)
    objective = objective_at(run.spec, recipe.objective, math.prod(grid))
    shape = tuple(batch.latents.shape[1:])
    draws = draw(objective, shape, more, seed=recipe.run.seed, step=step, rows=rows, device=run.device)
    dropped = draws.pop("drop") < recipe.conditioning.drop
    if run.conditioner.changes_lengths:
        dropped = draw_dropped(recipe.conditioning.drop, seed=recipe.run.seed, step=step, rows=rows)
    conditioning = run.conditioner.drop(run.conditioning(batch), dropped)
    noise = draws.pop("noise")
    times = draws.pop("times")
    targets = run.read_targets(batch, grid, trains=True)
    return Microbatch(batch.latents, noise, times, conditioning, draws, targets)


def image_losses(run: Run, images: Microbatch, step: int) -> dict[str, Tensor]:
    """Losses of each image of a microbatch, (B,) each: the plain one and the weighted terms that are added to it.

    A rank without images computes one zero, as collectives need all ranks.
    """
    if not len(images):
        return {name: loss * 0 for name, loss in image_losses(run, images.placeholder(), step).items()}
    extras = run.inputs(images)
    for technique in run.techniques:
        extras = technique.asks(extras, images, step)
    output = run.predict(images, extras)
    losses = objective_losses(run.recipe.objective, output.output, images.latents, images.noise, images.times)
    for technique in run.techniques:
        losses |= technique.terms(images, extras, output, step)
    return losses


def microbatches(size: int, world_size: int, limit: int) -> list[slice]:
    """Split a rank's slice of a global batch into as few microbatches as possible, of equal size.

    All ranks have the same number, so the last ones may lie beyond the end of a rank with fewer images.

    Args:
      size: images of the global batch.
      limit: most images of a forward; 0: no limit.
    """
    most = -(-size // world_size)  # images of the largest rank
    count = -(-most // limit) if limit else 1
    each = -(-most // count)
    return [slice(start, start + each) for start in range(0, most, each)]


def fit_microbatch(run: Run, batch: Batch) -> None:
    """Set ``run.microbatches`` of the batch's bucket if not all of a rank's images fit, alike on all ranks.

    A trial is a step that updates nothing and sends nothing, so only this rank runs out of memory. It is made before
    the first step of a bucket, again once the optimizer has its state, and for a larger batch than was tried. Not
    tried: CPUs, DeepSpeed, sharded models (a rank without memory would leave the others waiting), ``run.microbatch``.

    Raises: ResourceError: not even one image fits.
    """
    limits, bucket, images = run.microbatches, batch.bucket, -(-batch.global_size // run.ranks.world_size)
    if run.device.type != "cuda" or not run.engine.allows_trial or run.recipe.run.microbatch:
        return
    tried = run.tried.get(bucket, 0)
    if images <= tried or (tried and bucket in limits):
        return
    while not _fits(run, batch):
        size = min(limits.get(bucket, images), images)
        if size == 1:
            raise ResourceError(
                f"device '{run.device}': {plural(size, 'image')} of bucket '{bucket}' do not fit in memory with the "
                "model. Use run.activation_checkpointing, parallel.strategy 'fsdp', or a smaller model."
            )
        limits[bucket] = -(-size // 2)
    if run.engine.optimizer.state:
        run.tried[bucket] = images
    LOG.info("bucket %s: at most %d images in a microbatch", bucket, limits.get(bucket, images))


def _fits(run: Run, batch: Batch) -> bool:
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
