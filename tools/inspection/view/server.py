"""Serve a site on this machine alone, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....datasets.disk.files import write_atomic
from ....datasets.errors import ResourceError
from .guard import Guard

if TYPE_CHECKING:
    from starlette.applications import Starlette

NEEDED = ("jinja2", "PIL", "starlette", "uvicorn")
ADDRESS = "127.0.0.1"  # no other machine reaches it
TOKEN_BYTES = 32
SECONDS_TO_END = 1  # for requests that are being answered


def check_installed() -> None:
    """Raises: ResourceError: a library of the extra is missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ResourceError(
            f"leandit view: {', '.join(missing)} is not installed. Install it with: pip install 'leandit[view]'"
        )


def serve(app: Starlette, *, port: int, open_browser: bool, say: Callable[[str], None]) -> None:
    """Serve an application until Ctrl-C or SIGTERM.

    Args:
      port: of 127.0.0.1; 0: a free one.
      open_browser: show the page in the user's browser, where there is a display.
      say: called with the address of the page once it can be opened.
    Raises: ResourceError: the port is taken.
    """
    import uvicorn

    token = secrets.token_urlsafe(TOKEN_BYTES)
    listener = _listen(port)
    address = f"http://{ADDRESS}:{listener.getsockname()[1]}/{token}/"
    config = uvicorn.Config(
        Guard(app, token),
        log_level="error",  # warnings are of requests that are not valid
        access_log=False,  # it would hold the token
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=SECONDS_TO_END,
    )
    folder = tempfile.TemporaryDirectory(prefix="leandit-view-")  # of this user alone
    server = uvicorn.Server(config)
    with folder as own, contextlib.closing(listener), _ended_by_signals(server):
        listener.listen()  # from here on a browser waits instead of failing
        say(address)
        if open_browser and _has_display():
            _open(address, Path(own))
        server.run(sockets=[listener])


@contextlib.contextmanager
def _ended_by_signals(server: Any) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end a server, also before it runs: Python drops what is raised in a finalizer."""
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda *_: setattr(server, "should_exit", True)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ADDRESS, port))
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"port {port} of {ADDRESS}: {error.strerror}. Give another one with --port, or 0."
        ) from error
    return listener


def _open(address: str, folder: Path) -> None:
    """Open a page by a file that leads to it: other users can read the arguments of a browser, and so the token."""
    page = folder / "open.html"
    write_atomic(page, f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">'.encode())
    threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()


def _has_display() -> bool:
    """Whether a browser would open a window, and not take the terminal."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
