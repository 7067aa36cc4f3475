"""Writing checkpoints and snapshots, beside the steps that follow if the recipe says so.

All ranks gather; the first one writes. What is gathered is a copy of its own, so the next steps may change everything
while it is written. Writes follow each other in their order, and what went wrong in one is raised before the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from . import checkpoint
from .checkpoint import EMA, MODEL, NULL_CAPTION, OPTIMIZER
from .config import RunSection
from .parallel import Engine

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Captured:
    """All state of a step, in memory.

    Args:
      groups: whole tensors of the checkpoint, by group and name, on the CPU; empty on other ranks than the first.
      averaged: those of the snapshot.
      progress, extra: what is no tensor, of checkpoint and snapshot.
    """

    step: int
    groups: dict[str, Tensors]
    averaged: dict[str, Tensors]
    progress: Mapping[str, Any]
    extra: Mapping[str, Any]


def gather(engine: Engine, *, keep: bool) -> dict[str, Tensors]:
    """Whole tensors of a checkpoint on the CPU, by group and name; every rank must ask, and those that do not keep get
    none."""
    groups: dict[str, Tensors] = {}
    for group in (MODEL, EMA, OPTIMIZER):
        groups[group] = {}
        for name, tensor in engine.tensors(group):  # one at a time: of a sharded model, only one is whole on the device
            if keep:
                copy = tensor.detach().cpu()
                groups[group][name] = copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy
    return groups if keep else {}


def averaged_weights(groups: Mapping[str, Tensors], null_caption: Tensor | None) -> dict[str, Tensors]:
    """What a snapshot holds: averaged weights with the model's buffers, and the null caption."""
    if not groups:
        return {}
    averaged = {MODEL: {**groups[MODEL], **groups[EMA]}}
    return averaged if null_caption is None else averaged | {NULL_CAPTION: {"embedding": null_caption.cpu()}}


def write(captured: Captured, run: Path, section: RunSection) -> None:
    """Write a snapshot and a checkpoint; older checkpoints go once this one has proven whole.

    Raises: ResourceError: the disk is full; DamageError: it gives back other bytes. The older ones then stay.
    """
    checkpoint.save(checkpoint.SNAPSHOT, run, captured.step, captured.averaged, dict(captured.extra))
    proven = checkpoint.save(checkpoint.CHECKPOINT, run, captured.step, captured.groups, dict(captured.progress))
    checkpoint.prune(run, section.keep_checkpoints, proven=proven, keep_every=section.keep_every)


class Saver:
    """Writes what was captured, one after the other.

    Args:
      run: folder.
      section: of the recipe; its ``async_checkpoint`` writes in a thread.
    """

    def __init__(self, run: Path, section: RunSection) -> None:
        self._run, self._section = run, section
        self._thread = ThreadPoolExecutor(1, "leandit-save") if section.async_checkpoint else None
        self._pending: Future[None] | None = None

    def save(self, captured: Captured) -> None:
        """Write, or begin to; waits for the one before.

        Raises: ResourceError, DamageError: of this one or of the one before.
        """
        self.finish()
        if not captured.groups:
            return
        if self._thread is None:
            write(captured, self._run, self._section)
        else:
            self._pending = self._thread.submit(write, captured, self._run, self._section)

    def check(self) -> None:
        """Raise what went wrong meanwhile.

        Raises: ResourceError, DamageError.
        """
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait until all is written.

        Raises: ResourceError, DamageError.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the thread, whatever became of its last write."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
