"""What a process tells the logger "leandit", sent to the process that started it, which tells its own logger."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LOGGER = __name__.partition(".")[0]


class _Sender(logging.handlers.QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue(record)  # pyright: ignore[reportCallIssue, reportOptionalCall]

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Say nothing: the process that would read it is gone, and this one is about to notice."""


@contextmanager
def told_to(send: Callable[[Any], None], level: int) -> Iterator[None]:
    """While the block runs, send every record of at least this level."""
    logger, handler = logging.getLogger(LOGGER), _Sender(send)  # pyright: ignore[reportArgumentType]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def level_told() -> int:
    """The least level that somebody in this process listens to."""
    return logging.getLogger(LOGGER).getEffectiveLevel()


def tell(record: logging.LogRecord, place: str) -> None:
    """Hand on a record of another process.

    Args:
      place: of that process, for ``record.place``.
    """
    record.place = place
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
