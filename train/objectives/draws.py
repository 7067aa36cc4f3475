"""What is random in a step: noise, times, and whose conditioning is dropped. A function of (seed, step, image) alone.

An image of a global batch has the same draws on whichever rank it is, at whichever world size and microbatch: they are
made for groups of neighbours, and a rank makes the groups that its slice touches. All of it is drawn on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...datasets.order.shuffle import keyed_hash
from ..objective_recipe import ObjectiveSection
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
      class_noise: (B, D) standard normal, for a model that denoises a class token.
      token_order: (B, T) uniform, whose largest route tokens past blocks.
      less_time: (B,) uniform, how much earlier the averaged model sees the image.
    """

    noise: Tensor
    times: Tensor
    dropped: Tensor
    class_noise: Tensor | None = None
    token_order: Tensor | None = None
    less_time: Tensor | None = None

    def part(self, rows: slice | Tensor) -> Draws:
        """The draws of a microbatch."""
        return Draws(*(None if drawn is None else drawn[rows] for drawn in self))  # pyright: ignore[reportArgumentType]


def draw(
    objective: ObjectiveSection,
    drop: float,
    *,
    seed: int,
    step: int,
    rows: slice,
    shape: tuple[int, ...],
    device: torch.device,
    class_width: int = 0,
    num_tokens: int = 0,
    less_time: bool = False,
) -> Draws:
    """Draw for some images of the global batch of a step.

    Args:
      drop: share of the images whose conditioning becomes null.
      rows: the images, by their place in the global batch.
      shape: (C, H, W) of a latent.
      class_width: D of a class token; 0: none is drawn for.
      num_tokens: T of an image, if some of them skip blocks, else 0.
      less_time: draw it.
    """
    generator = torch.Generator(device)
    groups = range(rows.start // GROUP, max(-(-rows.stop // GROUP), rows.start // GROUP + 1))
    drawn: list[list[Tensor]] = []
    for group in groups:
        generator.manual_seed(keyed_hash(seed, step, group) % 2**63)
        # What is drawn always comes first, so it does not depend on the rest.
        of_group = [
            torch.randn((GROUP, *shape), generator=generator, device=device),
            draw_times(objective, GROUP, generator),
            torch.rand(GROUP, generator=generator, device=device) < drop,
        ]
        if class_width:
            of_group.append(torch.randn((GROUP, class_width), generator=generator, device=device))
        if num_tokens:
            of_group.append(torch.rand((GROUP, num_tokens), generator=generator, device=device))
        if less_time:
            of_group.append(torch.rand(GROUP, generator=generator, device=device))
        drawn.append(of_group)
    first = groups.start * GROUP
    columns = [torch.cat(column)[rows.start - first : rows.stop - first] for column in zip(*drawn, strict=True)]
    noise, times, dropped, *rest = columns
    return Draws(
        noise,
        times,
        dropped,
        class_noise=rest.pop(0) if class_width else None,
        token_order=rest.pop(0) if num_tokens else None,
        less_time=rest.pop(0) if less_time else None,
    )
