"""The one way bytes reach a disk: temporary file in the same folder, fsync, rename, fsync of the folder.

A file is there whole or not at all, also after a power cut. Nothing is ever written through a memory map. What a killed
process left behind carries a recognisable name and is swept at the next start.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from .errors import DamageError, ResourceError

TEMPORARY_PREFIX = ".leandit-tmp-"
REPLACED_SUFFIX = ".leandit-replaced"


def write_atomic(path: Path, parts: bytes | Iterable[Any]) -> None:
    """Write a file so that it is there whole or not at all.

    Args:
      path: where the file shall be; its folder is made if missing.
      parts: the content, or contiguous buffers that follow each other.
    Raises: ResourceError: the disk is full or over quota; nothing is left behind.
    """
    temporary = temporary_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            for part in [parts] if isinstance(parts, bytes) else parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise_if_full(error, path)
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_beside(path: Path) -> Path:
    """Name a temporary in the same folder; the name says which process on which host owns it."""
    return path.with_name(f"{TEMPORARY_PREFIX}{socket.gethostname()}@{os.getpid()}@{path.name}")


def raise_if_full(error: OSError, path: Path) -> None:
    """Turn "no space left" into a ResourceError that says how much is free."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        free_mib = shutil.disk_usage(folder).free / 2**20
        raise ResourceError(
            f"file '{path}': {error.strerror} ({free_mib:.0f} MiB free on this disk). "
            "Free some space, then run the same command again: it resumes."
        ) from error


def commit_folder(temporary: Path, final: Path) -> None:
    """Move a finished folder of files into place: fsync of every file and folder, then one rename.

    An older folder of the same name is moved out of the way first, and removed last; if the process dies between,
    ``sweep_strays`` moves it back.
    """
    for file in sorted(temporary.rglob("*")):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    fsync_folder(temporary)
    replaced = final.with_name(final.name + REPLACED_SUFFIX)
    if final.exists():
        os.replace(final, replaced)
    os.replace(temporary, final)
    fsync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_strays(folder: Path) -> list[Path]:
    """Remove temporaries whose process is gone; those of other hosts and of living processes stay.

    A folder that ``commit_folder`` moved out of the way and never replaced is moved back.

    Returns: what was removed.
    """
    for path in sorted(folder.rglob(f"*{REPLACED_SUFFIX}")):
        kept = path.with_name(path.name.removesuffix(REPLACED_SUFFIX))
        if kept.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.replace(path, kept)
    mine = f"{TEMPORARY_PREFIX}{socket.gethostname()}@"
    swept = []
    for path in sorted(folder.rglob(f"{mine}*")):
        pid = path.name.removeprefix(mine).split("@")[0]
        if pid.isdigit() and int(pid) != os.getpid() and _is_alive(int(pid)):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        swept.append(path)
    return swept


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def canonical_json(value: Any) -> bytes:
    """Encode as JSON with sorted keys and one space of indent: equal values give equal bytes."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """Read a JSON file of ours.

    Raises: DamageError: it is no valid JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DamageError(f"file '{path}': not valid JSON ({error}). Restore it, or make it anew.") from error


def sha256_of(value: Any) -> str:
    """Hash a JSON value by its canonical bytes; 64 hex digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_file(path: Path) -> str:
    """Hash a file with SHA-256; 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def xxh3_file(path: Path) -> str:
    """Hash a file with XXH3-128, which finds accidental damage at memory speed; 32 hex digits."""
    with open(path, "rb") as file:
        digest = xxhash.xxh3_128()
        while block := file.read(1 << 22):
            digest.update(block)
        return digest.hexdigest()


def xxh3_parts(parts: Iterable[Any]) -> tuple[int, str]:
    """Size in bytes and XXH3-128 of buffers that follow each other in a file."""
    digest, size = xxhash.xxh3_128(), 0
    for part in parts:
        digest.update(part)
        size += memoryview(part).nbytes
    return size, digest.hexdigest()
