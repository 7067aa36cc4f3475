"""What is random in a step. A function of (seed, step, image) alone, drawn on the device.

An image of a global batch has the same draws on whichever rank it is, at whichever world size and microbatch: they are
made for groups of neighbours, and a rank makes the groups that its slice touches.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...datasets.order.shuffle import keyed_hash
from .losses import draw_times
from .section import Objective

GROUP = 16  # images of a generator: enough to keep the device busy, few enough to waste little at a slice's ends


def draw(
    objective: Objective,
    shape: tuple[int, ...],
    more: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    seed: int,
    step: int,
    rows: slice,
    device: torch.device,
) -> dict[str, Tensor]:
    """Draw for some images of the global batch of a step.

    Args:
      shape: (C, H, W) of a latent.
      more: "normal" or "uniform" and a shape for each image, by name, in the order of drawing; it changes nothing of
        what is always drawn.
      rows: the images, by their place in the global batch.
    Returns: "noise" (B, C, H, W), standard normal; "times" (B,) as the objective draws them; "drop" (B,), uniform:
      conditioning becomes null below the recipe's share; and (B, ...) of ``more``.
    """
    generator = torch.Generator(device)
    how = {"generator": generator, "device": device}
    groups = range(rows.start // GROUP, max(-(-rows.stop // GROUP), rows.start // GROUP + 1))
    drawn = list[dict[str, Tensor]]()
    for group in groups:
        generator.manual_seed(keyed_hash(seed, step, group) % 2**63)
        of_group = {"noise": torch.randn((GROUP, *shape), **how)}
        of_group["times"] = draw_times(objective, GROUP, generator)
        of_group["drop"] = torch.rand(GROUP, **how)
        for name, (kind, of_image) in more.items():
            of_group[name] = (torch.randn if kind == "normal" else torch.rand)((GROUP, *of_image), **how)
        drawn.append(of_group)
    first = groups.start * GROUP
    return {name: torch.cat([one[name] for one in drawn])[rows.start - first : rows.stop - first] for name in drawn[0]}
