"""Draw latents from a snapshot, with classifier-free guidance. The decoder that makes them pictures is not known here.

The steps are diffusers' schedulers: Euler for "flow", DDIM for "ddpm".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from ..datasets.errors import RunError
from ..datasets.schema import LatentSpec, TextSpec
from . import checkpoint
from .checkpoint import MODEL, NULL_CAPTION
from .conditioning import Conditioner, Conditioning
from .config import ObjectiveSection
from .models import Denoiser, ModelSpec, build_model
from .objectives import BETA_END, BETA_START, TRAIN_STEPS


@dataclass(frozen=True)
class Snapshot:
    """Averaged weights, ready to sample.

    Args:
      path, step: which.
      model: in evaluation mode, on its device.
      spec, objective, latent, text: what it is, and what its latents and captions are.
      conditioner: makes its conditioning.
      state: the rest of what was saved (encoders, classes, buckets).
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


def load_snapshot(run: Path, device: torch.device) -> Snapshot:
    """Load the newest snapshot of a run.

    Raises: RunError: there is none, or it is not whole; DamageError.
    """
    found = checkpoint.find(checkpoint.SNAPSHOT, run)
    if not found:
        raise RunError(f"run '{run}': there is no snapshot. Train first: a checkpoint makes one too.")
    saved = checkpoint.read(found[-1])
    try:
        spec = ModelSpec.model_validate(saved.state["spec"])
        objective = ObjectiveSection.model_validate(saved.state["objective"])
        latent = LatentSpec.model_validate(saved.state["latent"])
        text = saved.state["text"] and TextSpec.model_validate(saved.state["text"])
    except (KeyError, ValidationError) as error:
        raise RunError(f"snapshot '{saved.path}': its state is not valid ({error}).") from error
    model = build_model(spec, seed=0)
    model.load_state_dict(saved.tensors(MODEL, model.state_dict()))
    model.to(device).eval().requires_grad_(False)
    null = None
    if spec.takes_text and text:
        wanted = torch.empty(text.max_tokens, text.width, device="meta")
        null = saved.tensors(NULL_CAPTION, {"embedding": wanted})["embedding"].to(device)
    return Snapshot(
        path=saved.path,
        step=saved.state["step"],
        model=model,
        spec=spec,
        objective=objective,
        latent=latent,
        text=text,
        conditioner=Conditioner(spec, null),
        state=saved.state,
    )


def draw_latents(
    snapshot: Snapshot,
    conditioning: Conditioning,
    *,
    size: tuple[int, int],
    steps: int,
    guidance: float,
    seed: int,
) -> Tensor:
    """Draw one latent for each conditioning.

    Args:
      size: latent height and width.
      steps: of the scheduler, one or two forwards each.
      guidance: 1 is none; output = null + guidance * (conditional - null).
      seed: of the noise; image i of a call depends on the seed and i.
    Returns: (B, C, H, W) float32, as the model sees them (shifted and scaled).
    Source: Ho and Salimans 2022, equation 6.
    """
    device = next(snapshot.model.parameters()).device
    given = conditioning.labels if conditioning.labels is not None else conditioning.captions
    assert given is not None
    count, channels = len(given), snapshot.spec.channels
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((count, channels, *size), generator=generator).to(device)
    null = snapshot.conditioner.drop(conditioning, torch.ones(count, dtype=torch.bool, device=device))
    scheduler = build_scheduler(snapshot.objective)
    scheduler.set_timesteps(steps)
    with torch.inference_mode():
        for t in scheduler.timesteps:
            time = t.to(device).float().expand(count)
            output = snapshot.model(x, time, conditioning)[:, :channels]
            if guidance != 1:
                unconditional = snapshot.model(x, time, null)[:, :channels]
                output = unconditional + guidance * (output - unconditional)
            x = scheduler.step(output, t, x).prev_sample
    return x


def build_scheduler(objective: ObjectiveSection) -> Any:
    """The diffusers scheduler that goes with an objective."""
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    if objective.kind == "flow":
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=TRAIN_STEPS, shift=objective.shift)
    return DDIMScheduler(
        num_train_timesteps=TRAIN_STEPS,
        beta_start=BETA_START,
        beta_end=BETA_END,
        beta_schedule="linear",
        clip_sample=False,
        set_alpha_to_one=True,
        timestep_spacing="trailing",
        prediction_type="epsilon" if objective.predict == "epsilon" else "v_prediction",
    )
