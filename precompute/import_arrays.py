"""Arrays of others, from .npy and .npz files: checked before memory is asked for, and never unpickled.

``numpy.load`` believes a header's shape and allocates it; here the header must fit the bytes that there are.
"""

from __future__ import annotations

import io
import lzma
import math
import os
import stat
import threading
import zipfile
import zlib
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO

import numpy as np
import xxhash

MAX_ARRAY_BYTES = 1 << 28  # of one record: far more than a latent of 4096 px or 512 tokens in float32
MAX_HEADER = 1 << 12  # ours and numpy's are 128 bytes
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError)  # RuntimeError: it is encrypted
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_parsing = threading.Lock()  # two threads that parse at once break Python 3.11's parser ("recursion depth mismatch")
DTYPES = ("float16", "float32", "bool", "uint8", "int16", "int32", "int64")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it; nothing else need come to an end.

    Raises: OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"not a regular file: {path.name}")
    return open(descriptor, "rb")


def read_file(path: Path) -> bytes:
    """The content of a small file.

    Raises: OSError; ValueError: it is too large to be a record.
    """
    with open_regular(path) as file:
        content = file.read(MAX_ARRAY_BYTES + MAX_HEADER + 1)
    if len(content) > MAX_ARRAY_BYTES + MAX_HEADER:
        raise ValueError(f"more than {MAX_ARRAY_BYTES} bytes")
    return content


def npy_header(head: bytes, total_bytes: int) -> tuple[tuple[int, ...], np.dtype, bool, int]:
    """Shape, dtype, Fortran order and length of the header of a .npy file.

    Args:
      head: at least its header.
      total_bytes: of the file; must be just what the header claims.
    Raises: ValueError: it is none, holds objects, or claims another size.
    """
    start = 10 if head[6:7] == b"\x01" else 12
    length = int.from_bytes(head[8:start], "little")
    with _parsing:
        shape, fortran, dtype = _parse_header(head[: min(start + length, MAX_HEADER)])
    if dtype.hasobject or dtype.newbyteorder("=").name not in DTYPES:
        raise ValueError(f"dtype {dtype}; needed one of {', '.join(DTYPES)} (objects are pickled, and refused)")
    start += length
    claimed = math.prod(shape) * dtype.itemsize  # of Python's integers, which do not overflow
    if min(shape, default=1) < 0 or claimed > MAX_ARRAY_BYTES or start + claimed != total_bytes:
        raise ValueError(f"the header claims shape {shape} of {dtype}, the file has {total_bytes} bytes")
    return shape, dtype, fortran, start


@lru_cache(maxsize=1024)
def _parse_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, Fortran order and dtype of a header; of a million files, most have the same.

    Raises: ValueError.
    """
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    if version not in HEADERS:
        raise ValueError(f"version {version} of the npy format; needed 1.0 or 2.0")
    try:
        return HEADERS[version](stream, max_header_size=MAX_HEADER)
    except (TokenError, SyntaxError, RecursionError, TypeError) as error:  # of headers that are no dictionaries
        raise ValueError(f"its header is not one of an array ({type(error).__name__})") from error


def parse_npy(content: bytes) -> np.ndarray:
    """The array of a .npy file, in native byte order.

    Raises: ValueError.
    """
    shape, dtype, fortran, start = npy_header(content, len(content))
    flat = np.frombuffer(content, dtype, offset=start)
    return flat.reshape(shape, order="F" if fortran else "C").astype(dtype.newbyteorder("="), copy=False)


def look_npy(path: Path) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a .npy file, from its header.

    Raises: OSError, ValueError.
    """
    with open_regular(path) as file:
        head = file.read(MAX_HEADER)
        shape, dtype, _, _ = npy_header(head, file.seek(0, io.SEEK_END))
    return shape, dtype.newbyteorder("=").name


class Npz:
    """The members of a .npz file.

    Raises: OSError, ValueError: it is no zip file.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path)
        try:
            self._zip = zipfile.ZipFile(self._file)
        except zipfile.BadZipFile as error:
            self._file.close()
            raise ValueError(str(error)) from error

    def __enter__(self) -> Npz:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()
        self._file.close()

    @property
    def names(self) -> set[str]:
        """Of the arrays."""
        return {name.removesuffix(".npy") for name in self._zip.namelist()}

    def look(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of an array, from its header.

        Raises: KeyError, ValueError.
        """
        info = self._info(name)
        try:
            with self._zip.open(info) as member:
                shape, dtype, _, _ = npy_header(member.read(MAX_HEADER), info.file_size)
        except ZIP_ERRORS as error:
            raise ValueError(str(error)) from error
        return shape, dtype.newbyteorder("=").name

    def read(self, name: str) -> np.ndarray:
        """An array; its CRC is checked.

        Raises: KeyError, ValueError.
        """
        info = self._info(name)
        try:
            with self._zip.open(info) as member:
                content = member.read(info.file_size + 1)  # a number, so that it unpacks no more than is claimed
        except ZIP_ERRORS as error:
            raise ValueError(str(error)) from error
        return parse_npy(content)

    def _info(self, name: str) -> zipfile.ZipInfo:
        info = self._zip.getinfo(f"{name}.npy")
        if info.file_size > MAX_ARRAY_BYTES + MAX_HEADER:
            raise ValueError(f"array '{name}' claims {info.file_size} bytes")
        return info


def checksum(*parts: bytes | np.ndarray) -> str:
    """XXH3-64 of parts that follow each other, as 16 hex digits."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).data)
    return digest.hexdigest()
