"""Draw latents from a snapshot, with classifier-free guidance. The decoder that makes them pictures is not known here.

The steps are diffusers' schedulers: Euler, Heun and DPM-Solver++ for "flow"; DDIM, DPM-Solver++ and DDPM's own for
"ddpm".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from ...datasets.errors import RecipeError, RunError
from ...datasets.format.class_names import ClassNames
from ...datasets.format.schema import LatentSpec, TextSpec
from ...datasets.order.shuffle import keyed_hash
from ..config import ObjectiveSection
from ..models.build import Denoiser, build_model
from ..models.conditioning import Conditioner, Conditioning
from ..models.cpu_linear import use_onednn
from ..models.spec import ModelSpec
from ..objectives.losses import BETA_END, BETA_START, TRAIN_STEPS
from ..parallel.build import compile_blocks
from ..step.learner import COMPILED_CAPTION_STEP
from ..weights import checkpoint
from ..weights.checkpoint import MODEL, NULL_CAPTION

Sampler = Literal["auto", "euler", "heun", "ddim", "dpm", "ddpm"]
SAMPLERS: dict[str, tuple[Sampler, ...]] = {"flow": ("euler", "heun", "dpm"), "ddpm": ("ddim", "dpm", "ddpm")}


@dataclass(frozen=True)
class Solver:
    """How latents are drawn.

    Args:
      sampler: "auto" is the first of ``SAMPLERS``.
      steps: of the scheduler; "heun" makes two forwards in all but the last.
      guidance: 1 is none; output = null + guidance * (conditional - null).
      interval: guidance only at times from the first to the second, 0 is data and 1 noise.
      guided_channels: guidance of the first channels alone, as DiT's reference does with 3; 0: of all.
      autocast: dtype of the forwards, or None for that of the weights.
      tf32: products of float32 in TensorFloat-32, on a GPU that has it.
    """

    sampler: Sampler = "auto"
    steps: int = 50
    guidance: float = 4.0
    interval: tuple[float, float] = (0.0, 1.0)
    guided_channels: int = 0
    autocast: torch.dtype | None = None
    tf32: bool = False

    def guides(self, t: float) -> bool:
        """Whether null is asked for at a time in 0..1."""
        return self.guidance != 1 and self.interval[0] <= t <= self.interval[1]


@dataclass(frozen=True)
class Snapshot:
    """Averaged weights, ready to sample.

    Args:
      path, step: which.
      model: in evaluation mode, on its device.
      spec, objective, latent, text: what it is, and what its latents and captions are.
      conditioner: makes its conditioning.
      state: the rest of what was saved (encoders, classes, buckets).
      weights_hash: XXH3-128 of the file that the weights were read from.
    """

    path: Path
    step: int
    model: Denoiser
    spec: ModelSpec
    objective: ObjectiveSection
    latent: LatentSpec
    text: TextSpec | None
    conditioner: Conditioner
    state: dict
    weights_hash: str = ""

    @property
    def class_names(self) -> ClassNames:
        """The classes that it was trained on, by name: ``.find("tench")`` is a label."""
        return ClassNames(self.state["classes"], self.state.get("class_names"))


def load_snapshot(run: Path, device: torch.device, step: int = 0, *, compiled: bool = False) -> Snapshot:
    """Load a snapshot of a run.

    Args:
      step: of which step; 0: the newest.
      compiled: the blocks go through torch.compile.
    Raises: RunError: there is none, or it is not whole; DamageError.
    """
    found = checkpoint.find(checkpoint.SNAPSHOT, run)
    if not found:
        raise RunError(f"run '{run}': there is no snapshot. Train first: a checkpoint makes one too.")
    there = {int(path.name.partition("-")[2]): path for path in found}
    if step and step not in there:
        raise RunError(f"run '{run}': no snapshot of step {step}; there are {', '.join(map(str, there))}.")
    saved = checkpoint.read(there[step or max(there)])
    try:
        spec = ModelSpec.model_validate(saved.state["spec"])
        objective = ObjectiveSection.model_validate(saved.state["objective"])
        latent = LatentSpec.model_validate(saved.state["latent"])
        text = saved.state["text"] and TextSpec.model_validate(saved.state["text"])
    except (KeyError, ValidationError) as error:
        raise RunError(f"snapshot '{saved.path}': its state is not valid ({error}).") from error
    model = build_model(spec, seed=0)
    model.load_state_dict(saved.tensors(MODEL, model.state_dict()))
    null = None
    if spec.takes_text and text:
        wanted = torch.empty(text.max_tokens, text.width, device="meta")
        null = saved.tensors(NULL_CAPTION, {"embedding": wanted})["embedding"].to(device)
    return Snapshot(
        path=saved.path,
        step=saved.state["step"],
        model=made_ready(model, device, compiled=compiled),
        spec=spec,
        objective=objective,
        latent=latent,
        text=text,
        conditioner=Conditioner(spec, null, caption_step=caption_step(compiled)),
        state=saved.state,
        weights_hash=saved.files[f"{MODEL}.safetensors"].xxh3_128,
    )


def made_ready(model: Denoiser, device: torch.device, *, compiled: bool) -> Denoiser:
    """The model in evaluation mode on its device, and as fast as it can be there."""
    model.to(device).eval().requires_grad_(False)
    if compiled:
        compile_blocks(model)
    elif device.type == "cpu":
        use_onednn(model)
    return model


def caption_step(compiled: bool) -> int:
    """What captions are padded to a multiple of, so that compiled blocks see few lengths."""
    return COMPILED_CAPTION_STEP if compiled else 1


@contextlib.contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Whether a GPU computes products of float32 in TensorFloat-32, for a while."""
    places: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = tf32
    try:
        yield
    finally:
        for place, was in zip(places, before, strict=True):
            place.allow_tf32 = was


