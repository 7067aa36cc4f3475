"""How a command is asked to stop, and may be at any moment: at once, or where a step is worth keeping after it.

One object for a process, made before anything heavy is imported. This module imports no torch.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

RETRY_SECONDS = 0.02
IMPORT_FILE = "<frozen importlib._bootstrap>"
EXIT_CTRL_C = 130  # what a shell says of a command that Ctrl-C has ended
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
        self._deferred: type[BaseException] | None = None  # what is raised after the import that goes on
        self._has_alarm = False

    def __bool__(self) -> bool:
        return self._asked

    def set(self) -> None:
        """Ask the loop to save and stop."""
        self._asked = True

    def catch(self, number: int) -> None:
        """Handle a signal from now on: it raises ``Terminated`` or ``KeyboardInterrupt``; while held, it only sets."""
        signal.signal(number, self._handle)

    def ignore(self, number: int) -> None:
        """The exit code stands. Else Python, when it is torn down, gives signals their deadly defaults back, and one
        that comes then, or an alarm that is still to come, ends the process by that signal."""
        signal.signal(number, signal.SIG_IGN)
        if self._has_alarm:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def hold(self) -> None:
        """From now on there is a step to keep: a signal only sets. One that was caught but got lost is set as well."""
        self._held, self._deferred = True, None
        if self.signal is not None:
            self.set()

    def check(self) -> None:
        """Stop here if a signal was caught and got lost: Python drops what is raised while an object is torn down, and
        an import tears down its lock.

        Raises: Terminated, KeyboardInterrupt.
        """
        if self.signal is not None:
            self._deferred = None
            raise Terminated if self.is_terminated else KeyboardInterrupt

    def release(self) -> None:
        """Signals raise again."""
        self._held = False

    @property
    def is_terminated(self) -> bool:
        """SIGTERM was the first signal caught."""
        return self.signal == signal.SIGTERM

    @property
    def exit_code(self) -> int:
        """Of a command that has saved and stopped: 130 after Ctrl-C here, else 75, as after SIGTERM here or at another
        rank."""
        return EXIT_CTRL_C if self.signal == signal.SIGINT else EXIT_RESUMABLE

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self.signal = self.signal is None, self.signal or number
        if self._held and (first or number == signal.SIGTERM):
            self.set()
        elif number == signal.SIGINT:  # a second Ctrl-C does not wait for the step
            self._raise(KeyboardInterrupt, frame)
        elif first:
            self._raise(Terminated, frame)
        else:
            os._exit(EXIT_RESUMABLE)  # while the first one is being carried out; every write is whole or not there

    def _raise(self, kind: type[BaseException], frame: FrameType | None) -> None:
        """Raise now; amid an import a moment later, because a module in C that is left half-made ends the process."""
        self._deferred = kind if _is_import(frame) else None
        if self._deferred is None:
            raise kind
        self._has_alarm = True
        signal.signal(signal.SIGALRM, self._again)
        signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)

    def _again(self, _number: int, frame: FrameType | None) -> None:
        if self._deferred is not None:  # else the program has met it by itself meanwhile
            self._raise(self._deferred, frame)


def _is_import(frame: FrameType | None) -> bool:
    """The frame belongs to an import, or is called by one."""
    while frame is not None and frame.f_code.co_filename != IMPORT_FILE:
        frame = frame.f_back
    return frame is not None
