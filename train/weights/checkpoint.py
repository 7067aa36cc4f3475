"""Checkpoints (all state to resume) and snapshots (averaged weights to use), as folders of safetensors and JSON.

``state.json`` has the size and hash of every file, and its own hash. Folders are written atomically
(``files.write_folder``). Everything read is checked first, against damage and malice: only bytes with the right hash
become tensors, and only tensors of the expected names, shapes and dtypes are returned. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as tensors_of
from safetensors.torch import save_file
from torch import Tensor

from ...datasets.disk.faults import named_faults
from ...datasets.disk.files import drop_cached, move, remove, write_folder
from ...datasets.disk.hashing import canonical_json, read_json, sha256_of, xxh3_file, xxh3_parts
from ...errors import DamageError, ResourceError, RunError
from .folders import AVERAGE as AVERAGE
from .folders import CHECKPOINT, STATE, steps
from .folders import SNAPSHOT as SNAPSHOT
from .folders import find as find

FORMAT_VERSION = 1
STATE_HASH = "state_sha256"
DAMAGED_PREFIX = "damaged-"
INTERRUPTED = "interrupted"  # true in the state of a snapshot of the step at which a run was stopped

MODEL, EMA, OPTIMIZER, NULL_CAPTION = "model", "ema", "optimizer", "null_caption"  # groups of tensors, a file each

FIRST_SHARE = "first_share"  # of a snapshot's state: the share of the average that is the initial weights
YOUNG = 0.2  # of that share, above which the average is not one yet; with a warm-up it is below from the first step on

Groups = Mapping[str, Mapping[str, Tensor]]


class CheckpointDamage(DamageError):
    """A checkpoint or snapshot differs from what was written.

    Args:
      path: of its folder.
      what: the damage.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{_kind(path)} '{path}': {what}. Restore the folder from a copy, or remove it.")
        self.path, self.what = path, what


class FileHash(BaseModel):
    """Size and XXH3-128 of a file."""

    model_config = ConfigDict(frozen=True, strict=True)  # keys of a newer release are left out

    bytes: Annotated[int, Field(ge=0)]
    xxh3_128: str


class _State(BaseModel):
    """Required content of every ``state.json``; the rest belongs to the run."""

    model_config = ConfigDict(strict=True)

    kind: Literal["checkpoint", "snapshot", "average"]
    step: Annotated[int, Field(ge=0)]
    files: dict[Annotated[str, Field(pattern=r"^[a-z_]+\.safetensors$")], FileHash]


def young_average(path: Path, state: Mapping[str, Any]) -> str | None:
    """A warning if the average of a snapshot is still much of what its run began with, else None.

    Args:
      path, state: of the snapshot.
    """
    if (share := state.get(FIRST_SHARE, 0.0)) <= YOUNG:
        return None
    return (
        f"snapshot '{path}': {share:.0%} of the averaged weights is still the initial weights, since the average "
        f"is longer than its {state['step']:,} steps. Use --weights raw, or train with ema.warmup = true or a smaller "
        "run.ema_decay"
    )


