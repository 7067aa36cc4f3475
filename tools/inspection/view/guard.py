"""Who may ask the page what: a token in every path, names of this machine only, and headers that forbid the rest."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Any, Send], Awaitable[None]]

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
