"""Stop a command by a signal: at once, or after the current step if it is worth keeping.

A process has one ``StopRequest``, made before heavy imports. This module imports no torch.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

RETRY_SECONDS = 0.02
IMPORT_FILE = "<frozen importlib._bootstrap>"
EXIT_CTRL_C = 130  # a shell's exit code after Ctrl-C
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: schedulers run the command again


class Terminated(BaseException):
    """SIGTERM: stop now, resume later. Not an Exception, so that ``except Exception`` does not catch it."""


class StopRequest:
    """Set by a signal; the loop checks it after each step.

    A plain flag, because a ``threading.Event`` would deadlock if a second signal arrives in its handler.
    """

    def __init__(self) -> None:
        self.signal: int | None = None  # the first one caught
        self._asked, self._held = False, False
        self._deferred: type[BaseException] | None = None  # raised after the current import
        self._has_alarm = False

    def __bool__(self) -> bool:
        return self._asked

    def set(self) -> None:
        """Ask the loop to save and stop."""
        self._asked = True

    def catch(self, number: int) -> None:
        """Handle a signal from now on: raise ``Terminated`` or ``KeyboardInterrupt``; while held, only set the flag."""
        signal.signal(number, self._handle)

    def ignore(self, number: int) -> None:
        """Ignore a signal once the exit code is known: Python restores default handlers at shutdown, so a late signal
        or a pending alarm would replace the exit code."""
        signal.signal(number, signal.SIG_IGN)
        if self._has_alarm:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def hold(self) -> None:
        """From now on a signal only sets the flag, as there is a step to keep; so does an earlier one that got lost."""
        self._held, self._deferred = True, None
        if self.signal is not None:
            self.set()

    def check(self) -> None:
        """Raise Terminated or KeyboardInterrupt if a signal got lost.

        Python drops exceptions raised in a finalizer, such as that of an import lock.
        """
        if self.signal is not None:
            self._deferred = None
            raise Terminated if self.is_terminated else KeyboardInterrupt

    def check_deferred(self) -> None:
        """Raise what a signal during an import is still to raise, as the command has ended meanwhile."""
        if self._deferred is not None:
            self.check()

    def release(self) -> None:
        """Let signals raise again."""
        self._held = False

    @property
    def is_terminated(self) -> bool:
        """SIGTERM was the first signal caught."""
        return self.signal == signal.SIGTERM

    @property
    def exit_code(self) -> int:
        """Of a command that saved and stopped: 130 after Ctrl-C on this rank, otherwise 75."""
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
            os._exit(EXIT_RESUMABLE)  # a second SIGTERM does not wait; all writes are atomic

    def _raise(self, kind: type[BaseException], frame: FrameType | None) -> None:
        """Raise now, or after the current import: a half-initialised C extension would crash the process."""
        self._deferred = kind if _is_import(frame) else None
        if self._deferred is None:
            raise kind
        self._has_alarm = True
        signal.signal(signal.SIGALRM, self._again)
        signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)

    def _again(self, _number: int, frame: FrameType | None) -> None:
        if self._deferred is not None:  # otherwise ``check`` or ``hold`` has handled it
            self._raise(self._deferred, frame)


def _is_import(frame: FrameType | None) -> bool:
    """Whether the frame is part of an import."""
    while frame is not None and frame.f_code.co_filename != IMPORT_FILE:
        frame = frame.f_back
    return frame is not None
