"""Arrays of .npz files of any size: written in parts, and read by rows.

``numpy.load`` allocates what a header claims and loads whole arrays; 50,000 images of 256 px have 10 GB.
"""

from __future__ import annotations

import contextlib
import json
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from ...datasets.disk.strays import write_output
from ...errors import DamageError, SourceError
from ...precompute.importing.untrusted import MAX_HEADER, ZIP_ERRORS, npy_header

DTYPES = ("uint8", "int32", "int64", "float32", "float64")
ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # so that equal arrays give equal files
TEXT = "leandit"  # array of UTF-8 bytes that describes the others


class Rows(NamedTuple):
    """An array that is written a part at a time, (n, ...) rows each."""

    shape: tuple[int, ...]
    dtype: str
    parts: Iterable[np.ndarray]


def write_npz(path: Path, arrays: Mapping[str, np.ndarray | Rows], text: Mapping[str, Any] | None = None) -> None:
    """Write arrays and a description, uncompressed and atomically; ``numpy.load`` reads them too."""
    described = {} if text is None else {TEXT: np.frombuffer(json.dumps(text, sort_keys=True).encode(), np.uint8)}
    write_output(path, npz_parts({**arrays, **described}))


def npz_parts(arrays: Mapping[str, np.ndarray | Rows]) -> Iterator[bytes]:
    """The bytes of an uncompressed .npz, a part of an array at a time."""
    written: Any = _Written()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            rows = array if isinstance(array, Rows) else Rows(array.shape, array.dtype.str, [array])
            header = {"descr": rows.dtype, "fortran_order": False, "shape": rows.shape}
            with archive.open(zipfile.ZipInfo(f"{name}.npy", ZIP_TIME), "w", force_zip64=True) as member:
                npy.write_array_header_1_0(member, header)
                for part in rows.parts:
                    member.write(part.tobytes())
                    yield written.take()
    yield written.take()


class _Written(bytearray):
    """What a ``ZipFile`` has written since the last ``take``; it cannot seek, so no byte changes later."""

    def write(self, data: bytes) -> int:
        self.extend(data)
        return len(data)

    def flush(self) -> None:
        """Called by ``ZipFile``."""

    def take(self) -> bytes:
        taken = bytes(self)
        self.clear()
        return taken


class Npz:
    """The arrays of an untrusted .npz file.

    Raises: SourceError: there is no such file; DamageError: it is not one, or while reading: an array is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise SourceError(f"'{path}': there is no such file. Check the path.")
        try:
            with zipfile.ZipFile(path) as archive:
                self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        except ZIP_ERRORS as error:
            raise DamageError(f"'{path}': not a .npz file ({error}). Make it again.") from error

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def checksum(self, name: str) -> int:
        """CRC-32 of an array, from the directory of the file."""
        return self._members[name].CRC

    def shape(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of an array, from its header."""
        with self._open(name) as (_, shape, dtype):
            return shape, dtype

    def rows(self, name: str, numbers: Iterable[int]) -> Iterator[np.ndarray]:
        """Rows of an array by their numbers, ascending."""
        with self._open(name) as (member, shape, dtype):
            row_bytes, first = math.prod(shape[1:]) * dtype.itemsize, member.tell()
            for number in numbers:
                member.seek(first + number * row_bytes)
                yield np.frombuffer(member.read(row_bytes), dtype).reshape(shape[1:])

    def read(self, name: str) -> np.ndarray:
        """A whole array."""
        with self._open(name) as (member, shape, dtype):
            if not shape:
                raise ValueError("it is a single number")
            return np.frombuffer(member.read(), dtype).reshape(shape)

    def text(self) -> dict[str, Any] | None:
        """The description that ``write_npz`` has stored; None: the file is of another program."""
        if TEXT not in self:
            return None
        try:
            described = json.loads(self.read(TEXT).tobytes())
        except ValueError as error:
            raise DamageError(f"'{self.path}': its description is damaged ({error}). Make it again.") from error
        return described if isinstance(described, dict) else None

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[tuple[Any, tuple[int, ...], np.dtype]]:
        """An array at its first row, its shape and dtype, which must be those of exactly its bytes."""
        if name not in self:
            raise DamageError(f"'{self.path}': it has no array '{name}'. Make the file again.")
        info = self._members[name]
        try:
            with zipfile.ZipFile(self.path) as archive:
                with archive.open(info) as member:
                    head, size = member.read(MAX_HEADER), info.file_size
                shape, dtype, by_columns, start = npy_header(head, size, dtypes=DTYPES, most_bytes=size)
                if by_columns:
                    raise ValueError("it is in column-major order, expected row-major order")
                with archive.open(info) as member:  # again: after a seek, a member does not check its bytes
                    member.read(start)
                    yield member, shape, dtype
        except (ValueError, EOFError, OSError, *ZIP_ERRORS) as error:
            raise DamageError(f"'{self.path}': array '{name}': {error}. Make the file again.") from error
