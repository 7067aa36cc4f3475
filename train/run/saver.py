"""Write checkpoints and snapshots, optionally during the next steps.

All ranks gather; the first one writes a copy, so the next steps may change the state. Writes keep their order, and an
error in one is raised before the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..config import RunSection
from ..models.diffusers.adapters import saved_tensors
from ..parallel.engine import Engine
from ..weights import checkpoint
from ..weights.checkpoint import Groups

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
    """State of a step in memory, as the folders to write; only the first rank has any."""

    step: int
    folders: list[Folder]


def gather(engine: Engine, groups: Sequence[str], *, keep: bool) -> dict[str, Tensors]:
    """Whole tensors on the CPU, by group and name; a collective call. Ranks that do not keep them get none."""
    gathered: dict[str, Tensors] = {}
    for group in groups:
        gathered[group] = {}
        for name, tensor in engine.tensors(group):  # only one at a time is whole on the device
            if keep:
                gathered[group][name] = tensor.detach().to("cpu", copy=True)
    return gathered if keep else {}


def buffers_of(model: nn.Module) -> Tensors:
    """Persistent buffers of a model, on the CPU; none of a model with frozen weights."""
    state = saved_tensors(model)
    return {name: state[name].cpu().clone() for name, _ in model.named_buffers() if name in state}


def write(captured: Captured, run: Path, section: RunSection) -> None:
    """Write the folders, a checkpoint last; then remove older checkpoints, and older snapshots of interruptions.

    Raises: ResourceError: the disk is full; DamageError: it returned other bytes. Older checkpoints then stay.
    """
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
