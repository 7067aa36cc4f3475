"""``--verbose``: what modules tell the logger "leandit" about their decisions, as lines on stderr."""

from __future__ import annotations

import logging
import os
import sys
import time

from .text import printable

LOGGER = __name__.partition(".")[0]


class DecisionLines(logging.Handler):
    """Prints each record with the seconds since this was made, its module, and who says it where several may."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._start = time.time()
        several = os.environ.get("WORLD_SIZE", "1") != "1"
        self._rank = f" rank {os.environ.get('RANK', '0')}" if several else ""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record; ``sys.stderr`` is looked up each time, because a live progress bar replaces it."""
        module = record.name.removeprefix(f"{LOGGER}.")
        who = f"{self._rank} {getattr(record, 'place', '')}".rstrip()
        seconds = max(0.0, record.created - self._start)
        line = f"leandit: [{seconds:.1f} s{who} {module}] {printable(record.getMessage())}"
        print(line, file=sys.stderr, flush=True)


def show_decisions(wanted: bool) -> None:
    """Print what is told to the logger "leandit" from here on, or no longer."""
    logger = logging.getLogger(LOGGER)
    for handler in [one for one in logger.handlers if isinstance(one, DecisionLines)]:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    if wanted:
        logger.addHandler(DecisionLines())
        logger.setLevel(logging.INFO)
