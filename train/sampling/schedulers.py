"""The samplers of each objective, as diffusers' schedulers.

"flow": Euler, Heun and DPM-Solver++. "ddpm": DDIM, DPM-Solver++ and DDPM's own.
"""

from __future__ import annotations

from typing import Any, Literal

from ...datasets.errors import RecipeError
from ..config import ObjectiveSection
from ..objectives.losses import BETA_END, BETA_START, TRAIN_STEPS

Sampler = Literal["auto", "euler", "heun", "ddim", "dpm", "ddpm"]
SAMPLERS: dict[str, tuple[Sampler, ...]] = {"flow": ("euler", "heun", "dpm"), "ddpm": ("ddim", "dpm", "ddpm")}


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
