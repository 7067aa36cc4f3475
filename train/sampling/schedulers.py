"""The samplers of each objective: diffusers' schedulers, and Euler-Maruyama for the stochastic equation of a flow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import RecipeError
from ..data_recipe import SampleShift
from ..models.spec import ModelSpec
from ..objectives.losses import BETA_END, BETA_START, TRAIN_STEPS
from ..objectives.shift import TimeShift, is_of_flow, parse_scheduler
from ..techniques.registry import ObjectiveSection
from .shift import sampling_shift

Sampler = Literal["auto", "euler", "heun", "sde", "ddim", "dpm", "ddpm"]
SAMPLERS: dict[str, tuple[Sampler, ...]] = {"flow": ("euler", "heun", "dpm", "sde"), "ddpm": ("ddim", "dpm", "ddpm")}
STOCHASTIC: tuple[Sampler, ...] = ("sde", "ddpm")  # whose steps take the generators of the noise

Diffusion = Literal["sigma", "linear", "constant", "decreasing", "increasing-decreasing"]
LastStep = Literal["mean", "euler", "tweedie"]
# Time before the shift at which the last step, without noise, begins: of SiT, REPA and SR-DiT for any number of steps.
LAST_STEP = 0.04


def choose_sampler(objective: ObjectiveSection, wanted: Sampler, *, steps: int) -> Sampler:
    """Resolve "auto", and check the sampler.

    Raises: RecipeError: the objective does not have it, or it does not support this number of steps.
    """
    known = SAMPLERS[objective.kind]
    if wanted == "auto":
        return known[0]
    if wanted == "dpm" and steps >= TRAIN_STEPS:
        raise RecipeError(f"--steps {steps}: --sampler dpm takes at most {TRAIN_STEPS - 1}; 20 is usual.")
    if wanted in STOCHASTIC and steps < 2:  # the first and the last
        raise RecipeError(f"--steps {steps}: --sampler {wanted} takes at least 2; 250 is usual.")
    if wanted not in known:
        raise RecipeError(f"--sampler {wanted}: the run has objective.kind '{objective.kind}'. Use {', '.join(known)}.")
    return wanted


def timed_scheduler(
    objective: ObjectiveSection,
    sampler: Sampler,
    steps: int,
    *,
    shift: TimeShift,
    tokens: int,
    diffusion: Diffusion = "sigma",
    last_step: LastStep = "mean",
) -> Any:
    """The scheduler of a sampler, with the times of so many steps for images of a size.

    Args:
      shift: of the times of "flow". With Euler's steps they are those of a pipeline that is given
        ``sigmas=linspace(1, scheduler.sigma_min, steps)``; the other samplers leave out ``shift.terminal``.
      tokens: of the image.
      diffusion, last_step: of ``EulerMaruyama``.
    """
    factor = shift.at(tokens, steps)
    if sampler == "euler" and shift.rule != "constant":
        from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

        # A pipeline shifts times by size as they are; a constant shift is already in ``sigma_min``.
        by_size = FlowMatchEulerDiscreteScheduler(
            num_train_timesteps=TRAIN_STEPS,
            use_dynamic_shifting=True,
            time_shift_type="linear",
            shift_terminal=shift.terminal or None,  # pyright: ignore[reportArgumentType]
        )
        by_size.set_timesteps(sigmas=np.linspace(1, 1 / TRAIN_STEPS, steps).tolist(), mu=factor)
        return by_size
    objective = objective.model_copy(update={"shift": factor})
    scheduler = build_scheduler(objective, sampler, terminal=shift.terminal, diffusion=diffusion, last_step=last_step)
    scheduler.set_timesteps(steps)
    return scheduler


def build_scheduler(
    objective: ObjectiveSection,
    sampler: Sampler,
    *,
    terminal: float = 0.0,
    diffusion: Diffusion = "sigma",
    last_step: LastStep = "mean",
) -> Any:
    """The scheduler of a sampler of ``SAMPLERS``: diffusers', or ``EulerMaruyama``.

    Args:
      objective: with a number for its shift.
      terminal: see ``TimeShift``; of "euler" alone.
      diffusion, last_step: of ``EulerMaruyama``.
    """
    assert objective.shift != "resolution", "a scheduler has a number"
    if sampler == "sde":
        return EulerMaruyama(shift=objective.shift, diffusion=diffusion, last_step=last_step)
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
    from diffusers.schedulers.scheduling_flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler

    # Second order is the multistep form (Lu et al. 2022, algorithm 2).
    shared: dict[str, Any] = {"num_train_timesteps": TRAIN_STEPS}
    dpm: dict[str, Any] = shared | {"algorithm_type": "dpmsolver++", "solver_order": 2}
    if sampler == "euler":
        return FlowMatchEulerDiscreteScheduler(
            num_train_timesteps=TRAIN_STEPS,
            shift=objective.shift,
            shift_terminal=terminal or None,  # pyright: ignore[reportArgumentType]
        )
    if sampler == "heun":
        return FlowMatchHeunDiscreteScheduler(**shared, shift=objective.shift)
    if objective.kind == "flow":  # as Sana draws, with 20 steps
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": objective.shift}
        return DPMSolverMultistepScheduler(**dpm, **flow)
    noise: dict[str, Any] = {"beta_start": BETA_START, "beta_end": BETA_END, "beta_schedule": "linear"}
    noise["prediction_type"] = "epsilon" if objective.predict == "epsilon" else "v_prediction"
    if sampler == "dpm":
        return DPMSolverMultistepScheduler(**dpm, **noise)
    if sampler == "ddpm":  # the steps are spread as DiT's evaluation spreads them: whole, from 999 to 0
        variance: Any = "learned_range" if objective.variance == "learned" else "fixed_large"
        spacing: dict[str, Any] = {"clip_sample": False, "timestep_spacing": "linspace"}
        return DDPMScheduler(**shared, **noise, **spacing, variance_type=variance)
    # DDIM is the first order of DPM-Solver++ (Lu et al. 2022, section 4.1). diffusers' own class steps by 1000 // N,
    # unlike "trailing" times, unless N divides 1000.
    first_order: dict[str, Any] = dpm | {"solver_order": 1, "timestep_spacing": "trailing"}
    return DPMSolverMultistepScheduler(**noise, **first_order)


def pipeline_scheduler(
    spec: ModelSpec, objective: ObjectiveSection, sample_shift: SampleShift, *, takes_flow_match: bool
) -> dict[str, Any]:
    """The config of the scheduler in the folder of a pipeline, with ``_class_name``.

    That of the weights that the model began with, where it is of the same objective; else DDIM for "ddpm", and a
    flow-matching one for "flow".

    Args:
      sample_shift: ``run.sample_shift``; unless it is "auto", it replaces that of the weights.
      takes_flow_match: the pipeline supports flow-matching schedulers. DiT's and PixArt's do not; they get DPM-Solver++
        with flow sigmas, which rounds its times to whole numbers.
    """
    if sample_shift == "auto" and spec.scheduler and _is_of_objective(spec.scheduler, objective):
        return spec.scheduler
    if objective.kind == "ddpm":
        return _config_of(build_scheduler(objective, SAMPLERS["ddpm"][0]))
    shift = sampling_shift(spec, objective, sample_shift)
    if shift.rule == "constant":
        flow = objective.model_copy(update={"shift": shift.constant})
        sampler = SAMPLERS["flow"][0] if takes_flow_match else "dpm"
        return _config_of(build_scheduler(flow, sampler, terminal=shift.terminal))
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    by_size = FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=TRAIN_STEPS,
        use_dynamic_shifting=True,
        base_shift=shift.base,
        max_shift=shift.most,
        base_image_seq_len=shift.base_tokens,
        max_image_seq_len=shift.most_tokens,
        time_shift_type="exponential" if shift.is_exponential else "linear",
        shift_terminal=shift.terminal or None,  # pyright: ignore[reportArgumentType]
    )
    return _config_of(by_size)


def _is_of_objective(scheduler: Mapping[str, Any], objective: ObjectiveSection) -> bool:
    """Whether the scheduler that the weights came with samples from what the objective trains."""
    if objective.kind == "flow" or is_of_flow(scheduler):
        return objective.kind == "flow" and is_of_flow(scheduler)
    ours = _config_of(build_scheduler(objective, SAMPLERS["ddpm"][0]))
    keys = ("prediction_type", "beta_start", "beta_end", "beta_schedule", "num_train_timesteps")
    return all(scheduler.get(key) == ours[key] for key in keys)


def _config_of(scheduler: Any) -> dict[str, Any]:
    """The content of the scheduler_config.json that diffusers writes."""
    return parse_scheduler(scheduler.to_json_string())


class Stepped(NamedTuple):
    """The result of a step, with the field that diffusers' schedulers have."""

    prev_sample: Tensor


