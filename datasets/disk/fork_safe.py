"""Objects that a fork must reset: threads, locks that other threads hold, queues that both processes would read.

Every registered object is reset in the child before its only thread continues, in the order of registration.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """An object that holds threads, locks or queues."""

    def reset(self) -> None:
        """Create them again; called in a fork, where no other thread runs."""
        ...


_known: weakref.WeakKeyDictionary[ForkAware, None] = weakref.WeakKeyDictionary()


def reset_in_forks(owner: ForkAware) -> None:
    """Reset an object in every fork, as long as it lives."""
    _known[owner] = None


def _reset_all() -> None:
    for owner in list(_known):
        owner.reset()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_reset_all)
