"""One step: from a batch to an update. With AdamW nothing waits for the device; the other optimizers are asked once
whether the gradient is finite."""

from __future__ import annotations

import torch
from torch import Tensor

from ...datasets.batches.reader import Batch
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

    Returns: losses and gradient norm on the device (read later, so that the step does not wait for them).
    """
    recipe, engine, step, size = learner.recipe, learner.engine, learner.step + 1, batch.global_size
    mine = rank_slice(size, learner.ranks.rank, learner.ranks.world_size)
    draws = draw(
        recipe.objective,
        recipe.conditioning.drop,
        seed=recipe.run.seed,
        step=step,
        rows=mine,
        shape=tuple(batch.latents.shape[1:]),
        device=learner.device,
    )
    given = batch.labels, batch.captions, batch.caption_lengths, batch.records
    conditioning = learner.conditioner(*given, widen=learner.autocast_dtype is None)
    conditioning = learner.conditioner.drop(conditioning, draws.dropped)

    engine.model.train()
    parts = microbatches(
        size, learner.ranks.world_size, recipe.run.microbatch or microbatch_limit(learner, batch.bucket)
    )
    losses = []
    for part in parts:
        with (
            engine.microbatch(last=part is parts[-1]),
            preferred(learner.attention_kernels),
        ):  # what is recomputed as well
            found = image_losses(learner, batch.latents[part], draws.part(part), conditioning.part(part))
            engine.backward(found.sum() / size)
        losses.append(found.detach())

    rate = learning_rate(recipe.peak_lr, recipe.schedule, step, recipe.run.steps)
    grad_norm, skipped = engine.update(step, learning_rate=rate, grad_clip=recipe.run.grad_clip)
    learner.step, learner.num_images = step, learner.num_images + size
    of_images = torch.cat(losses)[: len(batch)]
    return StepResult(
        step=step,
        loss=of_images.sum() / size,
        grad_norm=grad_norm,
        skipped=skipped,
        num_images=size,
        losses=of_images,
        time_shares=time_share(recipe.objective, draws.times)[: len(batch)],
        records=batch.records,
        store=batch.store,
    )


def image_losses(learner: Learner, x: Tensor, draws: Draws, conditioning: Conditioning) -> Tensor:
    """Loss of each image of a microbatch; one zero for a rank that has none left, so that all ranks go the same way."""
    if not len(x):
        return image_losses(learner, *_nothing(x, conditioning)) * 0

    def predict(noisy: Tensor, t: Tensor) -> Tensor:
        cast = torch.autocast(learner.device.type, learner.autocast_dtype, enabled=learner.autocast_dtype is not None)
        with cast:
            return learner.engine.forward(noisy, t, conditioning)

    return loss_per_image(learner.recipe.objective, predict, x, draws.noise, draws.times)


def _nothing(x: Tensor, conditioning: Conditioning) -> tuple[Tensor, Draws, Conditioning]:
    """One made-up image in the place of none: zeros, at time zero."""
    image, time = x.new_zeros((1, *x.shape[1:])), x.new_zeros(1)
    return image, Draws(image, time, time.bool()), conditioning.dummy()


def microbatch_limit(learner: Learner, bucket: str) -> int:
    """Most images of a forward, where it was measured; of a bucket that is new since, the least. 0: no limit."""
    measured = learner.microbatches
    return measured.get(bucket) or min(measured.values(), default=0)


def microbatches(size: int, world_size: int, limit: int) -> list[slice]:
    """Cut a rank's slice of a global batch for one forward each: as few as can be, and as equal.

    All ranks make as many, so the last ones may be beyond the end of a rank that has fewer images.

    Args:
      size: images of the global batch.
      limit: most images of a forward; 0: no limit.
    """
    most = -(-size // world_size)  # images of the rank that has most
    count = -(-most // limit) if limit else 1
    each = -(-most // count)
    return [slice(start, start + each) for start in range(0, most, each)]