def draw_latents(
    snapshot: Snapshot,
    conditioning: Conditioning,
    *,
    size: tuple[int, int],
    seed: int,
    solver: Solver,
    numbers: Sequence[int] | None = None,
) -> Tensor:
    """Draw one latent for each conditioning.

    Args:
      size: latent height and width.
      seed, numbers: the noise of an image depends on both alone, so images can be drawn in any batches; None counts
        them from 0.
    Returns: (B, C, H, W) float32, as the model sees them (shifted and scaled).
    Raises: RecipeError: the sampler is not one of the objective's.
    Source: Ho and Salimans 2022, equation 6; Kynkaanniemi et al. 2024, section 3 (the interval).
    """
    sampler = choose_sampler(snapshot.objective, solver.sampler, steps=solver.steps)
    device = next(snapshot.model.parameters()).device
    given = conditioning.labels if conditioning.labels is not None else conditioning.captions
    assert given is not None
    numbers = range(len(given)) if numbers is None else numbers
    generators = [torch.Generator().manual_seed(keyed_hash(seed, number) % 2**63) for number in numbers]
    shape = (snapshot.spec.channels, *size)
    x = torch.stack([torch.randn(shape, generator=generator) for generator in generators]).to(device)
    forward = Guided(snapshot, conditioning, solver, device)
    scheduler = build_scheduler(snapshot.objective, sampler)
    scheduler.set_timesteps(solver.steps)
    noises: dict[str, Any] = {"generator": generators} if sampler == "ddpm" else {}
    times = scheduler.timesteps.tolist()
    if snapshot.objective.kind == "flow" and sampler == "dpm":
        times = (scheduler.sigmas[:-1] * TRAIN_STEPS).tolist()  # its own are cut to whole numbers
        scheduler.set_begin_index(0)  # of which many steps make two equal ones
    with torch.inference_mode(), float32_products(solver.tf32):
        for t, time in zip(scheduler.timesteps, times, strict=True):
            output = forward(x, time)
            if sampler != "ddpm":  # the only one that takes a learned variance
                output = output[:, : snapshot.spec.channels]
            x = scheduler.step(output, t, x, **noises).prev_sample
    return x


