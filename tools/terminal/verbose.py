"""``--verbose``: the decisions that modules log to the logger "leandit", as lines on stderr."""

from __future__ import annotations

import logging
import os
import sys
import time

from .text import printable

LOGGER = __name__.partition(".")[0]


class DecisionLines(logging.Handler):
    """Prints each record with the seconds since the command began, its module, and the process where there are several.

    rich's RichHandler would wrap lines and drop the module, so these lines could not be searched.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._start = time.time()
        self._rank = f" rank {os.environ.get('RANK', '0')}" if os.environ.get("WORLD_SIZE", "1") != "1" else ""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record; ``sys.stderr`` is looked up each time, because a live progress bar replaces it."""
        who = f"{self._rank} {getattr(record, 'place', '')}".rstrip()
        where = f"{max(0.0, record.created - self._start):.1f} s{who} {record.name.removeprefix(f'{LOGGER}.')}"
        print(f"leandit: [{where}] {printable(record.getMessage())}", file=sys.stderr, flush=True)


def show_decisions(wanted: bool) -> None:
    """Print what is logged to "leandit" from here on, or no longer."""
    logger = logging.getLogger(LOGGER)
    logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, DecisionLines)]
    logger.handlers += [DecisionLines()] if wanted else []
    logger.setLevel(logging.INFO if wanted else logging.NOTSET)
