"""The Inception-v3 of the FID: TensorFlow's graph of 2015-12-05, up to its 2,048 pooled features.

The parameters have the names of the published conversions, ``weights-inception-2015-12-05-6726825d.pth`` of
torch-fidelity and ``pt_inception-2015-12-05-6726825d.pth`` of pytorch-fid. The graph differs from the paper's network
in its pools: averages leave out the padding, and the last block takes a maximum.

Source: Szegedy et al. 2015, "Rethinking the Inception Architecture", table 1 and figures 5 to 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d, relu

SIDE_PX, WIDTH = 299, 2048
NORM_EPS = 1e-3


class Step(NamedTuple):
    """A convolution of a branch: its name without "branch", output channels, and kernel (height, width)."""

    name: str
    channels: int
    kernel: tuple[int, int]


Branch = Sequence[tuple[Step, ...]]
"""Convolutions one after the other; those of a tuple take the same input, and their outputs are concatenated."""
Pool = Literal["average", "maximum"]


def _chain(name: str, *steps: tuple[int, int, int]) -> list[tuple[Step, ...]]:
    """A branch of (channels, kernel height, kernel width); its steps are numbered if there are several."""
    many = len(steps) > 1
    return [(Step(f"{name}_{i}" if many else name, step[0], step[1:]),) for i, step in enumerate(steps, 1)]


def _fork(name: str) -> tuple[Step, Step]:
    return Step(f"{name}a", 384, (1, 3)), Step(f"{name}b", 384, (3, 1))


def _grid_35() -> list[Branch]:
    return [
        _chain("1x1", (64, 1, 1)),
        _chain("5x5", (48, 1, 1), (64, 5, 5)),
        _chain("3x3dbl", (64, 1, 1), (96, 3, 3), (96, 3, 3)),
    ]


def _grid_17(width: int) -> list[Branch]:
    flat, tall = (1, 7), (7, 1)
    return [
        _chain("1x1", (192, 1, 1)),
        _chain("7x7", (width, 1, 1), (width, *flat), (192, *tall)),
        _chain("7x7dbl", (width, 1, 1), (width, *tall), (width, *flat), (width, *tall), (192, *flat)),
    ]


def _grid_8() -> list[Branch]:
    return [
        _chain("1x1", (320, 1, 1)),
        [*_chain("3x3_1", (384, 1, 1)), _fork("3x3_2")],
        [*_chain("3x3dbl", (448, 1, 1), (384, 3, 3)), _fork("3x3dbl_3")],
    ]


class Convolution(nn.Module):
    """A convolution without bias, a batch norm, a ReLU."""

    def __init__(self, in_channels: int, channels: int, kernel: tuple[int, int], stride: int, padding: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(channels, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, channels, H', W')."""
        return relu(self.bn(self.conv(x)))


class Mixed(nn.Module):
    """A block: branches and a pool side by side.

    Args:
      branches: all keep the grid, or (without ``pool_channels``) all halve it with their last convolution.
      pool: before a convolution to ``pool_channels``; a halving block has a maximum alone.
    """

    def __init__(
        self, in_channels: int, branches: Sequence[Branch], *, pool: Pool = "maximum", pool_channels: int = 0
    ) -> None:
        super().__init__()
        self._branches, self._pool = branches, pool
        self.channels, self._halves = pool_channels or in_channels, not pool_channels
        for branch in branches:
            width = in_channels
            for steps in branch:
                shape = (2, "valid") if self._halves and steps is branch[-1] else (1, "same")
                for step in steps:
                    self.add_module(f"branch{step.name}", Convolution(width, step.channels, step.kernel, *shape))
                width = sum(step.channels for step in steps)
            self.channels += width
        if pool_channels:
            self.branch_pool = Convolution(in_channels, pool_channels, (1, 1), 1, "same")

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, channels, H', W')."""
        return torch.cat([*(self._run(branch, x) for branch in self._branches), self._pooled(x)], dim=1)

    def _run(self, branch: Branch, x: Tensor) -> Tensor:
        for steps in branch:
            x = torch.cat([self.get_submodule(f"branch{step.name}")(x) for step in steps], dim=1)
        return x

    def _pooled(self, x: Tensor) -> Tensor:
        if self._halves:
            return max_pool2d(x, 3, stride=2)
        if self._pool == "maximum":
            return self.branch_pool(max_pool2d(x, 3, stride=1, padding=1))
        return self.branch_pool(avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False))


class Inception(nn.Module):
    """The network; weights come from a file."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, (3, 3), 2, "valid")
        self.Conv2d_2a_3x3 = Convolution(32, 32, (3, 3), 1, "valid")
        self.Conv2d_2b_3x3 = Convolution(32, 64, (3, 3), 1, "same")
        self.Conv2d_3b_1x1 = Convolution(64, 80, (1, 1), 1, "valid")
        self.Conv2d_4a_3x3 = Convolution(80, 192, (3, 3), 1, "valid")
        average: Pool = "average"
        self.Mixed_5b = Mixed(192, _grid_35(), pool=average, pool_channels=32)
        self.Mixed_5c = Mixed(256, _grid_35(), pool=average, pool_channels=64)
        self.Mixed_5d = Mixed(288, _grid_35(), pool=average, pool_channels=64)
        self.Mixed_6a = Mixed(288, [_chain("3x3", (384, 3, 3)), _chain("3x3dbl", (64, 1, 1), (96, 3, 3), (96, 3, 3))])
        for name, width in (("b", 128), ("c", 160), ("d", 160), ("e", 192)):
            self.add_module(f"Mixed_6{name}", Mixed(768, _grid_17(width), pool=average, pool_channels=192))
        seven = _chain("7x7x3", (192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3))
        self.Mixed_7a = Mixed(768, [_chain("3x3", (192, 1, 1), (320, 3, 3)), seven])
        self.Mixed_7b = Mixed(1280, _grid_8(), pool=average, pool_channels=192)
        self.Mixed_7c = Mixed(2048, _grid_8(), pool="maximum", pool_channels=192)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of pictures.

        Args:
          pixels: (B, 3, 299, 299) float, 0 to 255.
        Returns: (B, 2048).
        """
        x = (pixels - 128) / 128
        x = max_pool2d(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))), 3, stride=2)
        x = max_pool2d(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)), 3, stride=2)
        for name, block in self.named_children():
            if name.startswith("Mixed"):
                x = block(x)
        return x.mean(dim=(2, 3))
