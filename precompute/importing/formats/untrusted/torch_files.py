"""Tensors of untrusted ``.pt`` files; the only module that reads them, without running code."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .arrays import open_regular


def read_tensors(path: Path) -> Any:
    """Tensors, and lists and dicts of tensors, on the CPU.

    Raises: OSError; ValueError: not such a file, or it holds other objects, which are never constructed.
    """
    try:
        with open_regular(path) as file:
            _check_stored(file)
            return torch.load(file, map_location="cpu", weights_only=True)
    except zipfile.BadZipFile as error:
        raise ValueError(f"not a file of tensors: {error}") from error
    except pickle.UnpicklingError as error:  # its message explains how to read it anyway
        raise ValueError("it holds something else than tensors, which is refused") from error
    except (RuntimeError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a file of tensors: {next(iter(str(error).splitlines()), '')}"[:200]) from error


def _check_stored(file: BinaryIO) -> None:
    """Refuse compressed tensors, which torch never writes: a few bytes could fill the memory.

    Raises: ValueError, BadZipFile.
    """
    if file.read(4) == b"PK\x03\x04":
        with zipfile.ZipFile(file) as packed:
            if any(info.compress_type != zipfile.ZIP_STORED for info in packed.infolist()):
                raise ValueError("not a file of tensors: its members are compressed")
    file.seek(0)
