"""What a run tells of itself: what it begins from, what trains, what takes longer than it, and how it computes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from ..metrics.flops import meta_model, shortened
from ..models.build import family_of, patch_of
from ..models.diffusers.adapters import trained_parameters
from ..optim.ema import build_rules, first_share
from ..parallel.strategy import choose_strategy
from ..weights.checkpoint import YOUNG
from .state import Run

LOG = logging.getLogger(__name__)


def origin_lines(run: Run, folder: Path) -> Iterator[str]:
    """Lines on the first weights, what was converted of them, what trains, and what takes longer than the run."""
    recipe, spec, steps = run.recipe, run.spec, run.recipe.run.steps
    if run.step:
        yield f"run '{folder}' resumes after step {run.step}"
    else:
        yield f"run '{folder}' begins from {', '.join([run.origin, *_positions(run)])}"
    model = meta_model(spec)
    total = shortened(sum(parameter.numel() for parameter in model.parameters()))
    if adapter := spec.adapter:
        trained = shortened(sum(parameter.numel() for parameter in trained_parameters(model).values()))
        scale = f"rank {adapter.rank}, alpha {adapter.alpha:g}"
        frozen = run.frozen.source if run.frozen else recipe.model.init_from
        yield f"{spec.name}: adapters of {scale} train, {trained} of {total} parameters; '{frozen}' is frozen"
    else:
        yield f"{spec.name}: training all {total} parameters"
    if (warmup := recipe.schedule.warmup_steps) >= steps:
        yield (
            f"schedule.warmup_steps {warmup}: the learning rate rises until then, the run ends at step {steps}, so its "
            "loss may look flat. For a short test --set schedule.warmup_steps=0"
        )
    if (share := first_share(build_rules(recipe)[0], steps)) > YOUNG:
        yield (
            f"run.ema_decay {recipe.ema_decay:g}: the average is longer than the run, at its end {share:.0%} of it is "
            "still what the run began with, and so are snapshots and pictures. For a short run --set ema.warmup=true"
        )


def _positions(run: Run) -> Iterator[str]:
    """The span of a DiT's positions, where it is that of other images than those of the store."""
    spec = run.spec
    stored = max(store.spec.images.resolution_px // store.spec.latent.downscale for store in run.stores)
    if not family_of(spec.name) and spec.base_size != stored:
        learned, new = spec.base_size // patch_of(spec), stored // patch_of(spec)
        yield f"positions over {learned} tokens a side as it has learned, not {new}"


def log_settings(run: Run) -> None:
    """Log what computes a step, as far as the recipe leaves it open."""
    recipe, ranks, device = run.recipe, run.ranks, run.device
    strategy = choose_strategy(recipe.parallel, ranks)
    LOG.info("rank %d of %d on %s, parallel.strategy %s", ranks.rank, ranks.world_size, device, strategy)
    asked = f"run.precision {recipe.run.precision}, run.compile {recipe.run.compile}"
    how = "compiled blocks" if run.compiled else "nothing compiled"
    LOG.info("computes in %s, %s (%s)", run.autocast_dtype or "float32", how, asked)
    LOG.info("run.microbatch %d (0: open), run.prefetch %d batches", recipe.run.microbatch, recipe.run.prefetch)
