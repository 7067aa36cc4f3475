"""What is random in a step: noise, times, and whose conditioning is dropped. A function of (seed, step, image) alone.

An image of a global batch has the same draws on whichever rank it is, at whichever world size and microbatch: they are
made for groups of neighbours, and a rank makes the groups that its slice touches. All of it is drawn on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...datasets.order.shuffle import keyed_hash
from ..config import ObjectiveSection
from .losses import draw_times

GROUP = (
    16  # images that share a generator: enough to keep the device busy, few enough to waste little at a slice's ends
)


class Draws(NamedTuple):
    """Draws of a rank's slice of a global batch.

    Args:
      noise: (B, C, H, W) standard normal.
      times: (B,) as the objective draws them.
      dropped: (B,) bool, whose conditioning becomes null.
    """

    noise: Tensor
    times: Tensor
    dropped: Tensor

    def part(self, rows: slice) -> Draws:
        """The draws of a microbatch."""
        return Draws(self.noise[rows], self.times[rows], self.dropped[rows])


def draw(
    objective: ObjectiveSection,
    drop: float,
    *,
    seed: int,
    step: int,
    rows: slice,
    shape: tuple[int, ...],
    device: torch.device,
) -> Draws:
    """Draw for some images of the global batch of a step.

    Args:
      drop: share of the images whose conditioning becomes null.
      rows: the images, by their place in the global batch.
      shape: (C, H, W) of a latent.
    """
    generator = torch.Generator(device)
    groups = range(rows.start // GROUP, max(-(-rows.stop // GROUP), rows.start // GROUP + 1))
    noise, times, dropped = [], [], []
    for group in groups:
        generator.manual_seed(keyed_hash(seed, step, group) % 2**63)
        noise.append(torch.randn((GROUP, *shape), generator=generator, device=device))
        times.append(draw_times(objective, GROUP, generator))
        dropped.append(torch.rand(GROUP, generator=generator, device=device) < drop)
    first = groups.start * GROUP
    part = slice(rows.start - first, rows.stop - first)
    return Draws(torch.cat(noise)[part], torch.cat(times)[part], torch.cat(dropped)[part])
