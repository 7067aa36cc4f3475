"""Draw latents from a snapshot with classifier-free guidance. The decoder that turns them into pictures is not used."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...datasets.errors import RecipeError
from ...datasets.order.shuffle import keyed_hash
from ..models.conditioning import Conditioner, Conditioning, Extras, ModelOutput
from ..models.spec import ModelSpec
from ..objectives.losses import TRAIN_STEPS
from ..techniques.registry import ObjectiveSection
from .euler_maruyama import Diffusion, LastStep
from .schedulers import STOCHASTIC, Sampler, build_scheduler, choose_sampler


@dataclass(frozen=True)
class Solver:
    """How latents are drawn.

    Args:
      sampler: "auto" is the first of ``SAMPLERS``.
      steps: of the scheduler; "heun" makes two forwards in all but the last.
      guidance: 1 is none; output = null + guidance * (conditional - null).
      interval: guidance only at times from the first to the second, 0 is data and 1 noise.
      guided_channels: guide only the first channels, 3 in DiT's reference; 0: all.
      shift: of the times of "flow" towards noise; None: that of training.
      diffusion, last_step: of "sde", as of ``EulerMaruyama``.
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

    def guides(self, t: float) -> bool:
        """Whether guidance applies at a time in 0..1."""
        return self.guidance != 1 and self.interval[0] <= t <= self.interval[1]


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


class Drawn(Protocol):
    """A model that draws: a ``Snapshot``, or the model of a run."""

    @property
    def spec(self) -> ModelSpec:
        """Of the model."""
        ...

    @property
    def objective(self) -> ObjectiveSection:
        """What it has learned."""
        ...

    @property
    def conditioner(self) -> Conditioner:
        """Makes its conditioning, and the null."""
        ...

    @property
    def model(self) -> Callable[..., Any]:
        """(noisy latents, time (B,) in 0..1000, conditioning) -> its output."""
        ...


def draw_latents(
    snapshot: Drawn,
    conditioning: Conditioning,
    *,
    size: tuple[int, int],
    seed: int,
    solver: Solver,
    numbers: Sequence[int] | None = None,
) -> Tensor:
    """Draw one latent for each conditioning.

    Args:
      conditioning: on the device of the model.
      size: latent height and width.
      seed, numbers: the noise of an image depends on these alone, so images can be drawn in any batches; None
        numbers them from 0.
    Returns: (B, C, H, W) float32, as the model sees them (shifted and scaled).
    Raises: RecipeError: the sampler is not one of the objective's.
    Source: Ho and Salimans 2022, equation 6; Kynkaanniemi et al. 2024, section 3 (the interval).
    """
    objective = snapshot.objective
    if solver.shift is not None:
        objective = objective.model_copy(update={"shift": solver.shift})
    sampler = choose_sampler(objective, solver.sampler, steps=solver.steps)
    inputs = conditioning.labels if conditioning.labels is not None else conditioning.captions
    assert inputs is not None
    device = inputs.device
    numbers = range(len(inputs)) if numbers is None else numbers
    generators = [torch.Generator().manual_seed(keyed_hash(seed, number) % 2**63) for number in numbers]
    shape = (snapshot.spec.channels, *size)
    x = torch.stack([torch.randn(shape, generator=generator) for generator in generators]).to(device)
    if width := snapshot.spec.class_width:  # denoised together: one state of latents and class tokens, (B, CHW + D)
        tokens = torch.stack([torch.randn(width, generator=generator) for generator in generators]).to(device)
        x = torch.cat([x.flatten(1), tokens], dim=1)
    forward = Guided(snapshot, conditioning, solver, device, shape)
    scheduler = build_scheduler(objective, sampler, diffusion=solver.diffusion, last_step=solver.last_step)
    scheduler.set_timesteps(solver.steps)
    noises: dict[str, Any] = {"generator": generators} if sampler in STOCHASTIC else {}
    times = scheduler.timesteps.tolist()
    if objective.kind == "flow" and sampler == "dpm":
        times = (scheduler.sigmas[:-1] * TRAIN_STEPS).tolist()  # its timesteps are rounded to whole numbers
        scheduler.set_begin_index(0)  # two of which may be equal
    # Not inference_mode: what FSDP gathers in it cannot be trained afterwards.
    with torch.no_grad(), float32_products(solver.tf32):
        for t, time in zip(scheduler.timesteps, times, strict=True):
            output = forward(x, time)
            if snapshot.spec.out_channels > snapshot.spec.channels and sampler != "ddpm":  # which takes the variance
                output = output[:, : snapshot.spec.channels]
            x = scheduler.step(output, t, x, **noises).prev_sample
    return x if x.ndim == 4 else x[:, : math.prod(shape)].unflatten(1, shape)


class Guided:
    """The model with guidance, as a function of noisy latents and one time for all of them.

    Conditional and null are one batch at the times that need both.
    """

    def __init__(
        self,
        snapshot: Drawn,
        conditioning: Conditioning,
        solver: Solver,
        device: torch.device,
        shape: tuple[int, ...],
    ) -> None:
        given = conditioning.labels if conditioning.labels is not None else conditioning.captions
        assert given is not None
        everywhere = torch.ones(len(given), dtype=torch.bool, device=device)
        null = snapshot.conditioner.drop(conditioning, everywhere)
        self._both = conditioning.followed_by(null)
        self._conditioning, self._model, self._solver, self._device = conditioning, snapshot.model, solver, device
        self._shape, self._class_width = shape, snapshot.spec.class_width
        if self._class_width and solver.guided_channels:
            raise RecipeError("guided channels: this model denoises a class token too, and all of it is guided.")
        all_guided = math.prod(shape) + self._class_width if self._class_width else snapshot.spec.channels
        self._guided = min(solver.guided_channels or all_guided, all_guided)

    def __call__(self, x: Tensor, t: float) -> Tensor:
        """(B, C, H, W) float32 and a time in 0..1000 to (B, out_channels, H, W) float32; a variance is not guided.

        With a class token, (B, CHW + D) to its velocity.
        """
        if not self._solver.guides(t / TRAIN_STEPS):
            return self._forward(x, t, self._conditioning)
        output, null = self._forward(torch.cat([x, x]), t, self._both).chunk(2)
        guided, rest = output[:, : self._guided], output[:, self._guided :]
        null = null[:, : self._guided]
        return torch.cat([null + self._solver.guidance * (guided - null), rest], dim=1)

    def _forward(self, x: Tensor, t: float, conditioning: Conditioning) -> Tensor:
        dtype, time = self._solver.autocast, torch.full((len(x),), t, device=self._device)
        with torch.autocast(self._device.type, dtype, enabled=dtype is not None):
            if not self._class_width:
                return self._model(x, time, conditioning).float()
            latents, token = x.split([math.prod(self._shape), self._class_width], dim=1)
            found = self._model(latents.unflatten(1, self._shape), time, conditioning, Extras(class_token=token))
        assert isinstance(found, ModelOutput)
        assert found.class_velocity is not None
        return torch.cat([found.output.float().flatten(1), found.class_velocity.float()], dim=1)
