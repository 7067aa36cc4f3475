"""What some recipes add to a DiT: tokens that skip blocks, a class token that is denoised too, projectors of tokens.

Shapes: B batch, T image tokens, K of them kept, E model width, D width of an image feature. A class token comes before
the image tokens.
Source: TREAD, arXiv 2501.04765; SPRINT, arXiv 2510.21986; REPA, arXiv 2410.06940; REG, arXiv 2507.01467.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layers import NORM_EPS, Rotation
from .spec import ProjectorSpec


def rows_kept(kept: Tensor, *, has_class: bool) -> Tensor:
    """(B, K) image tokens to their places in the sequence; the class token is always kept."""
    if not has_class:
        return kept
    return torch.cat([kept.new_zeros(len(kept), 1), kept + 1], dim=1)


def take_tokens(x: Tensor, rows: Tensor) -> Tensor:
    """(B, T, E) to (B, K, E)."""
    return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[2]))


def put_tokens(x: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """(B, T, E) with the tokens (B, K, E) in their rows, as a new tensor."""
    return x.scatter(1, rows[:, :, None].expand(-1, -1, x.shape[2]), tokens)


def take_rotation(rotation: Rotation, rows: Tensor) -> Rotation:
    """Rotation of the tokens of each image, (B, 1, K, 2, d/4): the same for all heads."""
    cos, sin = (part[rows][:, None] for part in rotation)
    return cos, sin


def with_class_rotation(rotation: Rotation) -> Rotation:
    """Rotation of a sequence whose first token, the class token, is not turned."""
    cos, sin = rotation
    return torch.cat([torch.ones_like(cos[:1]), cos]), torch.cat([torch.zeros_like(sin[:1]), sin])


class Fusion(nn.Module):
    """Fuses all tokens before the routed blocks with those after them; a mask token stands for skipped ones.

    It begins as the mean of both.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(2 * width, width)

    def reset(self) -> None:
        """Initialise."""
        nn.init.zeros_(self.mask)
        with torch.no_grad():
            eye = torch.eye(self.proj.out_features)
            self.proj.weight.copy_(torch.cat([eye, eye], dim=1) / 2)
            self.proj.bias.zero_()

    def forward(self, before: Tensor, after: Tensor, rows: Tensor | None) -> Tensor:
        """(B, T, E) and (B, T or K, E) to (B, T, E)."""
        mask = self.mask.to(after.dtype).expand(before.shape)
        # Without skipped tokens the mask has a gradient too, zero: ranks reduce the same ones at every step.
        after = after + 0 * mask if rows is None else put_tokens(mask, rows, after)
        return self.proj(torch.cat([before.to(after.dtype), after], dim=2)).to(before.dtype)


class ClassToken(nn.Module):
    """The noisy class token of an image feature as a token of the sequence, and its velocity from there."""

    def __init__(self, feature_width: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(feature_width, width)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.velocity = nn.Linear(width, feature_width)

    def reset(self) -> None:
        """The velocity begins at zero, as the model's."""
        for parameter in self.velocity.parameters():
            nn.init.zeros_(parameter)

    def forward(self, token: Tensor) -> Tensor:
        """(B, D) to (B, 1, E)."""
        return self.norm(self.embed(token)).unsqueeze(1)


def projector(spec: ProjectorSpec, width: int) -> nn.Sequential:
    """Three linear maps with SiLU between, (..., E) to (..., D)."""
    return nn.Sequential(
        nn.Linear(width, spec.width),
        nn.SiLU(),
        nn.Linear(spec.width, spec.width),
        nn.SiLU(),
        nn.Linear(spec.width, spec.feature_width),
    )
