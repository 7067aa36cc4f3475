"""One step: from a batch to an update. With AdamW nothing waits for the device; other optimizers wait once, to learn
whether the gradient is finite."""

from __future__ import annotations

import torch
from torch import Tensor

from ...datasets.batches.batch import Batch
from ...datasets.order.slices import rank_slice
from ..metrics.window import StepResult
from ..models.conditioning import Conditioning
from ..objectives.draws import Draws, draw
from ..objectives.losses import loss_per_image, time_share
from ..optim.build import learning_rate
from .attention_kernels import preferred
from .learner import Learner


def train_step(learner: Learner, batch: Batch) -> StepResult:
    """One update: accumulate the gradients of the microbatches, clip, step, average.

    Returns: losses and gradient norm, still on the device.
    """
    recipe, engine, step, size = learner.recipe, learner.engine, learner.step + 1, batch.global_size
    rows = rank_slice(size, learner.ranks.rank, learner.ranks.world_size)
    draws = draw(
        recipe.objective,
        recipe.conditioning.drop,
        seed=recipe.run.seed,
        step=step,
        rows=rows,
        shape=tuple(batch.latents.shape[1:]),
        device=learner.device,
    )
    inputs = batch.labels, batch.captions, batch.caption_lengths, batch.records
    conditioning = learner.conditioner(*inputs, store=batch.store, widen=learner.autocast_dtype is None)
    conditioning = learner.conditioner.drop(conditioning, draws.dropped)

    engine.model.train()
    parts = microbatches(
        size, learner.ranks.world_size, recipe.run.microbatch or microbatch_limit(learner, batch.bucket)
    )
    parts_losses = []
    for part in parts:
        with (
            engine.microbatch(last=part is parts[-1]),
            preferred(learner.attention_kernels),  # for recomputed forwards too
        ):
            losses = image_losses(learner, batch.latents[part], draws.part(part), conditioning.part(part))
            engine.backward(losses.sum() / size)
        parts_losses.append(losses.detach())

    rate = learning_rate(recipe.peak_lr, recipe.schedule, step, recipe.run.steps)
    grad_norm, skipped = engine.update(step, learning_rate=rate, grad_clip=recipe.run.grad_clip)
    learner.step, learner.num_images = step, learner.num_images + size
    losses = torch.cat(parts_losses)[: len(batch)]
    return StepResult(
        step=step,
        loss=losses.sum() / size,
        grad_norm=grad_norm,
        skipped=skipped,
        num_images=size,
        losses=losses,
        time_shares=time_share(recipe.objective, draws.times)[: len(batch)],
        records=batch.records,
        store=batch.store,
    )


def image_losses(learner: Learner, x: Tensor, draws: Draws, conditioning: Conditioning) -> Tensor:
    """Loss of each image of a microbatch; a rank without images computes one zero, as collectives need all ranks."""
    if not len(x):
        return image_losses(learner, *_dummy(x, conditioning)) * 0

    def predict(noisy: Tensor, t: Tensor) -> Tensor:
        cast = torch.autocast(learner.device.type, learner.autocast_dtype, enabled=learner.autocast_dtype is not None)
        with cast:
            return learner.engine.forward(noisy, t, conditioning)

    return loss_per_image(learner.recipe.objective, predict, x, draws.noise, draws.times)


def _dummy(x: Tensor, conditioning: Conditioning) -> tuple[Tensor, Draws, Conditioning]:
    """One image of zeros at time zero."""
    image, time = x.new_zeros((1, *x.shape[1:])), x.new_zeros(1)
    return image, Draws(image, time, time.bool()), conditioning.dummy()


def microbatch_limit(learner: Learner, bucket: str) -> int:
    """Measured limit of images in a forward; for a bucket that is new since, the smallest one. 0: no limit."""
    measured = learner.microbatches
    return measured.get(bucket) or min(measured.values(), default=0)


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
