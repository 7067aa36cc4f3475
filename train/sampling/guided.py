"""Draw latents with classifier-free guidance. The decoder that turns them into images is not used."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...datasets.order.shuffle import keyed_hash
from ...errors import RecipeError
from ..data_recipe import SampleGuidance, SampleShift
from ..models.build import FAMILIES, family_of, patch_of, takes_guidance
from ..models.conditioning import Conditioner, Conditioning, Extras
from ..models.spec import ModelSpec
from ..objectives.losses import TRAIN_STEPS
from ..objectives.shift import TimeShift
from ..techniques.registry import ObjectiveSection
from .schedulers import STOCHASTIC, Diffusion, LastStep, Sampler, choose_sampler, timed_scheduler
from .shift import sampling_shift

GUIDANCE = 4.0  # by default


def guidance_scale(spec: ModelSpec, requested: SampleGuidance | None) -> float:
    """The scale of classifier-free guidance.

    Args:
      requested: None or "auto": 4, or 1 for a distilled model, which takes the guidance as an input.
    """
    if requested is None or requested == "auto":
        return 1.0 if takes_guidance(spec) else GUIDANCE
    return requested


@dataclass(frozen=True)
class Solver:
    """How latents are drawn.

    Args:
      sampler: "auto" is the first of ``SAMPLERS``.
      steps: of the scheduler; "heun" makes two forwards in all but the last.
      guidance: 1 is none; output = null + guidance * (conditional - null).
      interval: guidance only at times from the first to the second, 0 is data and 1 noise.
      guided_channels: guide only the first channels, 3 in DiT's reference; 0: all.
      shift: of the times of "flow" towards noise; None: that of the model, see ``SamplingModel``.
      diffusion, last_step: of "sde", as in ``EulerMaruyama``.
      autocast: dtype of the forwards; None: that of the weights.
      tf32: float32 products in TensorFloat-32, on a GPU that has it.
    """

    sampler: Sampler = "auto"
    steps: int = 50
    guidance: float = 4.0
    interval: tuple[float, float] = (0.0, 1.0)
    guided_channels: int = 0
    shift: float | None = None
    diffusion: Diffusion = "sigma"
    last_step: LastStep = "mean"
    autocast: torch.dtype | None = None
    tf32: bool = False


@dataclass(frozen=True)
class SamplingModel:
    """A model that can draw: that of a running training, or a ``Snapshot``.

    Args:
      model: (noisy latents, time (B,) in 0..1000, conditioning) -> its output.
      objective: that it was trained with.
      conditioner: makes its conditioning, and the null.
      sample_shift: ``run.sample_shift``, by which the times of a flow are shifted.
    """

    model: Callable[..., Any]
    spec: ModelSpec
    objective: ObjectiveSection
    conditioner: Conditioner
    sample_shift: SampleShift = field(default="auto", kw_only=True)

    def shift_of(self, solver: Solver) -> TimeShift:
        """The shift of the times that a solver draws a flow at."""
        if solver.shift is not None:
            return TimeShift(constant=solver.shift)
        return sampling_shift(self.spec, self.objective, self.sample_shift)


def draw_latents(
    drawn: SamplingModel,
    conditioning: Conditioning,
    *,
    size: tuple[int, int],
    seed: int,
    solver: Solver,
    numbers: Sequence[int] | None = None,
) -> Tensor:
    """Draw one latent for each conditioning.

    The state of a solver is flat, (B, CHW + D): a latent, then the class token of a model that denoises one. Solvers
    compute element by element, so its shape changes nothing.

    Args:
      conditioning: on the device of the model.
      size: latent height and width.
      seed, numbers: the noise of an image depends on these alone, so images can be drawn in any batches; None
        numbers them from 0.
    Returns: (B, C, H, W) float32, as the model sees them (shifted and scaled).
    Raises: RecipeError: the sampler is not one of the objective's.
    """
    spec, objective, shape = drawn.spec, drawn.objective, (drawn.spec.channels, *size)
    sampler = choose_sampler(objective, solver.sampler, steps=solver.steps)
    forward, inputs = guided(drawn, conditioning, solver, size), conditioning.inputs
    numbers = range(len(inputs)) if numbers is None else numbers
    generators = [torch.Generator().manual_seed(keyed_hash(seed, number) % 2**63) for number in numbers]
    noise = [
        torch.stack([torch.randn(count, generator=one) for one in generators])
        for count in (math.prod(shape), spec.class_width)
    ]
    x = torch.cat(noise, dim=1).to(inputs.device)
    scheduler = timed_scheduler(
        objective,
        sampler,
        solver.steps,
        shift=drawn.shift_of(solver) if objective.kind == "flow" else TimeShift(),
        tokens=math.prod(size) // patch_of(spec) ** 2,
        diffusion=solver.diffusion,
        last_step=solver.last_step,
    )
    noises: dict[str, Any] = {"generator": generators} if sampler in STOCHASTIC else {}
    times = scheduler.timesteps.tolist()
    if objective.kind == "flow" and sampler == "dpm":
        family = family_of(spec.name)
        if family is None or not FAMILIES[family].rounds_times:
            times = (scheduler.sigmas[:-1] * TRAIN_STEPS).tolist()  # its timesteps are rounded down to whole numbers
        scheduler.set_begin_index(0)  # two of which may be equal
    # Not inference_mode: what FSDP gathers in it cannot be trained afterwards.
    with torch.no_grad(), float32_products(solver.tf32):
        for t, time in zip(scheduler.timesteps, times, strict=True):
            output = forward(x, time)
            if sampler != "ddpm":  # which takes the variance
                output = output[:, : x.shape[1]]
            x = scheduler.step(output, t, x, **noises).prev_sample
    return x[:, : math.prod(shape)].unflatten(1, shape)


def guided(
    drawn: SamplingModel, conditioning: Conditioning, solver: Solver, size: tuple[int, int]
) -> Callable[[Tensor, float], Tensor]:
    """The model with guidance, as a function of noisy states, (B, CHW + D), and one time in 0..1000 for all of them.

    Conditional and null are one batch at the times that need both. A variance, which follows the state, is not guided.
    A class token is guided as the latent is. Qwen-Image's guided velocity gets the norm of the conditional one. A model
    that has learned to do without its routed blocks computes null without them.

    Source: Ho and Salimans 2022, equation 6; Kynkaanniemi et al. 2024, section 3 (the interval); Park et al. 2025
    (SPRINT), arXiv 2510.21986 (path-drop guidance).
    """
    spec, inputs, shape = drawn.spec, conditioning.inputs, (drawn.spec.channels, *size)
    if spec.class_width and solver.guided_channels:
        raise RecipeError("guided channels: this model denoises a class token too, and all of it is guided.")
    everywhere = torch.ones(len(inputs), dtype=torch.bool, device=inputs.device)
    dropped = everywhere.cpu() if drawn.conditioner.changes_lengths else everywhere
    both = conditioning.followed_by(drawn.conditioner.drop(conditioning, dropped)) if solver.guidance != 1 else None
    null_path = torch.cat([~everywhere, everywhere]) if spec.drops_path else None
    width = math.prod(shape)
    family = family_of(spec.name)
    count = min(solver.guided_channels or spec.channels, spec.channels) * math.prod(size) + spec.class_width

    def forward(x: Tensor, t: float, given: Conditioning, without_path: Tensor | None = None) -> Tensor:
        time = torch.full((len(x),), t, device=inputs.device)
        extras = Extras(class_token=x[:, width:] if spec.class_width else None, without_path=without_path)
        asks = spec.class_width > 0 or without_path is not None
        with torch.autocast(inputs.device.type, solver.autocast, enabled=solver.autocast is not None):
            result = drawn.model(x[:, :width].unflatten(1, shape), time, given, *([extras] if asks else []))
        outputs = (result.output, result.class_velocity) if asks else (result,)
        return torch.cat([output.float().flatten(1) for output in outputs if output is not None], dim=1)

    def guided_forward(x: Tensor, t: float) -> Tensor:
        if both is None or not solver.interval[0] <= t / TRAIN_STEPS <= solver.interval[1]:
            return forward(x, t, conditioning)
        output, null = forward(torch.cat([x, x]), t, both, null_path).chunk(2)
        first = null[:, :count] + solver.guidance * (output[:, :count] - null[:, :count])
        guided_output = torch.cat([first, output[:, count:]], dim=1)
        if family is None:
            return guided_output
        velocities = [velocity[:, :width].unflatten(1, shape) for velocity in (guided_output, output)]
        rescaled = FAMILIES[family].rescale_guided(velocities[0], velocities[1])
        return torch.cat([rescaled.flatten(1), guided_output[:, width:]], dim=1)

    return guided_forward


@contextlib.contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Turn TensorFloat-32 on or off within a block."""
    backends: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    previous = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = tf32
    try:
        yield
    finally:
        for backend, value in zip(backends, previous, strict=True):
            backend.allow_tf32 = value
