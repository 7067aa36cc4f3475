"""The Inception-v3 of the FID: TensorFlow's graph of 2015-12-05, up to its 2,048 pooled features.

The parameters have the names of the published conversions, ``weights-inception-2015-12-05-6726825d.pth`` of
torch-fidelity and ``pt_inception-2015-12-05-6726825d.pth`` of pytorch-fid. The graph differs from the paper's network
in its pools: averages leave out the padding, and the last block takes a maximum.

Source: Szegedy et al. 2015, "Rethinking the Inception Architecture", table 1 and figures 5 to 7.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d

SIDE_PX, WIDTH = 299, 2048
Kernel = tuple[int, int, int]  # output channels, height, width
FORK: list[Kernel] = [(384, 1, 3), (384, 3, 1)]  # side by side, concatenated
Branches = dict[str, list[Kernel | list[Kernel]]]  # by name: convolutions one after the other

GRID_35: Branches = {
    "1x1": [(64, 1, 1)],
    "5x5": [(48, 1, 1), (64, 5, 5)],
    "3x3dbl": [(64, 1, 1), (96, 3, 3), (96, 3, 3)],
}
GRID_35_TO_17: Branches = {"3x3": [(384, 3, 3)], "3x3dbl": [(64, 1, 1), (96, 3, 3), (96, 3, 3)]}
GRID_17_TO_8: Branches = {
    "3x3": [(192, 1, 1), (320, 3, 3)],
    "7x7x3": [(192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)],
}
GRID_8: Branches = {
    "1x1": [(320, 1, 1)],
    "3x3": [(384, 1, 1), FORK],
    "3x3dbl": [(448, 1, 1), (384, 3, 3), FORK],
}


def grid_17(width: int) -> Branches:
    """The branches of the blocks that differ in their inner width."""
    return {
        "1x1": [(192, 1, 1)],
        "7x7": [(width, 1, 1), (width, 1, 7), (192, 7, 1)],
        "7x7dbl": [(width, 1, 1), (width, 7, 1), (width, 1, 7), (width, 7, 1), (192, 1, 7)],
    }


def convolution(in_channels: int, kernel: Kernel, stride: int = 1, padding: str = "valid") -> nn.Sequential:
    """A convolution without bias, a batch norm, a ReLU."""
    layer = nn.Sequential()
    layer.conv = nn.Conv2d(in_channels, kernel[0], kernel[1:], stride=stride, padding=padding, bias=False)
    layer.bn = nn.BatchNorm2d(kernel[0], eps=1e-3)
    layer.relu = nn.ReLU()
    return layer


class Mixed(nn.Module):
    """A block: branches and a pool side by side.

    Args:
      pool_channels: of the convolution after the pool; 0: the last convolution of each branch and the pool, which is a
        maximum alone, halve the grid.
      average: the pool is an average, not a maximum.
    """

    def __init__(self, in_channels: int, branches: Branches, pool_channels: int = 0, *, average: bool = True) -> None:
        super().__init__()
        self._average, self._halves, self._names = average, not pool_channels, list[list[list[str]]]()
        for branch, steps in branches.items():
            width, names = in_channels, list[list[str]]()
            for i, step in enumerate(steps, 1):
                name = f"branch{branch}_{i}" if len(steps) > 1 else f"branch{branch}"
                kernels = (
                    dict(zip((f"{name}a", f"{name}b"), step, strict=True)) if isinstance(step, list) else {name: step}
                )
                how = (2, "valid") if self._halves and i == len(steps) else (1, "same")
                for each, kernel in kernels.items():
                    self.add_module(each, convolution(width, kernel, *how))
                width = sum(channels for channels, *_ in kernels.values())
                names.append(list(kernels))
            self._names.append(names)
        if pool_channels:
            self.branch_pool = convolution(in_channels, (pool_channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, channels, H', W')."""
        outputs = []
        for branch in self._names:
            y = x
            for names in branch:
                y = torch.cat([self.get_submodule(name)(y) for name in names], dim=1)
            outputs.append(y)
        if self._halves:
            return torch.cat([*outputs, max_pool2d(x, 3, stride=2)], dim=1)
        if self._average:
            pooled = avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        else:
            pooled = max_pool2d(x, 3, stride=1, padding=1)
        return torch.cat([*outputs, self.branch_pool(pooled)], dim=1)


class Inception(nn.Module):
    """The network; weights come from a file."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = convolution(3, (32, 3, 3), stride=2)
        self.Conv2d_2a_3x3 = convolution(32, (32, 3, 3))
        self.Conv2d_2b_3x3 = convolution(32, (64, 3, 3), padding="same")
        self.Conv2d_3b_1x1 = convolution(64, (80, 1, 1))
        self.Conv2d_4a_3x3 = convolution(80, (192, 3, 3))
        self.Mixed_5b = Mixed(192, GRID_35, 32)
        self.Mixed_5c, self.Mixed_5d = Mixed(256, GRID_35, 64), Mixed(288, GRID_35, 64)
        self.Mixed_6a = Mixed(288, GRID_35_TO_17)
        for name, width in (("b", 128), ("c", 160), ("d", 160), ("e", 192)):
            self.add_module(f"Mixed_6{name}", Mixed(768, grid_17(width), 192))
        self.Mixed_7a = Mixed(768, GRID_17_TO_8)
        self.Mixed_7b = Mixed(1280, GRID_8, 192)
        self.Mixed_7c = Mixed(2048, GRID_8, 192, average=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of images: (B, 3, 299, 299) float, 0 to 255, to (B, 2048)."""
        x = (pixels - 128) / 128
        x = max_pool2d(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))), 3, stride=2)
        x = max_pool2d(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)), 3, stride=2)
        for name, block in self.named_children():
            if name.startswith("Mixed"):
                x = block(x)
        return x.mean(dim=(2, 3))
