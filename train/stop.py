"""How a command is asked to stop, and may be at any moment: at once, or where a step is worth keeping after it.

One object for a process, made before anything heavy is imported. This module imports no torch.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: what a scheduler takes for "run it again"


class Terminated(BaseException):
    """SIGTERM: stop now, resume later. No Exception, so that nobody who catches those swallows it."""


class StopRequest:
    """Set by a signal; the loop looks at it after each step.

    A plain flag and no ``threading.Event``: its lock, taken in a handler, would wait for itself at a second signal.
    """

    def __init__(self) -> None:
        self.signal: int | None = None  # the first that was caught
        self._asked, self._held = False, False

    def __bool__(self) -> bool:
        return self._asked

    def set(self) -> None:
        """Ask the loop to save and stop."""
        self._asked = True

    def catch(self, number: int) -> None:
        """Handle a signal from now on: it raises ``Terminated`` or ``KeyboardInterrupt``; while held, it only sets."""
        signal.signal(number, self._handle)

    def ignore(self, number: int) -> None:
        """The exit code stands. Else Python, when it is torn down, gives the signal its deadly default back."""
        signal.signal(number, signal.SIG_IGN)

    def hold(self) -> None:
        """From now on there is a step to keep: a signal only sets. One that was caught but got lost is set as well."""
        self._held = True
        if self.signal is not None:
            self.set()

    def check(self) -> None:
        """Stop here if a signal was caught and got lost: Python drops what is raised while an object is torn down, and
        an import tears down its lock.

        Raises: Terminated, KeyboardInterrupt.
        """
        if self.signal is not None:
            raise Terminated if self.is_terminated else KeyboardInterrupt

    def release(self) -> None:
        """Signals raise again."""
        self._held = False

    @property
    def is_terminated(self) -> bool:
        """SIGTERM was the first signal caught."""
        return self.signal == signal.SIGTERM

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        first, self.signal = self.signal is None, self.signal or number
        if self._held and (first or number == signal.SIGTERM):
            self.set()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait for the step
        elif first:
            raise Terminated
        else:
            os._exit(EXIT_RESUMABLE)  # while the first one is being carried out; every write is whole or not there
