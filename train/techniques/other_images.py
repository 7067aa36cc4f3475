"""Rows of the images of other ranks, for losses that compare the images of a global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ...datasets.order.slices import rank_slice

if TYPE_CHECKING:
    from ..run.state import Run


def previous_rows(run: Run, rows: Tensor, global_size: int) -> Tensor:
    """The row of the image before each image in the global batch; before the first is the last one. A collective call.

    Args:
      rows: (B, ...) of the images of this rank; B may be 0.
      global_size: images of the global batch.
    Returns: (B, ...).
    """
    if is_alone(run):
        return rows.roll(1, 0)
    world_size = run.ranks.world_size
    last = rows[-1:] if len(rows) else rows.new_zeros(1, *rows.shape[1:])
    last_of_ranks = [torch.empty_like(last) for _ in range(world_size)]
    dist.all_gather(last_of_ranks, last.contiguous())
    slices = [rank_slice(global_size, rank, world_size) for rank in range(world_size)]
    filled = [rank for rank in range(world_size) if slices[rank].start < slices[rank].stop]
    if run.ranks.rank not in filled:
        return rows
    previous_rank = filled[filled.index(run.ranks.rank) - 1]
    return torch.cat([last_of_ranks[previous_rank], rows[:-1]])


def all_rows(run: Run, rows: Tensor, global_size: int) -> tuple[Tensor, slice]:
    """The rows of all images of a global batch, and which of them are this rank's. A collective call.

    Args:
      rows: (B, ...) of the images of this rank; B may be 0.
      global_size: images of the global batch.
    Returns: (global_size, ...) without gradient.
    """
    if is_alone(run):
        return rows, slice(0, len(rows))
    world_size = run.ranks.world_size
    slices = [rank_slice(global_size, rank, world_size) for rank in range(world_size)]
    padded = rows.new_zeros(-(-global_size // world_size), *rows.shape[1:])
    padded[: len(rows)] = rows
    of_ranks = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(of_ranks, padded)
    parts = [part[: images.stop - images.start] for part, images in zip(of_ranks, slices, strict=True)]
    return torch.cat(parts), slices[run.ranks.rank]


def is_alone(run: Run) -> bool:
    """One rank, or a trial of what fits in memory, which sends nothing."""
    return run.ranks.world_size == 1 or run.engine.is_trial
