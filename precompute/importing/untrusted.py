"""Arrays and tensors of untrusted files: nothing is unpickled, and the size that a header claims is checked first.

``numpy.load`` would allocate the shape of a header; here the header must match the size of the file.
"""

from __future__ import annotations

import io
import lzma
import math
import os
import pickle
import threading
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from ..images.faults import open_regular

MAX_ARRAY_BYTES = 1 << 28  # of one record: far more than a latent of 4096 px or 512 tokens in float32
MAX_HEADER = 1 << 12  # ours and numpy's are 128 bytes
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError)  # RuntimeError: it is encrypted
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
DTYPES = ("float16", "float32", "bool", "uint8", "uint16", "int16", "int32", "int64")
_parsing = threading.Lock()  # two threads that parse at once break Python 3.11's parser ("recursion depth mismatch")

Looked = tuple[tuple[int, ...], str]
"""Shape and dtype of an array."""


def read_file(path: Path, most: int = MAX_ARRAY_BYTES + MAX_HEADER) -> bytes:
    """Read a regular file, by default of one record.

    Raises: OSError; ValueError: longer than ``most`` bytes.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"more than {most} bytes")
    return content


def npy_header(
    head: bytes, total_bytes: int, *, dtypes: Sequence[str] = DTYPES, most_bytes: int = MAX_ARRAY_BYTES
) -> tuple[tuple[int, ...], np.dtype, bool, int]:
    """Shape, dtype, Fortran order and length of a .npy header.

    Args:
      head: at least the header.
      total_bytes: of the file; must match the header exactly.
      dtypes: names of those that are expected.
      most_bytes: of the array.
    Raises: ValueError: malformed, holds objects, or claims another size.
    """
    start = 10 if head[6:7] == b"\x01" else 12
    start += int.from_bytes(head[8:start], "little")
    stream = io.BytesIO(head[: min(start, MAX_HEADER)])
    version = np.lib.format.read_magic(stream)
    if version not in HEADERS:
        raise ValueError(f"version {version} of the npy format; expected 1.0 or 2.0")
    try:
        with _parsing:
            shape, fortran, dtype = HEADERS[version](stream, max_header_size=MAX_HEADER)
    except (TokenError, SyntaxError, RecursionError, TypeError) as error:  # of headers that are no dictionaries
        raise ValueError(f"its header is not one of an array ({type(error).__name__})") from error
    if dtype.hasobject or dtype.newbyteorder("=").name not in dtypes:
        raise ValueError(f"dtype {dtype}; expected one of {', '.join(dtypes)} (objects are pickled, and refused)")
    claimed = math.prod(shape) * dtype.itemsize  # of Python's integers, which do not overflow
    if min(shape, default=1) < 0 or claimed > most_bytes or start + claimed != total_bytes:
        raise ValueError(f"the header claims shape {shape} of {dtype}, the file has {total_bytes} bytes")
    return shape, dtype, fortran, start


def parse_npy(content: bytes) -> np.ndarray:
    """Parse a .npy file; native byte order.

    Raises: ValueError.
    """
    shape, dtype, fortran, start = npy_header(content, len(content))
    flat = np.frombuffer(content, dtype, offset=start)
    return flat.reshape(shape, order="F" if fortran else "C").astype(dtype.newbyteorder("="), copy=False)


def look(head: bytes, total_bytes: int) -> Looked:
    """Shape and dtype in a .npy header; as ``npy_header``."""
    shape, dtype, _, _ = npy_header(head, total_bytes)
    return shape, dtype.newbyteorder("=").name


def look_npy(path: Path) -> Looked:
    """Shape and dtype of a .npy file, from its header; raises OSError, ValueError."""
    with open_regular(path) as file:
        return look(file.read(MAX_HEADER), os.fstat(file.fileno()).st_size)


def look_npz(path: Path, names: Sequence[str]) -> dict[str, Looked]:
    """Shape and dtype of those arrays that a .npz file has, from their headers.

    Raises: OSError, ValueError, ZIP_ERRORS.
    """
    found = {}
    with open_regular(path) as file, zipfile.ZipFile(file) as arrays:
        for name in [name for name in names if f"{name}.npy" in arrays.namelist()]:
            info = arrays.getinfo(f"{name}.npy")
            with arrays.open(info) as member:
                found[name] = look(member.read(MAX_HEADER), info.file_size)
    return found


def read_npz(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """Read arrays of a .npz file and check their CRCs.

    Raises: OSError, ValueError, ZIP_ERRORS; KeyError: an array is missing.
    """
    found = []
    with open_regular(path) as file, zipfile.ZipFile(file) as arrays:
        for name in names:
            info = arrays.getinfo(f"{name}.npy")
            if info.file_size > MAX_ARRAY_BYTES + MAX_HEADER:
                raise ValueError(f"array '{name}' claims {info.file_size} bytes")
            with arrays.open(info) as member:
                found.append(parse_npy(member.read(info.file_size + 1)))  # unpacks no more than is claimed
    return found


def read_tensors(path: Path) -> Any:
    """Tensors, and lists and dicts of tensors, of a ``.pt`` file, on the CPU.

    Raises: OSError; ValueError: not such a file, or it holds other objects, which are never constructed.
    """
    import torch

    try:
        with open_regular(path) as file:
            if file.read(4) == b"PK\x03\x04":
                with zipfile.ZipFile(file) as packed:  # torch never compresses: a few bytes could fill the memory
                    if any(info.compress_type != zipfile.ZIP_STORED for info in packed.infolist()):
                        raise ValueError("not a file of tensors: its members are compressed")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its message explains how to read it anyway
        raise ValueError("it holds objects other than tensors, which are refused") from error
    except (zipfile.BadZipFile, RuntimeError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a file of tensors: {next(iter(str(error).splitlines()), '')}"[:200]) from error
