"""Arrays of .npz files of any size, read by ranges of rows; and small ones written.

``numpy.load`` allocates what a header claims and loads whole arrays; 50,000 pictures of 256 px have 10 GB.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ....datasets.disk.files import write_atomic
from ....datasets.errors import DamageError, SourceError
from ....precompute.importing.formats.untrusted.arrays import MAX_HEADER, ZIP_ERRORS

DTYPES = ("uint8", "int32", "int64", "float32", "float64")
ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # so that equal arrays give equal files
TEXT = "leandit"  # array of UTF-8 bytes that describes the others


class Npz:
    """The arrays of a .npz file.

    Raises: SourceError: there is no such file; DamageError: it is not one.
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

    def checksums(self) -> dict[str, int]:
        """CRC-32 of each array, from the directory of the file."""
        return {name: info.CRC for name, info in sorted(self._members.items())}

    def shape(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of an array, from its header.

        Raises: DamageError.
        """
        with self._open(name) as (_, shape, dtype):
            return shape, dtype

    def rows(self, name: str, starts_and_stops: Iterator[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Ranges of rows of an array, in ascending order, one after the other.

        Raises: DamageError.
        """
        with self._open(name) as (member, shape, dtype):
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            at = 0
            for start, stop in starts_and_stops:
                _skip(member, (start - at) * row_bytes)
                content = member.read((stop - start) * row_bytes)
                if len(content) != (stop - start) * row_bytes:
                    raise ValueError(f"array '{name}' ends before row {stop}")
                at = stop
                yield np.frombuffer(content, dtype).reshape(stop - start, *shape[1:])

    def read(self, name: str) -> np.ndarray:
        """A whole array.

        Raises: DamageError.
        """
        shape, _ = self.shape(name)
        if not shape:
            raise DamageError(f"'{self.path}': array '{name}' is a single number. Make the file again.")
        return next(self.rows(name, iter([(0, shape[0])])))

    def text(self) -> dict[str, Any] | None:
        """What ``write_npz`` has stored as text; None: the file is not ours.

        Raises: DamageError.
        """
        if TEXT not in self:
            return None
        try:
            found = json.loads(self.read(TEXT).tobytes())
        except ValueError as error:
            raise DamageError(f"'{self.path}': its description is damaged ({error}). Make it again.") from error
        return found if isinstance(found, dict) else None

    def _open(self, name: str) -> _Member:
        if name not in self:
            raise DamageError(f"'{self.path}': it has no array '{name}'. Make the file again.")
        return _Member(self.path, name, self._members[name])


class _Member:
    """An array of an archive, open at its first row: a context with (stream, shape, dtype)."""

    def __init__(self, path: Path, name: str, info: zipfile.ZipInfo) -> None:
        self._path, self._name, self._info = path, name, info

    def __enter__(self) -> tuple[Any, tuple[int, ...], np.dtype]:
        self._archive = zipfile.ZipFile(self._path)
        try:
            return self._read_header()
        except BaseException as error:
            self._archive.close()
            self.__exit__(type(error), error)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, _traceback: object = None) -> None:
        self._archive.close()
        if isinstance(error, (ValueError, EOFError, OSError, *ZIP_ERRORS)):
            raise DamageError(f"'{self._path}': array '{self._name}': {error}. Make the file again.") from error

    def _read_header(self) -> tuple[Any, tuple[int, ...], np.dtype]:
        member = self._archive.open(self._info)
        version = npy.read_magic(member)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"version {version} of the npy format, needed 1.0 or 2.0")
        try:
            shape, fortran, dtype = read(member, max_header_size=MAX_HEADER)
        except (TokenError, SyntaxError, RecursionError, TypeError) as error:
            raise ValueError(f"its header is not one of an array ({type(error).__name__})") from error
        claimed = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or dtype.name not in DTYPES or fortran:
            raise ValueError(f"it holds {dtype}{' by columns' if fortran else ''}, needed {', '.join(DTYPES)} by rows")
        if min(shape, default=0) < 0 or member.tell() + claimed != self._info.file_size:
            raise ValueError(f"its header claims shape {shape}, it has {self._info.file_size} bytes")
        return member, shape, dtype


def _skip(member: Any, num_bytes: int) -> None:
    while num_bytes:
        read = len(member.read(min(num_bytes, 1 << 24)))
        if not read:
            raise ValueError("it ends too early")
        num_bytes -= read


def write_npz(path: Path, arrays: Mapping[str, np.ndarray], text: Mapping[str, Any]) -> None:
    """Write arrays and a description, uncompressed and atomically; ``numpy.load`` reads them too."""
    described = np.frombuffer(json.dumps(text, sort_keys=True).encode(), np.uint8)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        for name, array in {**arrays, TEXT: described}.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy", ZIP_TIME), "w", force_zip64=True) as member:
                npy.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
    write_atomic(path, content.getvalue())