@dataclass(frozen=True)
class Saved:
    """A checkpoint or snapshot on disk.

    Args:
      path: of its folder.
      state: everything except tensors.
      files: size and hash by name.
    """

    path: Path
    state: dict[str, Any]
    files: dict[str, FileHash]

    def read(self, group: str) -> dict[str, Tensor]:
        """Tensors of a group, on the CPU, from bytes that have the right hash.

        Raises: DamageError: the file is missing or damaged.
        """
        name = f"{group}.safetensors"
        entry = self.files.get(name)
        if entry is None:
            raise CheckpointDamage(self.path, f"there is no '{name}'")
        with _bad_disk_is_damage(self.path, name):
            data = (self.path / name).read_bytes()
        if xxh3_parts([data]) != (entry.bytes, entry.xxh3_128):
            raise CheckpointDamage(self.path, f"'{name}' differs from its hash")
        try:
            return tensors_of(data)
        except (SafetensorError, KeyError, ValueError, TypeError) as error:  # KeyError: a dtype that torch lacks
            raise CheckpointDamage(self.path, f"'{name}' holds no tensors ({error})") from error

    def tensors(self, group: str, wanted: Mapping[str, Any]) -> dict[str, Tensor]:
        """``read``, then ``check_tensors``."""
        tensors = self.read(group)
        self.check_tensors(group, tensors, wanted)
        return tensors

    def check_tensors(self, group: str, tensors: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> None:
        """Check names, shapes and dtypes of the tensors of a group.

        Args:
          wanted: tensors with the expected ones, such as meta tensors.
        Raises: DamageError: it has other tensors.
        """
        name = f"{group}.safetensors"
        if names := sorted(tensors.keys() ^ wanted.keys()):
            state = "too many" if names[0] in tensors else "missing"
            raise CheckpointDamage(
                self.path, f"'{name}': {len(names)} tensors do not fit the model; '{names[0]}' is {state}"
            )
        for key, tensor in tensors.items():
            if (tensor.shape, tensor.dtype) != (wanted[key].shape, wanted[key].dtype):
                actual, expected = [f"{tuple(t.shape)} {t.dtype}" for t in (tensor, wanted[key])]
                raise CheckpointDamage(self.path, f"'{name}': '{key}' is {actual}, the model has {expected}")


def save(kind: str, run: Path, step: int, groups: Groups, state: Mapping[str, Any]) -> Path:
    """Write ``<kind>-<step>/`` into a run; each file is read back before the folder gets its name.

    Args:
      kind: CHECKPOINT, SNAPSHOT or AVERAGE.
      groups: name of each safetensors file -> its tensors.
      state: everything except tensors; JSON values.
    Raises: ResourceError: the disk is full; DamageError: the disk returns other bytes. An older folder then stays.
    """
    final = run / f"{kind}-{step}"
    hashes: dict[str, Any] = {}

    def files() -> Iterator[tuple[str, bytes | Callable[[Path], None]]]:
        for group, tensors in groups.items():
            name, written = f"{group}.safetensors", list[Path]()
            whole = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}

            def write(path: Path, whole: dict[str, Tensor] = whole, written: list[Path] = written) -> None:
                try:
                    save_file(whole, path)
                except SafetensorError as error:  # of the disk: it has the number of the system only in its text
                    raise _disk_error(error, path) from error
                path.chmod(path.parent.stat().st_mode & 0o666)  # as the umask has it; safetensors gives 0600
                written.append(path)

            yield name, write
            hashes[name] = _hash_of_written(final, written[0], whole)
        document = {"format_version": FORMAT_VERSION, "kind": kind, "step": step, "files": hashes, **state}
        yield STATE, canonical_json(document | {STATE_HASH: sha256_of(document)})

    write_folder(final, files(), replace=True)
    return final


