"""Arrays of untrusted .npy and .npz files: checked before memory is allocated, and never unpickled.

``numpy.load`` trusts a header's shape and allocates it; here the header must match the size of the file.
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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO

import numpy as np

MAX_ARRAY_BYTES = 1 << 28  # of one record: far more than a latent of 4096 px or 512 tokens in float32
MAX_HEADER = 1 << 12  # ours and numpy's are 128 bytes
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError)  # RuntimeError: it is encrypted
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_parsing = threading.Lock()  # two threads that parse at once break Python 3.11's parser ("recursion depth mismatch")
DTYPES = ("float16", "float32", "bool", "uint8", "uint16", "int16", "int32", "int64")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; others, as a FIFO, may never end.

    Raises: OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"not a regular file: {path.name}")
    return open(descriptor, "rb")


def read_file(path: Path, most: int = MAX_ARRAY_BYTES + MAX_HEADER) -> bytes:
    """Read a file, by default of one record.

    Raises: OSError; ValueError: longer than ``most`` bytes.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"more than {most} bytes")
    return content


def npy_header(head: bytes, total_bytes: int) -> tuple[tuple[int, ...], np.dtype, bool, int]:
    """Shape, dtype, Fortran order and length of a .npy header.

    Args:
      head: at least the header.
      total_bytes: of the file; must match the header exactly.
    Raises: ValueError: malformed, holds objects, or claims another size.
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
    """Shape, Fortran order and dtype of a header, cached because most files share one; raises ValueError."""
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    if version not in HEADERS:
        raise ValueError(f"version {version} of the npy format; needed 1.0 or 2.0")
    try:
        return HEADERS[version](stream, max_header_size=MAX_HEADER)
    except (TokenError, SyntaxError, RecursionError, TypeError) as error:  # of headers that are no dictionaries
        raise ValueError(f"its header is not one of an array ({type(error).__name__})") from error


def parse_npy(content: bytes) -> np.ndarray:
    """Parse a .npy file; native byte order.

    Raises: ValueError.
    """
    shape, dtype, fortran, start = npy_header(content, len(content))
    flat = np.frombuffer(content, dtype, offset=start)
    return flat.reshape(shape, order="F" if fortran else "C").astype(dtype.newbyteorder("="), copy=False)


def look(head: bytes, total_bytes: int) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a .npy file; as ``npy_header``."""
    shape, dtype, _, _ = npy_header(head, total_bytes)
    return shape, dtype.newbyteorder("=").name


def look_npy(path: Path) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a .npy file, from its header.

    Raises: OSError, ValueError.
    """
    with open_regular(path) as file:
        return look(file.read(MAX_HEADER), os.fstat(file.fileno()).st_size)


@contextmanager
def open_npz(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a .npz file; errors while reading its members become ValueError.

    Raises: OSError; ValueError: not a zip file.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as arrays:
            yield arrays
    except ZIP_ERRORS as error:
        raise ValueError(str(error)) from error


def look_member(arrays: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an array, from its header.

    Raises: KeyError, ValueError.
    """
    info = arrays.getinfo(f"{name}.npy")
    with arrays.open(info) as member:
        return look(member.read(MAX_HEADER), info.file_size)


def read_member(arrays: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read an array and check its CRC.

    Raises: KeyError, ValueError.
    """
    info = arrays.getinfo(f"{name}.npy")
    if info.file_size > MAX_ARRAY_BYTES + MAX_HEADER:
        raise ValueError(f"array '{name}' claims {info.file_size} bytes")
    with arrays.open(info) as member:
        return parse_npy(member.read(info.file_size + 1))  # a number, so that it unpacks no more than is claimed
