"""Write checkpoints and snapshots, optionally during the next steps.

All ranks gather; the first one writes a copy, so the next steps may change the state. Writes keep their order, and an
error in one is raised before the next.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import RunSection
from ..models.diffusers.adapters import saved_tensors
from ..parallel.engine import Engine
from ..weights import checkpoint
from ..weights.checkpoint import Groups

LOG = logging.getLogger(__name__)
BLOCK_BYTES = 256 << 20  # a power of two, to which torch would round page-locked memory up
ALIGNMENT = 64  # bytes

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Folder:
    """Content of a folder to write.

    Args:
      kind: CHECKPOINT, SNAPSHOT or AVERAGE.
      groups: its tensors, on the CPU.
      state: everything else, as JSON values.
    """

    kind: str
    groups: Groups
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Captured:
    """State of a step in memory, as the folders to write; only the first rank has any.

    Args:
      copied: the end of the copies from a GPU, which may go on; None: there are none.
    """

    step: int
    folders: list[Folder]
    copied: torch.cuda.Event | None = None


class Staging:
    """Page-locked memory for the copies of a state, reused by the next one; a GPU fills it while the host goes on.

    Copies are made on the current stream, so the next step, which changes the state, comes after them.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Reuse all memory; the last copies must have been written."""
        self._block, self._used, self._copied = 0, 0, False

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU, which is complete once ``copied`` has passed."""
        if not _is_on_gpu(tensor):
            return tensor.detach().clone()
        held = self._take(tensor.nbytes).view(tensor.dtype).reshape(tensor.shape)
        self._copied = True
        return held.copy_(tensor.detach(), non_blocking=True)

    def copied(self) -> torch.cuda.Event | None:
        """The end of the copies since the last reset; None without any."""
        if not self._copied:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _take(self, num_bytes: int) -> Tensor:
        while self._block < len(self._blocks) and self._used + num_bytes > len(self._blocks[self._block]):
            self._block, self._used = self._block + 1, 0
        if self._block == len(self._blocks):
            self._blocks.append(_page_locked(max(num_bytes, BLOCK_BYTES)))
        start = self._used
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return self._blocks[self._block][start : start + num_bytes]


def _page_locked(num_bytes: int) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        LOG.warning(
            "checkpoints are copied more slowly: %d bytes of page-locked memory are refused (%s)", num_bytes, error
        )
        return torch.empty(num_bytes, dtype=torch.uint8)


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def gather(engine: Engine, groups: Sequence[str], *, keep: bool, staging: Staging) -> dict[str, Tensors]:
    """Whole tensors on the CPU, by group and name; a collective call. Ranks that do not keep them get none."""
    staging.reset()
    gathered: dict[str, Tensors] = {}
    for group in groups:
        gathered[group] = {}
        for name, tensor in engine.tensors(group):  # only one at a time is whole on the device
            if keep:
                gathered[group][name] = staging.copy(tensor)
    return gathered if keep else {}


def buffers_of(model: nn.Module) -> Tensors:
    """Persistent buffers of a model, on the CPU; none of a model with frozen weights."""
    state = saved_tensors(model)
    return {name: state[name].cpu().clone() for name, _ in model.named_buffers() if name in state}


def write(captured: Captured, run: Path, section: RunSection) -> None:
    """Write the folders, a checkpoint last; then remove older checkpoints, and older snapshots of interruptions.

    Raises: ResourceError: the disk is full; DamageError: it returned other bytes. Older checkpoints then stay.
    """
    if captured.copied is not None:
        captured.copied.synchronize()
    for folder in captured.folders:
        path = checkpoint.save(folder.kind, run, captured.step, folder.groups, dict(folder.state))
        if folder.kind == checkpoint.CHECKPOINT:
            checkpoint.prune(run, section.keep_checkpoints, proven=path, keep_every=section.keep_every)
        elif folder.state.get(checkpoint.INTERRUPTED):
            checkpoint.prune_interrupted(folder.kind, run)


class Saver:
    """Writes captured states one after the other.

    Args:
      run: folder.
      section: of the recipe; its ``async_checkpoint`` writes in a thread.
    """

    def __init__(self, run: Path, section: RunSection) -> None:
        self._run, self._section = run, section
        self._thread = ThreadPoolExecutor(1, "leandit-save") if section.async_checkpoint else None
        self._pending: Future[None] | None = None
        self.staging = Staging()

    def begin(self, captured: Captured) -> None:
        """Write, or start writing; ``finish`` comes before the capture, so that two states are never in memory.

        Raises: ResourceError, DamageError: of this write.
        """
        if not captured.folders:
            return
        if self._thread is None:
            write(captured, self._run, self._section)
        else:
            self._pending = self._thread.submit(write, captured, self._run, self._section)

    def check(self) -> None:
        """Raise the error of a write that has failed: ResourceError, DamageError."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait until everything is written; raises ResourceError, DamageError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the thread, and ignore its errors."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