def _hash_of_written(final: Path, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Size and hash of a file that the disk returns as the tensors that were written to it."""
    drop_cached(path)  # so that the disk is read, not the memory that was written from
    with _bad_disk_is_damage(final, path.name), contextlib.suppress(SafetensorError), safe_open(path, "pt") as file:
        if all(torch.equal(_as_bytes(file.get_tensor(name)), _as_bytes(t)) for name, t in tensors.items()):
            return {"bytes": path.stat().st_size, "xxh3_128": xxh3_file(path)}
    raise CheckpointDamage(final, f"the disk returned bytes of '{path.name}' that differ from those written")


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _disk_error(error: SafetensorError, path: Path) -> Exception:
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else error


def read(path: Path) -> Saved:
    """Open a checkpoint or snapshot; ``Saved.tensors`` checks the bytes of a group before a tensor is used.

    Raises: RunError: it is of another format; DamageError: its state is damaged, a file is missing, of another size,
      or not known.
    """
    if not (path / STATE).is_file():
        raise CheckpointDamage(path, f"there is no '{STATE}'")
    try:
        with _bad_disk_is_damage(path, STATE):
            state, content = read_json(path / STATE), (path / STATE).read_bytes()
        if not isinstance(state, dict):
            raise CheckpointDamage(path, f"'{STATE}' is not a JSON object")
        digest = state.pop(STATE_HASH, None)
        whole = digest == sha256_of(state) and content == canonical_json(state | {STATE_HASH: digest})
    except CheckpointDamage:
        raise
    except (
        DamageError,
        ValueError,
        RecursionError,
    ) as error:  # such as NaN, half a surrogate pair, a thousand brackets
        raise CheckpointDamage(path, f"'{STATE}' is not valid ({error})") from error
    if not whole:
        raise CheckpointDamage(path, f"'{STATE}' differs from its own hash")
    if state.get("format_version") != FORMAT_VERSION:
        raise RunError(
            f"{_kind(path)} '{path}': format version {state.get('format_version')}, this release reads "
            f"{FORMAT_VERSION}. Use the release that wrote it."
        )
    try:
        known = _State.model_validate(state)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise CheckpointDamage(path, f"'{STATE}': '{place}' is not valid: {problem['msg']}") from error
    if path.name != f"{known.kind}-{known.step}":
        raise CheckpointDamage(path, f"it is {known.kind}-{known.step} by its '{STATE}'")
    _check_files(path, known.files)
    return Saved(path, state, known.files)


def _check_files(path: Path, files: Mapping[str, FileHash]) -> None:
    names = {entry.name for entry in path.iterdir()}
    if unknown := sorted(names - files.keys() - {STATE}):
        raise CheckpointDamage(path, f"'{unknown[0]}' does not belong to it")
    for name, entry in files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry.bytes:
            problem = "is missing" if size is None else f"has {size} bytes, not {entry.bytes}"
            raise CheckpointDamage(path, f"'{name}' {problem}")


@contextlib.contextmanager
def _bad_disk_is_damage(path: Path, name: str) -> Iterator[None]:
    """Turn a bad sector into damage, so that a run resumes from an older checkpoint; other faults are not the file's.

    Raises: CheckpointDamage; ResourceError: a network folder or this machine failed.
    """
    try:
        with named_faults(path / name):
            yield
    except ResourceError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EIO:
            raise
        raise CheckpointDamage(path, f"'{name}' cannot be read ({error.__cause__.strerror})") from error


def _kind(path: Path) -> str:
    return path.name.partition("-")[0]


def prune(run: Path, keep: int, *, proven: Path, keep_every: int = 0) -> None:
    """Remove all but the newest checkpoints.

    Args:
      keep: number of newest checkpoints to keep.
      proven: a checkpoint that was read back, and is never removed.
      keep_every: checkpoints of steps divisible by it stay too; 0: none.
    """
    for step, path in sorted(steps(CHECKPOINT, run))[:-keep]:
        if path != proven and not (keep_every and step % keep_every == 0):
            remove(path)


def prune_interrupted(kind: str, run: Path) -> None:
    """Remove snapshots, or averages, of steps at which the run was stopped, but the newest of them."""
    for path in [path for path in find(kind, run) if _is_interrupted(path)][:-1]:
        remove(path)


def _is_interrupted(path: Path) -> bool:
    with contextlib.suppress(DamageError, OSError):  # a damaged one stays
        state = read_json(path / STATE)
        return isinstance(state, dict) and state.get(INTERRUPTED) is True
    return False


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is ignored; nothing is deleted.

    Returns: its new path.
    """
    names = (f"{DAMAGED_PREFIX}{path.name}{more}" for more in ("", *(f"-{n}" for n in range(2, 1000))))
    free = next(target for name in names if not (target := path.with_name(name)).exists())
    move(path, free)
    return free


def damaged(run: Path) -> list[Path]:
    """Damaged checkpoints that were renamed."""
    return sorted(run.glob(f"{DAMAGED_PREFIX}{CHECKPOINT}-*"))
