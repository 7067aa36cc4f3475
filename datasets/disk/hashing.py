"""Hashes of files, buffers and values, and canonical JSON: equal values give equal bytes.

XXH3 detects accidental damage at memory speed; SHA-256 is used where a hash is an identity.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ...errors import DamageError
from .faults import named_faults

MAX_JSON_BYTES = 1 << 30  # a manifest of ten million shards
MAX_JSON_DEPTH = 64  # far deeper than any of ours, far below recursion limits
BLOCK_BYTES = 1 << 20


def canonical_json(value: Any) -> bytes:
    """Encode as JSON with sorted keys and an indent of one space."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file that ``canonical_json`` wrote. Content that it cannot write is refused.

    Raises: DamageError: not valid JSON, not a regular file, too large or too deep; OSError: missing; ResourceError: the
      disk failed.
    """
    with named_faults(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DamageError(f"file '{path}': not a regular file; expected a JSON file. Restore it, or create it again.")
    if status.st_size > max_bytes:
        raise DamageError(
            f"file '{path}': {status.st_size} bytes; expected at most {max_bytes / 2**20:.0f} MiB. Restore it."
        )
    with named_faults(path):
        content = path.read_bytes()
    try:
        value = json.loads(content)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # fails for NaN, 1e999 and lone surrogates
        if _depth(value) > MAX_JSON_DEPTH:
            raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep")
        return value
    except (ValueError, RecursionError) as error:
        raise DamageError(f"file '{path}': not valid JSON ({error}). Restore it, or create it again.") from error


def _depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max((_depth(child) for child in children if isinstance(child, (dict, list))), default=0)


def sha256_of(value: Any) -> str:
    """Hash a JSON value by its canonical bytes; 64 hex digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_file(path: Path) -> str:
    """Hash a file with SHA-256; 64 hex digits."""
    with named_faults(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def xxh3_64(*rows: Any) -> int:
    """XXH3-64 of consecutive contiguous buffers."""
    if len(rows) == 1:
        return xxhash.xxh3_64_intdigest(rows[0])
    digest = xxhash.xxh3_64()
    for row in rows:
        digest.update(row)
    return digest.intdigest()


def xxh3_rows(parts: Sequence[Iterable[Any]]) -> np.ndarray:
    """XXH3-64 of each of B rows, (B,) uint64.

    Args:
      parts: parts of the rows, one after the other: B contiguous buffers each.
    """
    if len(parts) == 1:
        hashes = [xxhash.xxh3_64_intdigest(row) for row in parts[0]]
    else:
        hashes = [xxh3_64(*row) for row in zip(*parts, strict=True)]
    return np.array(hashes, np.uint64)


def xxh3_file(path: str | Path) -> str:
    """Hash a file with XXH3-128; 32 hex digits."""
    with named_faults(path), open(path, "rb", buffering=0) as file:
        digest = xxhash.xxh3_128()
        # One reused buffer: allocating one per block costs as much as the hash.
        block = memoryview(bytearray(min(BLOCK_BYTES, os.fstat(file.fileno()).st_size + 1)))
        while count := file.readinto(block):
            digest.update(block[:count])
        return digest.hexdigest()


def xxh3_parts(parts: Iterable[Any]) -> tuple[int, str]:
    """Size in bytes and XXH3-128 of consecutive buffers."""
    size, digest = 0, xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
        size += memoryview(part).nbytes
    return size, digest.hexdigest()
