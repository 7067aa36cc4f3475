"""An average of any length after training, from the averages of a few lengths that a run has stored.

The profile of an average is the weight of each moment in it. Stored averages are combined by least squares, so that the
profile comes as near as possible to the wanted one.
Source: Karras et al. 2024, section 3.2 and appendix C.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...datasets.disk.strays import sweep_beside
from ...errors import RunError
from ..weights import checkpoint
from ..weights.checkpoint import AVERAGE, EMA, MODEL, NULL_CAPTION, SNAPSHOT, CheckpointDamage, Saved
from .ema import Power

SMALLEST = 1e-13  # share of the largest singular value, below which is rounding of float64
HEAD = {"format_version", "kind", "step", "files"}


@dataclass(frozen=True)
class Profile:
    """Profile of an average of a length, up to a step."""

    step: int
    length: float


@dataclass(frozen=True)
class Combined:
    """Result of ``combine``.

    Args:
      path: of the snapshot.
      error: distance of its profile from the wanted one, relative to the norm of that.
      used: number of stored averages in it.
    """

    path: Path
    error: float
    used: int


def products(one: Sequence[Profile], other: Sequence[Profile]) -> np.ndarray:
    """Inner products of profiles, (len(one), len(other)) float64.

    A profile is (g + 1) t^g / T^(g + 1) from 0 to its step T, with g the exponent of its length.
    """
    step, g = (np.array(it, np.float64)[:, None] for it in _numbers(one))
    steps, h = (np.array(it, np.float64)[None, :] for it in _numbers(other))
    earlier, later = np.minimum(step, steps), np.maximum(step, steps)
    of_later = np.where(step < steps, h, g)  # its profile is cut off at the end of the earlier one
    return (g + 1) * (h + 1) / (g + h + 1) * (earlier / later) ** of_later / later


def _numbers(profiles: Sequence[Profile]) -> tuple[list[int], list[float]]:
    return [p.step for p in profiles], [Power(p.length).exponent for p in profiles]


def solve(stored: Sequence[Profile], wanted: Profile) -> tuple[np.ndarray, float]:
    """Weights of stored averages whose sum is nearest to a wanted one, divided by their total, as EDM2 does.

    Least squares alone gives a profile whose integral is not 1, which scales every weight of the model.

    Returns: (len(stored),) float64 with sum 1, and the distance of the profiles, relative to the wanted one's norm.
    """
    if wanted in stored:
        return np.array([float(profile == wanted) for profile in stored]), 0.0
    gram, aim = products(stored, stored), products(stored, [wanted])[:, 0]
    norms = np.sqrt(gram.diagonal())  # unit profiles, so that no step's size hides another's
    weights = np.linalg.lstsq(gram / norms[:, None] / norms, aim / norms, rcond=SMALLEST)[0] / norms
    weights /= weights.sum()
    square = products([wanted], [wanted])[0, 0]
    distance = weights @ gram @ weights - 2 * weights @ aim + square
    return weights, float(np.sqrt(max(0.0, distance) / square))


def combine(run: Path, length: float, out: Path, *, step: int = 0) -> Combined:
    """Write the snapshot ``out/snapshot-<step>`` of a run with its average of any length.

    One stored average is in memory at a time, beside the result.

    Args:
      step: of the average; 0: the newest stored one.
    Raises: RunError: the run has no stored averages, or the snapshot exists; DamageError.
    """
    found = {int(path.name.partition("-")[2]): path for path in checkpoint.find(AVERAGE, run)}
    if not found:
        raise RunError(f"run '{run}': it has stored no averages. Train with ema.kind = \"power\".")
    step = step or max(found)
    if step not in found:
        raise RunError(f"run '{run}': no averages of step {step}; there are {', '.join(map(str, found))}.")
    target = out / f"{SNAPSHOT}-{step}"
    if target.exists():
        raise RunError(f"snapshot '{target}': it already exists. Use another --out.")
    wanted = Profile(step, length)
    read = {at: checkpoint.read(path) for at, path in found.items() if at <= step}
    stored = [Profile(at, each) for at, saved in read.items() for each in saved.state["lengths"]]
    weights, error = solve(stored, wanted)
    shares = {profile: share for profile, share in zip(stored, weights.tolist(), strict=True) if share}

    last = read[step]
    groups: dict[str, dict[str, Tensor]] = {MODEL: last.read(MODEL) | _sum(read, shares)}
    if f"{NULL_CAPTION}.safetensors" in last.files:
        groups[NULL_CAPTION] = last.read(NULL_CAPTION)
    state: dict[str, Any] = {key: value for key, value in last.state.items() if key not in HEAD}
    state |= {"average": {"length": length, "error": error}}
    sweep_beside(target)
    return Combined(checkpoint.save(SNAPSHOT, out, step, groups, state), error, len(shares))


def _sum(read: dict[int, Saved], shares: dict[Profile, float]) -> dict[str, Tensor]:
    """The weighted sum of stored averages, added up in float64, by parameter name."""
    sums: dict[str, Tensor] = {}
    for step in sorted({profile.step for profile in shares}):
        tensors = read[step].read(EMA)
        for profile in [profile for profile in shares if profile.step == step]:
            prefix = Power(profile.length).prefix
            weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            sums = sums or {name: torch.zeros(t.shape, dtype=torch.float64) for name, t in weights.items()}
            both = [{name: t.shape for name, t in each.items()} for each in (sums, weights)]
            if not sums or both[0] != both[1]:
                what = f"the averages of length {profile.length:g} do not fit the others"
                raise CheckpointDamage(read[step].path, what)
            for name, tensor in weights.items():
                sums[name].add_(tensor.double(), alpha=shares[profile])
    return {name: total.float() for name, total in sums.items()}
