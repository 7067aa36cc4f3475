"""Steps of a tiny model of each kind on batches of noise; ``tiny_models`` makes the models tiny."""

from __future__ import annotations

import torch

from leandit.datasets.batches.batch import Batch
from leandit.tools.plan.synthetic import synthetic_batch, synthetic_run
from leandit.tools.plan.workload import TrainingWorkload, workload_at_resolution
from leandit.train.config import load
from leandit.train.metrics.meter import StepResult
from leandit.train.run.state import Run
from leandit.train.step import train_step

SHARED = ("optimizer.name=adamw", "optimizer.betas=[0.9, 0.99]", "model.num_classes=10", "run.steps=100")
RECIPES = {
    "labels": ("dit-s-2-256", ()),
    "captions": ("dit-s-2-256", ("conditioning.kind=caption",)),
    "pixart": ("pixart-sigma-256", ("model.name=pixart-tiny",)),
    "sana": ("sana-600m-512", ("model.name=sana-tiny",)),
    "sd3": ("sd3.5-medium-512", ("model.name=sd3-tiny",)),
}
ROUTED = ("routing.kind=tread", "routing.first_block=1", "routing.last_block=1")
# With features of the store, routed tokens and a class token.
ALIGNED = {"aligned": ("sit-xl-2-256-reg", ("model.name=DiT-S/2", "align.dinov2.block=1", *ROUTED))}
KINDS = {"sd3": 3}  # of blocks: with two attentions, with one, and the last one, which gives no captions; others have 1
BUCKETS = ("64x64", "48x80", "32x64", "96x32", "80x64")  # each with another number of tokens, else they share code
LENGTHS = (5, 60, 64, 65, 128)  # of the longest caption of a batch: two, once they are padded
FULL, LEFTOVER, LIMIT = 7, 4, 3  # images, in microbatches of 3, 3 and 1; of 2 and 2


def tiny_workload(model: str, *settings: str, side_px: int = 64) -> TrainingWorkload:
    """That of a key of ``RECIPES`` or ``ALIGNED``."""
    recipe, own = (RECIPES | ALIGNED)[model]
    return workload_at_resolution(load(recipe, [*SHARED, *own, *settings]), side_px)


class TinySteps:
    """A learner, and steps on batches in memory of the host."""

    def __init__(self, model: str, device: torch.device, *settings: str, compiled: bool = False) -> None:
        self._device, self._scale = device, 4 if model == "sana" else 1  # its latents have a quarter of the places
        self.work = tiny_workload(model, *settings, side_px=64 * self._scale)
        self.learner: Run = synthetic_run(
            self.work.recipe, self.work.spec, self.work.tokens, device, store=self.work.store, compiled=compiled
        )

    def batch(self, images: int = FULL, bucket: str = BUCKETS[0], tokens: int = LENGTHS[0]) -> Batch:
        """On the CPU."""
        size = "x".join(str(int(side) * self._scale) for side in bucket.split("x"))
        return synthetic_batch(self.work.store, size, images, min(tokens, self.work.tokens), torch.device("cpu"))

    def step(self, images: int = FULL, bucket: str = BUCKETS[0], tokens: int = LENGTHS[0]) -> StepResult:
        return self.step_on(self.batch(images, bucket, tokens).to(self._device))

    def step_on(self, batch: Batch) -> StepResult:
        """A step on a batch that is on the device."""
        return train_step(self.learner, batch)
