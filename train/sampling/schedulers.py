"""The samplers of each objective, as diffusers' schedulers.

"flow": Euler, Heun, DPM-Solver++ and Euler-Maruyama. "ddpm": DDIM, DPM-Solver++ and DDPM's own.
"""

from __future__ import annotations

from typing import Any, Literal

from ...datasets.errors import RecipeError
from ..objectives.losses import BETA_END, BETA_START, TRAIN_STEPS
from ..techniques.registry import ObjectiveSection
from .euler_maruyama import Diffusion, EulerMaruyama, LastStep

Sampler = Literal["auto", "euler", "heun", "sde", "ddim", "dpm", "ddpm"]
SAMPLERS: dict[str, tuple[Sampler, ...]] = {"flow": ("euler", "heun", "dpm", "sde"), "ddpm": ("ddim", "dpm", "ddpm")}
STOCHASTIC: tuple[Sampler, ...] = ("sde", "ddpm")  # whose steps take the generators of the noise


def choose_sampler(objective: ObjectiveSection, wanted: Sampler, *, steps: int) -> Sampler:
    """Resolve "auto", and check the sampler.

    Raises: RecipeError: the objective does not have it, or it does not support this number of steps.
    """
    known = SAMPLERS[objective.kind]
    if wanted == "auto":
        return known[0]
    if wanted == "dpm" and steps >= TRAIN_STEPS:
        raise RecipeError(f"--steps {steps}: --sampler dpm needs {TRAIN_STEPS - 1} at most; 20 are usual.")
    if wanted == "ddpm" and steps < 2:  # steps include the first and the last time
        raise RecipeError(f"--steps {steps}: --sampler ddpm needs 2 at least, as DiT is evaluated 250.")
    if wanted == "sde" and steps < 2:
        raise RecipeError(
            f"--steps {steps}: --sampler sde needs 2 at least, the last of them without noise; 250 are usual."
        )
    if wanted not in known:
        raise RecipeError(f"--sampler {wanted}: the run has objective.kind '{objective.kind}'. Use {', '.join(known)}.")
    return wanted


def build_scheduler(
    objective: ObjectiveSection, sampler: Sampler, *, diffusion: Diffusion = "sigma", last_step: LastStep = "mean"
) -> Any:
    """The scheduler of a sampler of ``SAMPLERS``: diffusers', or ``EulerMaruyama``.

    Args:
      diffusion, last_step: of ``EulerMaruyama``.
    """
    if sampler == "sde":
        return EulerMaruyama(shift=objective.shift, diffusion=diffusion, last_step=last_step)
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
    # unlike "trailing" times, unless N divides 1000.
    return DPMSolverMultistepScheduler(
        **shared, algorithm_type="dpmsolver++", solver_order=1, timestep_spacing="trailing"
    )


def pipeline_scheduler(objective: ObjectiveSection, *, takes_flow_match: bool) -> Any:
    """The scheduler in the folder of a pipeline: DDIM for "ddpm", a flow-matching one for "flow".

    Args:
      takes_flow_match: the pipeline supports flow-matching schedulers. DiT's and PixArt's do not; they get DPM-Solver++
        with flow sigmas, which rounds its times to whole numbers.
    """
    first = SAMPLERS[objective.kind][0] if objective.kind == "ddpm" or takes_flow_match else "dpm"
    return build_scheduler(objective, first)
