"""Serve a site on this machine alone, until Ctrl-C or SIGTERM; requests need a token and a name of this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ....datasets.disk.faults import advice_for, is_fault
from ....datasets.disk.files import write_atomic
from ....errors import ResourceError

if TYPE_CHECKING:
    from starlette.applications import Starlette

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Any, Send], Awaitable[None]]

NEEDED = ("duckdb", "jinja2", "PIL", "starlette", "uvicorn")
ADDRESS = "127.0.0.1"  # no other machine reaches it
TOKEN_BYTES = 32
BACKLOG = 64  # connections that wait; out of descriptors, asyncio tries to accept so many in a row
LOGGERS = ("asyncio", "uvicorn.error")  # of errors in requests
SECONDS_TO_END = 1  # for requests that are being answered
HOSTS = ("127.0.0.1", "localhost")  # any port: a tunnel of ssh may have another one
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def check_installed() -> None:
    """Raises: ResourceError: a library of the extra is missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ResourceError(
            f"leandit view: {', '.join(missing)} is not installed. Install it with: pip install 'leandit[view]'"
        )


class FaultsOnce(logging.Filter):
    """Reports the first fault of this machine that requests meet, instead of a traceback for each of them.

    Args:
      warn: called with the message.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__()
        self._warn = warn
        self._has_warned = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not is_fault(error):
            return True
        if not self._has_warned:
            self._has_warned = True
            advice = advice_for(error) if isinstance(error, OSError) else "Free some memory"
            problem = error.strerror if isinstance(error, OSError) else "out of memory"
            self._warn(f"view: {problem}, so some requests are not answered. {advice}.")
        return False


def serve(
    app: Starlette, *, port: int, open_browser: bool, say: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Serve an application until Ctrl-C or SIGTERM.

    Args:
      port: of 127.0.0.1; 0: a free one.
      open_browser: show the page in the user's browser, where there is a display.
      say: called with the address of the page once it can be opened.
      warn: called once if this machine fails, as when no file can be opened any more.
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
        backlog=BACKLOG,
        timeout_graceful_shutdown=SECONDS_TO_END,
    )
    folder = tempfile.TemporaryDirectory(prefix="leandit-view-")  # of this user alone
    server = uvicorn.Server(config)
    with folder as own, contextlib.closing(listener), _ended_by_signals(server), _filtered_errors(FaultsOnce(warn)):
        listener.listen()  # from here on a browser waits instead of failing
        say(address)
        if open_browser and _has_display():
            _open(address, Path(own))
        server.run(sockets=[listener])


@contextlib.contextmanager
def _filtered_errors(errors: logging.Filter) -> Iterator[None]:
    for name in LOGGERS:
        logging.getLogger(name).addFilter(errors)
    try:
        yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(errors)


def end_process() -> None:
    """End the process with code 0 if other threads still run, such as one that decodes an image or imports torch.

    Python would wait for some of them, and stop the others when they come back from C++ code, which then aborts.
    """
    if len(threading.enumerate()) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


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
            f"port {port} of {ADDRESS}: {error.strerror}. Use another one with --port, or 0."
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


class Guard:
    """An ASGI application that lets only requests through which know the token and name this machine.

    The Host header is checked because a name of a foreign site may lead here (DNS rebinding): then the browser takes
    the page for one of that site. The token keeps out other users of the machine and other pages of the browser.

    Args:
      app: receives the requests, with ``/TOKEN`` as its root path.
      token: at least 32 characters that are safe in a URL.
    """

    def __init__(self, app: App, token: str) -> None:
        self._app, self._root = app, f"/{token}"

    async def __call__(self, scope: Message, receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, _with_headers(send))
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Message, receive: Any, send: Send) -> None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        upgrades = [value.lower() for name, value in scope["headers"] if name == b"upgrade"]
        if len(hosts) != 1 or _name_of(hosts[0]) not in HOSTS:
            await _refuse(send, 400, "This page answers to 127.0.0.1 and localhost only.")
        elif b"websocket" in upgrades:
            await _refuse(send, 400, "This page has no WebSocket.")
        elif not self._knows_token(scope["path"]):
            await _refuse(send, 404, "Not found. Open the address that 'leandit view' has printed.")
        else:
            await self._app({**scope, "root_path": self._root}, receive, send)

    def _knows_token(self, path: str) -> bool:
        root, slash = path[: len(self._root)], path[len(self._root) : len(self._root) + 1]
        return secrets.compare_digest(root.encode(), self._root.encode()) and slash == "/"


def _name_of(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "") if "@" not in host else ""
    except ValueError:
        return ""


async def _refuse(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def _with_headers(send: Send) -> Send:
    """Adds HEADERS to every answer; one that an answer has itself, such as how long it may be kept, stays."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = list(message["headers"])
            names = {name.lower() for name, _ in own}
            added = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in names]
            message = {**message, "headers": [*own, *added]}
        await send(message)

    return send_with_headers
