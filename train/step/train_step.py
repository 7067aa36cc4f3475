"""One step: from a batch to an update. Nothing waits for the device, but optimizers other than AdamW with fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...datasets.batches.batch import Batch
from ...datasets.order.slices import rank_slice
from ..metrics.window import StepResult
from ..objectives.draws import draw
from ..objectives.losses import PLAIN, time_share
from ..optim.build import learning_rate
from .image_losses import (
    Microbatch,
    compares_images,
    image_losses,
    is_active,
    num_routed_tokens,
    teachers_of,
    with_own_teacher,
)
from .learner import Learner

TOKEN_STEP = 32  # of packed captions: few shapes to compile, and little padding


def train_step(learner: Learner, batch: Batch) -> StepResult:
    """One update: accumulate the gradients of the microbatches, clip, step, average.

    Returns: losses and gradient norm, still on the device.
    """
    recipe, engine, step, size = learner.recipe, learner.engine, learner.step + 1, batch.global_size
    draws = draw(
        recipe.objective,
        recipe.conditioning.drop,
        seed=recipe.run.seed,
        step=step,
        rows=rank_slice(size, learner.ranks.rank, learner.ranks.world_size),
        shape=tuple(batch.latents.shape[1:]),
        device=learner.device,
        class_width=learner.spec.class_width,
        num_tokens=num_routed_tokens(learner, batch.latents.shape, step),
        less_time=recipe.self_align.weight > 0,
    )
    inputs = batch.labels, batch.texts, batch.records
    conditioning = learner.conditioner(*inputs, store=batch.store, widen=learner.autocast_dtype is None)
    conditioning = learner.conditioner.drop(conditioning, draws.dropped)
    images = Microbatch(batch.latents, draws, conditioning, teachers_of(learner, batch))

    if not engine.model.training:  # after an evaluation; it walks over all modules
        engine.model.train()
    parts = microbatches(
        size, learner.ranks.world_size, recipe.run.microbatch or microbatch_limit(learner, batch.bucket)
    )
    rows = [rows_of(learner, part, len(batch)) for part in parts]
    if (lengths := caption_lengths(batch)) is not None:
        images = images._replace(conditioning=conditioning._replace(mean_tokens=mean_tokens(lengths, parts)))
    if recipe.self_align.weight and is_active(recipe.self_align.stop_step, step):
        images = with_own_teacher(learner, images, rows)
    parts_losses: list[dict[str, Tensor]] = []
    for part, some in zip(parts, rows, strict=True):
        with engine.microbatch(last=part is parts[-1]):
            losses = image_losses(learner, images.part(some), step)
            if isinstance(some, Tensor):  # those that fill it up do not count
                losses = {name: loss[: max(0, len(batch) - part.start)] for name, loss in losses.items()}
            engine.backward(torch.stack(list(losses.values())).sum() / size)
        parts_losses.append({name: loss.detach() for name, loss in losses.items()})

    rate = learning_rate(recipe.peak_lr, recipe.schedule, step, recipe.run.steps)
    grad_norm, skipped = engine.update(step, learning_rate=rate, grad_clip=recipe.run.grad_clip)
    learner.step, learner.num_images = step, learner.num_images + size
    terms = {name: torch.cat([part[name] for part in parts_losses])[: len(batch)] for name in parts_losses[0]}
    losses = terms.pop(PLAIN)
    return StepResult(
        step=step,
        loss=losses.sum() / size,
        terms={name: term.sum() / size for name, term in terms.items()},
        grad_norm=grad_norm,
        skipped=skipped,
        num_images=size,
        losses=losses,
        time_shares=time_share(recipe.objective, draws.times)[: len(batch)],
        records=batch.records,
        store=batch.store,
    )


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


def caption_lengths(batch: Batch) -> np.ndarray | None:
    """(B,) tokens of each caption, on the host; None if there are several text encoders, or none."""
    if len(batch.texts) != 1 or not len(batch):
        return None
    (text,) = batch.texts.values()
    return None if text.host_lengths is None else np.array(text.host_lengths)


def mean_tokens(lengths: np.ndarray, parts: Sequence[slice]) -> int:
    """The most tokens an image that any microbatch has in the mean, rounded up to a multiple of ``TOKEN_STEP``.

    Args:
      lengths: (B,) tokens of each caption; the last one may fill up the last microbatch (``rows_of``).
    """
    last = len(lengths) - 1
    filled = [lengths[np.arange(part.start, part.stop).clip(max=last)].mean() for part in parts]
    short = [lengths[part].mean() for part in parts if part.start <= last]
    return -(-math.ceil(max(filled + short)) // TOKEN_STEP) * TOKEN_STEP


def rows_of(learner: Learner, part: slice, count: int) -> slice | Tensor:
    """The images of a microbatch, among ``count`` of this rank.

    Compiled blocks would be compiled again for a last microbatch with fewer images. Its last image is repeated until it
    has as many as the others; of 256 images in microbatches of at most 90, two. Not where a term compares images.
    """
    if part.stop <= count or not count or not learner.compiled or compares_images(learner.recipe):
        return part
    return torch.arange(part.start, part.stop, device=learner.device).clamp_max(count - 1)
