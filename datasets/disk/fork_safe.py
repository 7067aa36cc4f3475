"""What a fork must not take over from its parent: threads, locks that they hold, queues that both would read.

A child begins with one thread. What has such things says here how to begin anew, and does so before that thread goes
on, in the order in which they were made.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """Something that holds threads, locks or queues."""

    def reset(self) -> None:
        """Make them anew; called in a fork, where no other thread runs."""
        ...


_known: weakref.WeakKeyDictionary[ForkAware, None] = weakref.WeakKeyDictionary()


def reset_in_forks(thing: ForkAware) -> None:
    """Let something begin anew in every fork, as long as it lives."""
    _known[thing] = None


def _reset_all() -> None:
    for thing in list(_known):
        thing.reset()


if hasattr(os, "register_at_fork"):  # elsewhere there are no forks
    os.register_at_fork(after_in_child=_reset_all)
