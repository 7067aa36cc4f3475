"""Checkpoints (all state to resume) and snapshots (averaged weights to use), as folders of safetensors and JSON.

Each file is hashed in ``state.json``; the folder is built under a temporary name and renamed into place last, so a
checkpoint is there whole or not at all. Nothing is pickled.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..datasets.errors import DamageError, RunError
from ..datasets.files import (
    canonical_json,
    commit_folder,
    raise_if_full,
    read_json,
    sha256_of,
    temporary_beside,
    xxh3_file,
)

FORMAT_VERSION = 1
STATE = "state.json"
CHECKPOINT, SNAPSHOT = "checkpoint", "snapshot"


@dataclass(frozen=True)
class Saved:
    """A checkpoint or snapshot on disk, its hashes checked.

    Args:
      path: of its folder.
      state: everything that is no tensor.
    """

    path: Path
    state: dict[str, Any]

    def tensors(self, group: str) -> dict[str, Tensor]:
        """Tensors of a group, on the CPU.

        Raises: DamageError.
        """
        try:
            return load_file(self.path / f"{group}.safetensors")
        except (SafetensorError, OSError) as error:
            raise DamageError(f"checkpoint '{self.path}': '{group}.safetensors' cannot be read ({error}).") from error


def save(kind: str, run: Path, step: int, groups: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> Path:
    """Write ``<kind>-<step>/`` into a run.

    Args:
      kind: CHECKPOINT or SNAPSHOT.
      groups: name of each safetensors file -> its tensors.
      state: everything that is no tensor; JSON values.
    """
    final = run / f"{kind}-{step}"
    temporary = temporary_beside(final)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        hashes = {}
        for group, tensors in groups.items():
            file = temporary / f"{group}.safetensors"
            save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, file)
            hashes[file.name] = xxh3_file(file)
        document = {"format_version": FORMAT_VERSION, "step": step, "xxh3_128": hashes} | state
        document |= {"state_sha256": sha256_of(document)}
        (temporary / STATE).write_bytes(canonical_json(document))
        commit_folder(temporary, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise_if_full(error, final)
        raise
    return final


def read(path: Path) -> Saved:
    """Open a checkpoint or snapshot and check every hash, before any tensor is used.

    Raises: RunError: not there, or of another format; DamageError: a file differs from its hash.
    """
    if not (path / STATE).is_file():
        raise RunError(f"checkpoint '{path}': there is no '{STATE}', so it is no checkpoint. Check the path.")
    state = read_json(path / STATE)
    if not isinstance(state, dict):
        raise DamageError(f"checkpoint '{path}': '{STATE}' is no JSON object. Remove this folder.")
    if state.get("format_version") != FORMAT_VERSION:
        raise RunError(
            f"checkpoint '{path}': format version {state.get('format_version')}, this release reads {FORMAT_VERSION}. "
            "Use the release that wrote it."
        )
    digest = state.pop("state_sha256", None)
    if digest != sha256_of(state):
        raise DamageError(
            f"checkpoint '{path}': '{STATE}' differs from its own hash. Remove this folder to resume from an older one."
        )
    for name, digest in state["xxh3_128"].items():
        file = path / name
        if not file.is_file() or xxh3_file(file) != digest:
            raise DamageError(
                f"checkpoint '{path}': '{name}' is missing or differs from its hash. "
                "Remove this folder to resume from the one before it."
            )
    return Saved(path, state)


def find(kind: str, run: Path) -> list[Path]:
    """Checkpoints or snapshots of a run, oldest first."""
    return [path for _, path in sorted(_steps(kind, run))]


def _steps(kind: str, run: Path) -> Iterator[tuple[int, Path]]:
    for path in run.glob(f"{kind}-*") if run.is_dir() else ():
        if match := re.fullmatch(rf"{kind}-(\d+)", path.name):
            yield int(match[1]), path


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest checkpoints; snapshots stay."""
    for path in find(CHECKPOINT, run)[:-keep]:
        shutil.rmtree(path)