class Guided:
    """The model with guidance, as a function of noisy latents and one time for all of them.

    Conditional and null go through the model as one batch, at the times where both are needed.
    """

    def __init__(self, snapshot: Snapshot, conditioning: Conditioning, solver: Solver, device: torch.device) -> None:
        given = conditioning.labels if conditioning.labels is not None else conditioning.captions
        assert given is not None
        everywhere = torch.ones(len(given), dtype=torch.bool, device=device)
        null = snapshot.conditioner.drop(conditioning, everywhere)
        pairs = zip(conditioning, null, strict=True)
        self._both = Conditioning(*(None if a is None or b is None else torch.cat([a, b]) for a, b in pairs))
        self._conditioning, self._model, self._solver, self._device = conditioning, snapshot.model, solver, device
        self._guided = min(solver.guided_channels or snapshot.spec.channels, snapshot.spec.channels)

    def __call__(self, x: Tensor, t: float) -> Tensor:
        """(B, C, H, W) float32 and a time in 0..1000 to (B, out_channels, H, W) float32; a variance is not guided."""
        if not self._solver.guides(t / TRAIN_STEPS):
            return self._forward(x, t, self._conditioning)
        output, null = self._forward(torch.cat([x, x]), t, self._both).chunk(2)
        guided, rest = output[:, : self._guided], output[:, self._guided :]
        null = null[:, : self._guided]
        return torch.cat([null + self._solver.guidance * (guided - null), rest], dim=1)

    def _forward(self, x: Tensor, t: float, conditioning: Conditioning) -> Tensor:
        dtype, time = self._solver.autocast, torch.full((len(x),), t, device=self._device)
        with torch.autocast(self._device.type, dtype, enabled=dtype is not None):
            return self._model(x, time, conditioning).float()


def choose_sampler(objective: ObjectiveSection, wanted: Sampler, *, steps: int) -> Sampler:
    """The sampler that is meant.

    Raises: RecipeError: it is not one of the objective's, or cannot do with so few or so many steps.
    """
    known = SAMPLERS[objective.kind]
    if wanted == "auto":
        return known[0]
    if wanted == "dpm" and steps >= TRAIN_STEPS:
        raise RecipeError(f"--steps {steps}: --sampler dpm needs {TRAIN_STEPS - 1} at most; 20 are usual.")
    if wanted == "ddpm" and steps < 2:  # they are spread from the first to the last, and one would be the last
        raise RecipeError(f"--steps {steps}: --sampler ddpm needs 2 at least, as DiT is evaluated 250.")
    if wanted not in known:
        raise RecipeError(f"--sampler {wanted}: the run has objective.kind '{objective.kind}'. Use {', '.join(known)}.")
    return wanted


def build_scheduler(objective: ObjectiveSection, sampler: Sampler) -> Any:
    """The diffusers scheduler of a sampler of ``SAMPLERS``."""
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
    from diffusers.schedulers.scheduling_flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler

    if sampler == "euler":
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=TRAIN_STEPS, shift=objective.shift)
    if sampler == "heun":
        return FlowMatchHeunDiscreteScheduler(num_train_timesteps=TRAIN_STEPS, shift=objective.shift)
    if objective.kind == "flow":  # as Sana draws, with 20 steps
        return DPMSolverMultistepScheduler(
            num_train_timesteps=TRAIN_STEPS,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=objective.shift,
            algorithm_type="dpmsolver++",
            solver_order=2,
        )
    shared: dict[str, Any] = {
        "num_train_timesteps": TRAIN_STEPS,
        "beta_start": BETA_START,
        "beta_end": BETA_END,
        "beta_schedule": "linear",
        "prediction_type": "epsilon" if objective.predict == "epsilon" else "v_prediction",
    }
    if sampler == "dpm":  # second order, the multistep form (Lu et al. 2022, algorithm 2)
        return DPMSolverMultistepScheduler(**shared, algorithm_type="dpmsolver++", solver_order=2)
    if sampler == "ddpm":  # the steps are spread as DiT's evaluation spreads them: whole, from 999 to 0
        variance: Any = "learned_range" if objective.variance == "learned" else "fixed_large"
        return DDPMScheduler(**shared, variance_type=variance, clip_sample=False, timestep_spacing="linspace")
    # DDIM is the first order of DPM-Solver++ (Lu et al. 2022, section 4.1). diffusers' own class steps by 1000 // N,
    # which is not how far apart "trailing" times lie unless N divides 1000.
    return DPMSolverMultistepScheduler(
        **shared, algorithm_type="dpmsolver++", solver_order=1, timestep_spacing="trailing"
    )


def pipeline_scheduler(objective: ObjectiveSection, *, takes_flow_match: bool) -> Any:
    """The scheduler that is written into a pipeline's folder: DDIM for "ddpm", one of flow matching for "flow".

    Args:
      takes_flow_match: the pipeline takes the schedulers of flow matching. DiT's and PixArt's ask for what only older
        ones have; DPM-Solver++ with the flow's noise levels is one of those, and rounds its times to whole numbers.
    """
    first = SAMPLERS[objective.kind][0] if objective.kind == "ddpm" or takes_flow_match else "dpm"
    return build_scheduler(objective, first)
