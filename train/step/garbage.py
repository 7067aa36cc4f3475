"""Garbage collection between steps, at the same step on every rank.

Left to Python, a collection of all objects comes at a moment of its own on each rank, takes a good part of a second in
a process that has compiled a model, and all other ranks wait for it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COLLECT_EVERY = 50  # steps; a step leaves no cycle that holds tensors, so little memory waits for it


@contextmanager
def collected_by_hand() -> Iterator[Callable[[], None]]:
    """Turn automatic collection off; afterwards, also after an error, all is as before.

    Yields: to be called after each step; it collects after every ``COLLECT_EVERY`` of them. What is there at the start
    and after the first collection, such as modules and compiled code, is not looked through again, unless the caller
    has frozen objects of its own.
    """
    was_enabled, freezes, steps = gc.isenabled(), gc.get_freeze_count() == 0, 0

    def collect() -> None:
        gc.collect()
        if freezes:
            gc.freeze()

    def after_step() -> None:
        nonlocal steps
        steps += 1
        if steps == COLLECT_EVERY:
            collect()
        elif steps % COLLECT_EVERY == 0:
            gc.collect()

    collect()
    gc.disable()
    try:
        yield after_step
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