class EulerMaruyama:
    """The stochastic differential equation of a flow, with the calls of diffusers' schedulers that sampling uses.

    With time t from 0 (data) to 1 (noise), x = (1 - t) data + t noise and velocity v = noise - data, the noise in x is
    x + (1 - t) v in the mean, and the score is minus that over t. For any diffusion coefficient D(t) >= 0,

        dx = (-v + D(t) score) ds + sqrt(2 D(t)) dW,   s = 1 - t,

    has the marginals of the flow. Source: Ma et al. 2024 (SiT, arXiv 2401.08740), section 3 and table 2, and its code,
    whose time is s. REPA, REG and contrastive flow sample with D = t ("sigma") and the last step "mean".

    Args:
      shift: of the times towards noise, which are evenly spaced from 1 to 0.04 without it (1), as in SR-DiT's code.
      diffusion: D(t). On this path "sigma" and "linear" are both t.
      last_step: without noise: "mean" by the drift above, "euler" by the velocity alone, "tweedie" to the mean of the
        data, which on this path is "euler".
    """

    def __init__(self, *, shift: float, diffusion: Diffusion, last_step: LastStep) -> None:
        self._shift, self._last_step = shift, last_step
        self._diffusion: Diffusion = diffusion
        self._times: list[float] = []
        self._index = 0

    @property
    def timesteps(self) -> Tensor:
        """Times of the steps in 0..1000, (steps,) float64."""
        return torch.tensor(self._times[:-1], dtype=torch.float64) * TRAIN_STEPS

    def set_timesteps(self, steps: int) -> None:
        """Begin to draw with so many steps, of which the last has no noise; at least 2."""
        shift = self._shift
        even = torch.linspace(1, LAST_STEP, steps, dtype=torch.float64)
        self._times = [*(shift * even / (1 + (shift - 1) * even)).tolist(), 0.0]
        self._index = 0

    def step(self, velocity: Tensor, _time: Tensor, x: Tensor, *, generator: Sequence[torch.Generator]) -> Stepped:
        """One step.

        Args:
          velocity, x: (B, ...) float32, at the time of this step.
          generator: one for each of the batch, on the CPU.
        """
        t, following = self._times[self._index : self._index + 2]
        self._index += 1
        width, is_last = t - following, not following
        if is_last and self._last_step != "mean":
            return Stepped(x - width * velocity)
        diffusion = diffusion_at(t, self._diffusion)
        score = -(x + (1 - t) * velocity) / t
        mean = x + width * (diffusion * score - velocity)
        if is_last:
            return Stepped(mean)
        noise = torch.stack([torch.randn(x.shape[1:], generator=one) for one in generator]).to(x.device)
        return Stepped(mean + math.sqrt(2 * diffusion * width) * noise)


def diffusion_at(t: float, form: Diffusion) -> float:
    """D(t) of SiT's forms, of norm 1; "SBDM" is left out, as it is infinite at t = 1."""
    match form:
        case "sigma" | "linear":
            return t
        case "constant":
            return 1.0
        case "decreasing":  # in SiT's time, from noise to data
            return 0.25 * (math.cos(math.pi * (1 - t)) + 1) ** 2
        case "increasing-decreasing":
            return math.sin(math.pi * t) ** 2
