"""Decoders for one precompute after the other: their processes take half a second of a core to start.

They are the real ones. A process that a test has forked has its own, which end with their context.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from leandit.precompute.images.decoders import Decoders

# Who starts decoders by this name; tests of what a start or an end does make their own.
USERS = (
    "precompute.pipeline",
    "precompute.images.decoders",  # where it is imported late
    "tools.inspection.pictures",
    "tools.plan.dry_run",
    "tools.plan.precompute_cost",
)


def keep_decoders(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Until the iterator goes on, decoders that worked well are kept for the next who wants such."""
    kept: dict[Any, list[Decoders]] = {}
    owner = os.getpid()

    @contextmanager
    def borrowed(num_children: int) -> Iterator[Decoders]:
        how = os.getcwd(), num_children, *Decoders.__init__.__kwdefaults__.values()
        idle = kept.setdefault(how, []) if os.getpid() == owner else []
        decoders = idle.pop() if idle else Decoders(num_children)
        try:
            yield decoders
        except BaseException:
            decoders.close()
            raise
        if os.getpid() == owner:
            idle.append(decoders)
        else:
            decoders.close()

    for user in USERS:
        patch.setattr(importlib.import_module(f"leandit.{user}"), "Decoders", borrowed)
    yield
    for decoders in [one for idle in kept.values() for one in idle]:
        decoders.close()
