"""The Inception-v3 of the FID: TensorFlow's graph of 2015-12-05, up to its 2,048 pooled features.

The parameters have the names of the published conversions, ``weights-inception-2015-12-05-6726825d.pth`` of
torch-fidelity and ``pt_inception-2015-12-05-6726825d.pth`` of pytorch-fid. The graph differs from the paper's network
in its pools: averages leave out the padding, and the last block takes a maximum.

Source: Szegedy et al. 2015, "Rethinking the Inception Architecture", table 1 and figures 5 to 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d, relu

SIDE_PX, WIDTH = 299, 2048
NORM_EPS = 1e-3

Branches = Mapping[str, Sequence[Any]]
"""Convolutions of each branch by its name: (output channels, kernel height, kernel width) of each, one after the other.

A step may be a dict of two convolutions by the suffix of their names: they take the same input, and their outputs are
concatenated.
"""
FORK = {"a": (384, 1, 3), "b": (384, 3, 1)}
GRID_35: Branches = {
    "1x1": [(64, 1, 1)],
    "5x5": [(48, 1, 1), (64, 5, 5)],
    "3x3dbl": [(64, 1, 1), (96, 3, 3), (96, 3, 3)],
}
TO_17: Branches = {"3x3": [(384, 3, 3)], "3x3dbl": [(64, 1, 1), (96, 3, 3), (96, 3, 3)]}
TO_8: Branches = {
    "3x3": [(192, 1, 1), (320, 3, 3)],
    "7x7x3": [(192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)],
}
GRID_8: Branches = {
    "1x1": [(320, 1, 1)],
    "3x3": [(384, 1, 1), FORK],
    "3x3dbl": [(448, 1, 1), (384, 3, 3), FORK],
}


def grid_17(width: int) -> Branches:
    """Branches of the blocks of 17 x 17, which differ in the width of their inner convolutions."""
    return {
        "1x1": [(192, 1, 1)],
        "7x7": [(width, 1, 1), (width, 1, 7), (192, 7, 1)],
        "7x7dbl": [(width, 1, 1), (width, 7, 1), (width, 1, 7), (width, 7, 1), (192, 1, 7)],
    }


class Convolution(nn.Module):
    """A convolution without bias, a batch norm, a ReLU."""

    def __init__(self, in_channels: int, channels: int, *kernel: int, stride: int = 1, padding: str = "valid") -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, kernel, stride=stride, padding=padding, bias=False)  # type: ignore
        self.bn = nn.BatchNorm2d(channels, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, channels, H', W')."""
        return relu(self.bn(self.conv(x)))


class Mixed(nn.Module):
    """A block: branches and a pool side by side.

    Args:
      branches: all keep the grid, or (without ``pool_channels``) all halve it with their last convolution.
      pool_channels: of a convolution after the pool; a halving block has a pool alone.
      pool: "average" or "maximum"; a halving block has a maximum.
    """

    def __init__(self, in_channels: int, branches: Branches, pool_channels: int = 0, pool: str = "average") -> None:
        super().__init__()
        self._pool, self._halves = pool, not pool_channels
        self._branches: list[list[list[str]]] = []  # names of the convolutions of each step of each branch
        for branch, steps in branches.items():
            width, names = in_channels, []
            for i, step in enumerate(steps, 1):
                how: Any = {"stride": 2} if self._halves and i == len(steps) else {"padding": "same"}
                name = f"branch{branch}_{i}" if len(steps) > 1 else f"branch{branch}"
                parallel = {name + suffix: step[suffix] for suffix in step} if isinstance(step, dict) else {name: step}
                for each, shape in parallel.items():
                    self.add_module(each, Convolution(width, *shape, **how))
                names.append(list(parallel))
                width = sum(shape[0] for shape in parallel.values())
            self._branches.append(names)
        if pool_channels:
            self.branch_pool = Convolution(in_channels, pool_channels, 1, 1, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, channels, H', W')."""
        outputs = []
        for branch in self._branches:
            y = x
            for names in branch:
                y = torch.cat([self.get_submodule(name)(y) for name in names], dim=1)
            outputs.append(y)
        if self._halves:
            pooled = max_pool2d(x, 3, stride=2)
        elif self._pool == "maximum":
            pooled = self.branch_pool(max_pool2d(x, 3, stride=1, padding=1))
        else:
            pooled = self.branch_pool(avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False))
        return torch.cat([*outputs, pooled], dim=1)


class Inception(nn.Module):
    """The network; weights come from a file."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, 3, stride=2)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3, 3)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3, 3, padding="same")
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3, 3)
        self.Mixed_5b = Mixed(192, GRID_35, 32)
        self.Mixed_5c = Mixed(256, GRID_35, 64)
        self.Mixed_5d = Mixed(288, GRID_35, 64)
        self.Mixed_6a = Mixed(288, TO_17)
        for name, width in (("b", 128), ("c", 160), ("d", 160), ("e", 192)):
            self.add_module(f"Mixed_6{name}", Mixed(768, grid_17(width), 192))
        self.Mixed_7a = Mixed(768, TO_8)
        self.Mixed_7b = Mixed(1280, GRID_8, 192)
        self.Mixed_7c = Mixed(WIDTH, GRID_8, 192, "maximum")

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of images.

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
