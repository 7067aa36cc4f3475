"""Tensors of a ``.pt`` file of others: the one place that reads such files, and it builds nothing but tensors."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from .arrays import open_regular


def read_tensors(path: Path) -> Any:
    """Tensors, and lists and dicts of them, on the CPU.

    Raises: OSError; ValueError: it is no such file, or holds something else, which is never made.
    """
    try:
        with open_regular(path) as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # whose message tells how to read it all the same
        raise ValueError("it holds something else than tensors, which is refused") from error
    except (RuntimeError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no file of tensors: {next(iter(str(error).splitlines()), '')}"[:200]) from error
