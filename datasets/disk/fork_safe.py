"""Objects that a fork must reset: threads, locks that other threads hold, queues that both processes would read."""

from __future__ import annotations

import os
import weakref
from typing import Any

_known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()


def reset_in_forks(owner: Any) -> None:
    """Call ``owner.reset()`` in every fork before its only thread continues, in the order of registration."""
    _known[owner] = None


def _reset_all() -> None:
    for owner in list(_known):
        owner.reset()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_reset_all)
