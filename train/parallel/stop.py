"""How a command ends early: by a signal, or by an error that several ranks have in common. Imports no torch.

A process has one ``StopRequest``, made before heavy imports.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import time
from pathlib import Path
from types import FrameType

from ...datasets.disk.files import write_atomic

IMPORT_FILE = "<frozen importlib._bootstrap>"
EXIT_CTRL_C = 130  # a shell's exit code after Ctrl-C
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: schedulers run the command again
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # of a rank; set by torchrun and accelerate


class Terminated(BaseException):
    """SIGTERM: stop now, resume later. Not an Exception, so that ``except Exception`` does not catch it."""


class StopRequest:
    """Set by a signal; the loop checks it after each step.

    A plain flag, because a ``threading.Event`` would deadlock if a second signal arrives in its handler.
    """

    def __init__(self) -> None:
        self.signal: int | None = None  # the first one caught
        self._is_set = self._is_held = False

    def __bool__(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Ask the loop to save and stop."""
        self._is_set = True

    def catch(self, number: int) -> None:
        """Handle a signal from now on: raise ``Terminated`` or ``KeyboardInterrupt``; while held, only set the flag."""
        signal.signal(number, self._handle)

    def hold(self) -> None:
        """From now on a signal only sets the flag, since there is a step to save; so does an earlier one."""
        self._is_held = True
        if self.signal is not None:
            self.set()

    def release(self) -> None:
        """Let signals raise again."""
        self._is_held = False

    def check(self) -> None:
        """Raise after a signal whose exception got lost: Python drops those raised in a finalizer."""
        if self.signal is not None:
            raise Terminated if self.is_terminated else KeyboardInterrupt

    @property
    def is_terminated(self) -> bool:
        """SIGTERM was the first signal caught."""
        return self.signal == signal.SIGTERM

    @property
    def exit_code(self) -> int:
        """The exit code of a command that stopped: 130 after Ctrl-C on this rank, otherwise 75."""
        return EXIT_CTRL_C if self.signal == signal.SIGINT else EXIT_RESUMABLE

    @property
    def message(self) -> str:
        """The last line of a command that a signal has ended."""
        what = "interrupted" if self.signal == signal.SIGINT else "terminated"
        return f"leandit: {what}; run the same command again to resume"

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first, self.signal = self.signal is None, self.signal or number
        if self._is_held and (is_first or number == signal.SIGTERM):
            self.set()
        elif _is_import(frame):  # an exception would leave a C extension half-initialized; all writes are atomic
            os.write(2, f"{self.message}\n".encode())
            os._exit(self.exit_code)
        elif number == signal.SIGINT:  # a second Ctrl-C does not wait for the step
            raise KeyboardInterrupt
        elif is_first:
            raise Terminated
        else:
            os._exit(EXIT_RESUMABLE)  # a second SIGTERM does not wait


def _is_import(frame: FrameType | None) -> bool:
    """Whether the frame is part of an import."""
    while frame is not None and frame.f_code.co_filename != IMPORT_FILE:
        frame = frame.f_back
    return frame is not None


def message_of_rank(message: str) -> str | None:
    """An error with the rank that has it, if torchrun has started several.

    Returns: None if another rank of this machine prints the same error: the first one leaves a file in torchrun's
      temporary folder.
    """
    if not (error_file := os.environ.get(ERROR_FILE)):
        return message
    try:
        (Path(error_file).parents[1] / f"printed-{hashlib.sha256(message.encode()).hexdigest()}").touch(exist_ok=False)
    except FileExistsError:
        return None
    except OSError:  # twice is better than never
        pass
    return f"rank {os.environ.get('RANK', '?')} ({socket.gethostname()}, process {os.getpid()}): {message}"


def record_error(message: str) -> None:
    """Leave an error for the summary that torchrun prints; its ``record`` would add a hundred lines of traceback."""
    if error_file := os.environ.get(ERROR_FILE):
        content = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        write_atomic(Path(error_file), json.dumps({"message": content}).encode())
