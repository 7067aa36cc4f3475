"""The steps that ``bench train`` measures: ours, and the usual loop around diffusers' DiT."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ....datasets.errors import RecipeError
from ....train import loop
from ....train.config import TrainRecipe
from ....train.models.dit import size_of
from ....train.models.spec import ModelSpec
from ....train.objectives.losses import draw_times, loss_per_image
from ....train.optim.loss_scale import autocast_dtype
from ....train.run.model_for_store import model_spec
from ...plan.workload import TrainingWorkload
from ...synthetic.batches import synthetic_batch, synthetic_learner
from ..harness.meters import hardware

WARM_STEPS = 3  # not counted: compile, fill caches, allocate
LOSS_EVERY = 10  # steps after which our loop reads its loss, as run.log_every
Step = Callable[[], None]


@dataclass(frozen=True)
class StepRequest:
    """What to measure.

    Args:
      steps: of each cell in each round.
      data: "synthetic", or "store" for the real loop on a store.
      store: to train on; None makes one of noise.
      without: sections of the recipe; the step without each is measured beside it.
    """

    work: TrainingWorkload
    device: torch.device
    rounds: int
    steps: int
    data: str
    store: str | None = None
    without: tuple[str, ...] = ()


def without_section(request: StepRequest, name: str) -> StepRequest:
    """The same without a section of the recipe.

    Raises: RecipeError: there is no such section, or the recipe does not set it.
    """
    work, default = request.work, TrainRecipe()
    if getattr(work.recipe, name, None) == getattr(default, name, None):
        raise RecipeError(f"--without '{name}': the recipe has no section [{name}] of its own.")
    recipe = work.recipe.model_copy(update={name: getattr(default, name)})
    spec = model_spec(recipe, work.store, "the same store")
    return replace(request, work=replace(work, recipe=recipe, spec=spec))


def our_step(request: StepRequest) -> Step:
    """One step of our loop on noise; the loss is read every ``LOSS_EVERY`` steps, as in the loop."""
    work, device = request.work, request.device
    compiled = work.recipe.run.compile and device.type == "cuda"
    learner = synthetic_learner(work.recipe, work.spec, work.tokens, device, store=work.store, compiled=compiled)
    size = work.recipe.run.global_batch
    batch = synthetic_batch(work.store, work.largest_bucket, size, work.tokens, device)
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(loop.train_step(learner, batch).loss)
        if len(losses) == LOSS_EVERY:
            torch.stack(losses).mean().item()
            losses.clear()

    return step


def usual_step(request: StepRequest, model: nn.Module) -> Step:
    """One step of a usual loop, with our objective, on the same kind of batch."""
    work, device, recipe = request.work, request.device, request.work.recipe
    model = model.to(device).train()
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    section = recipe.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=section.lr, weight_decay=section.weight_decay)
    batch = synthetic_batch(work.store, work.largest_bucket, recipe.run.global_batch, 0, device)
    dtype, size = autocast_dtype(recipe.run.precision, device), recipe.run.global_batch
    microbatch = recipe.run.microbatch or size
    generator = torch.Generator(device).manual_seed(0)

    def step() -> None:
        optimizer.zero_grad()
        for start in range(0, size, microbatch):
            x = batch.latents[start : start + microbatch]
            noise = torch.randn(x.shape, device=device)
            t = draw_times(recipe.objective, len(x), generator)
            dropped = torch.rand(len(x), device=device) < recipe.conditioning.drop
            y = torch.where(dropped, work.spec.num_classes, batch.labels[start : start + microbatch])

            def predict(noisy: Tensor, time: Tensor, y: Tensor = y) -> Tensor:
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    return model(noisy, time, y)

            loss = loss_per_image(recipe.objective, predict, x, noise, t).sum() / size
            loss.backward()
            loss.item()
        if recipe.run.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.run.grad_clip)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                averages[name].mul_(recipe.run.ema_decay).add_(parameter, alpha=1 - recipe.run.ema_decay)

    return step


class DiffusersDiT(nn.Module):
    """diffusers' class with the call of the others; its own label dropout is turned off."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

        depth, width, heads, patch = size_of(spec.name)
        self.net = DiTTransformer2DModel(
            num_layers=depth,
            num_attention_heads=heads,
            attention_head_dim=width // heads,
            in_channels=spec.channels,
            out_channels=spec.out_channels,
            sample_size=spec.base_size,
            patch_size=patch,
            num_embeds_ada_norm=spec.num_classes,
        )
        for module in self.net.modules():
            if hasattr(module, "dropout_prob"):
                setattr(module, "dropout_prob", 0.0)  # noqa: B010 (for a type checker it is a tensor)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return self.net(x, timestep=t, class_labels=y, return_dict=False)[0]


def device_name(device: torch.device) -> str:
    """The model of a GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else hardware()["cpu"]


def timed(step: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds of ``count`` steps, including the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
