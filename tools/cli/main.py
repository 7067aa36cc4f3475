"""The ``leandit`` command. It handles signals before it imports anything large, so that they never show a traceback."""

from __future__ import annotations

import signal
import sys

from ...train.parallel.stop import EXIT_CTRL_C, EXIT_RESUMABLE, StopRequest, Terminated


def main() -> None:
    """Run the command and exit with its code: 75 after SIGTERM, 130 after Ctrl-C."""
    stop = StopRequest()
    try:
        stop.catch(signal.SIGTERM)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in the background of a script
            stop.catch(signal.SIGINT)
        from .commands import run_command

        code = run_command(stop)
        stop.check_deferred()
        _ignore_signals(stop)
    except (Terminated, KeyboardInterrupt) as error:
        _ignore_signals(stop)
        what, code = ("terminated", EXIT_RESUMABLE) if isinstance(error, Terminated) else ("interrupted", EXIT_CTRL_C)
        print(f"leandit: {what}; run the same command again to resume", file=sys.stderr, flush=True)
    sys.exit(code)


def _ignore_signals(stop: StopRequest) -> None:
    """Keep the exit code, which is known now, from a later signal."""
    for number in (signal.SIGTERM, signal.SIGINT):
        stop.ignore(number)


if __name__ == "__main__":
    main()
