"""One step: from a batch to an update. Nothing waits for the device, but optimizers other than AdamW with fp16."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..datasets.batches.batch import Batch
from ..datasets.order.slices import rank_slice
from .metrics.meter import StepResult
from .models.conditioning import select
from .objectives.losses import PLAIN, draw, objective_losses, time_share
from .optim.build import learning_rate
from .run.state import Run
from .techniques.images import Microbatch
from .techniques.technique import Draw


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
        images = replace(images, targets=images.targets | technique.teach(run, images, parts, step))

    parts_losses: list[dict[str, Tensor]] = []
    for part in parts:
        with engine.microbatch(last=part is parts[-1]):
            losses = image_losses(run, select(images, part), step)
            engine.backward(torch.stack(list(losses.values())).sum() / size)
        parts_losses.append({name: loss.detach() for name, loss in losses.items()})

    rate = learning_rate(recipe.peak_lr, recipe.schedule, step, recipe.run.steps)
    grad_norm, skipped = engine.update(step, learning_rate=rate, grad_clip=recipe.run.grad_clip)
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


def prepare(run: Run, batch: Batch, step: int) -> Microbatch:
    """This rank's images with all that is drawn for them, and with what techniques read of the batch."""
    recipe, grid = run.recipe, run.token_grid(batch.latents)
    rows = rank_slice(batch.global_size, run.ranks.rank, run.ranks.world_size)
    where = {"seed": recipe.run.seed, "step": step, "rows": rows, "device": run.device}
    more = dict[str, Draw]()
    for technique in run.techniques:
        more |= technique.draws(run.spec, math.prod(grid), step)
    draws = draw(recipe.objective, tuple(batch.latents.shape[1:]), more, **where)
    conditioning = run.conditioner.drop(run.conditioning(batch), draws.pop("drop") < recipe.conditioning.drop)
    noise, times = draws.pop("noise"), draws.pop("times")
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
