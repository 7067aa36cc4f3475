"""Which engine a ``leandit precompute`` runs on, as its options say."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from .options import torch_device, torch_devices

if TYPE_CHECKING:  # they load torch, which most commands do without
    from ...precompute.config import PrecomputeRecipe
    from ...precompute.engines.engine import Engine

LOCAL, RAY = "local", "ray"


def engine_name(text: str) -> str:
    """Read ``--engine``.

    Raises: ValueError: there is no such engine.
    """
    if text not in (LOCAL, RAY):
        raise ValueError(f"'{text}': needed {LOCAL} or {RAY}.")
    return text


def chosen_engine(
    recipe: PrecomputeRecipe, store: Path, source: Sequence[str], *, devices: str, name: str, address: str
) -> AbstractContextManager[Engine | None]:
    """The engine that is asked for, ready to be started; none for a single device, where this process encodes itself.

    Args:
      devices: as ``--device`` names them.
      name, address: of the engine, and of the cluster that it shall use.
    Raises: RecipeError: they are of two kinds, or there are no such devices.
    """
    torch_device("cpu")  # says it where torch is not installed
    import torch

    if name == RAY:
        from ...precompute.engines.cluster import Cluster

        threads = torch.get_num_threads()
        return Cluster(recipe, store, source, address=address, devices=devices, num_threads=threads, say=say)
    names = [str(device) for device in torch_devices(devices)]
    if len(names) == 1:
        return contextlib.nullcontext()
    from ...precompute.engines.processes import Processes

    return Processes(recipe, store, source, names, num_threads=torch.get_num_threads(), say=say)


def say(what: str) -> None:
    """Tell the user what has happened."""
    print(f"leandit: {what}", file=sys.stderr)
