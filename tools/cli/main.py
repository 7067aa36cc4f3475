"""The ``leandit`` command. It handles signals before it imports anything large, so that they never show a traceback."""

from __future__ import annotations

import signal
import sys

from ...train.parallel.stop import StopRequest, Terminated


def main() -> None:
    """Run the command and exit with its code: 75 after SIGTERM, 130 after Ctrl-C."""
    stop = StopRequest()
    try:
        stop.catch(signal.SIGTERM)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in the background of a script
            stop.catch(signal.SIGINT)
        from .commands import run_command

        code = run_command(stop)
        _ignore_signals()
    except (Terminated, KeyboardInterrupt) as error:
        _ignore_signals()
        stop.signal = stop.signal or (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
        code = stop.exit_code
        print(stop.message, file=sys.stderr, flush=True)
    sys.exit(code)


def _ignore_signals() -> None:
    """Keep the exit code, which is known now: Python restores default handlers at shutdown."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
