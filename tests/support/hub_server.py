"""A stand-in of the Hugging Face hub on this machine: what huggingface_hub asks for, repositories in memory, faults."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

TOKEN = "hf_a_secret_of_nobody"
PLAIN_BYTES = 4096  # larger files, and those that are no text, go to large file storage
PAGE = 20  # entries of a listing


class Stored(NamedTuple):
    """A file of a branch; ``sha256`` is empty for a plain one."""

    content: bytes
    sha256: str

    @property
    def git_sha1(self) -> str:
        """The object id of git."""
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repository:
    """A repository: who sees it, and the files of each commit of each branch."""

    private: bool
    branches: dict[str, list[dict[str, Stored]]] = field(default_factory=lambda: {"main": [{}]})

    def files(self, branch: str = "main") -> dict[str, Stored]:
        """Files of the newest commit."""
        return self.branches[branch][-1]


class Hub(ThreadingHTTPServer):
    """The server.

    ``fault`` is asked at each request, by its number, for "500", "cut" (the connection ends in the answer) or nothing.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads = Counter[str]()  # whole objects received, by SHA-256
        self.requests: list[str] = []
        self.fault: Callable[[int, str], str] = lambda number, request: ""
        self.lock = threading.RLock()

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.server_port}"

    def dataset(self, name: str) -> Repository:
        """A data set."""
        return self.repositories[f"datasets/{name}"]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # the body would wait for the acknowledgement of the headers
    server: Hub
    repository: Repository  # that the request names

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        self._handle()

    do_POST = do_PUT = do_GET  # noqa: N815 - the names of http.server

    def _handle(self) -> None:
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            request = f"{self.command} {path}"
            self.server.requests.append(request)
            fault = self.server.fault(len(self.server.requests), request)
            if fault == "500":
                return self._answer(500, {"error": "made up"})
            if fault == "lost":  # what was asked for is done, and nobody is told
                self.wfile = open("/dev/null", "wb")  # noqa: SIM115 - the answer
            is_written = self.command == "POST"
            if is_written and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._answer(401, {"error": "Invalid credentials"})
            for command, pattern, method in ROUTES:
                if self.command == command and (match := re.fullmatch(pattern, path)):
                    named = {key: unquote(value or "") for key, value in match.groupdict().items()}
                    self.cut = fault == "cut"
                    try:
                        self._find_then(method, body, named)
                    finally:
                        self.close_connection = self.close_connection or fault in ("cut", "lost")
                    return None
            return self._answer(404, {"error": f"no such route: {request}"})

    def _answer(self, status: int, value: Any = None, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if getattr(self, "cut", False) else content)

    def _missing(self, what: str) -> None:
        self._answer(404, {"error": f"{what} not found"}, {"X-Error-Code": f"{what}NotFound"})

    def _find_then(self, method: Callable[..., None], body: bytes, named: dict[str, str]) -> None:
        """Look up the repository and the revision that a route names, and answer the request."""
        if "name" in named and method is not Handler.batch:
            kind, name = named.pop("kind"), named["name"]
            found = self.server.repositories.get(f"datasets/{name}" if kind.startswith("dataset") else name)
            if found is None:
                return self._missing("Repo")
            if method is not Handler.branch and named.get("revision", "main") not in found.branches:
                return self._missing("Revision")
            self.repository = found
        return method(self, body, **named)

    # ------------------------------------------------------------------------------------------------------ requests

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        key = f"datasets/{name}" if asked["type"] == "dataset" else name
        if key in self.server.repositories:
            return self._answer(409, {"error": "You already created this repo", "url": f"{self.server.url}/{key}"})
        self.server.repositories[key] = Repository(asked["visibility"] == "private")
        return self._answer(200, {"url": f"{self.server.url}/{key}"})

    def branch(self, body: bytes, name: str, revision: str) -> None:
        if revision in self.repository.branches:
            return self._answer(409, {"error": "Reference already exists"})
        self.repository.branches[revision] = [self.repository.files()]
        return self._answer(200, {})

    def info(self, body: bytes, name: str, revision: str = "main") -> None:
        about = {"id": name, "sha": "1" * 40, "private": self.repository.private, "tags": [], "siblings": []}
        self._answer(200, about | {"downloads": 0, "likes": 0, "gated": False, "disabled": False})

    def validate(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        errors = [] if content.startswith("---\nlicense: ") else [{"message": "no licence"}]
        self._answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        files, there = [], self.repository.files(revision)
        for asked in json.loads(body)["files"]:
            is_text = b"\0" not in base64.b64decode(asked["sample"])
            mode = "regular" if asked["size"] <= PLAIN_BYTES and is_text else "lfs"
            known = there.get(asked["path"])
            oid = known and (known.sha256 or known.git_sha1)
            files.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._answer(200, {"files": files})

    def batch(self, body: bytes, name: str, kind: str = "") -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            oid, size, upload = asked["oid"], asked["size"], f"{self.server.url}/lfs/{asked['oid']}"
            actions: dict[str, Any] = {}
            if oid not in self.server.objects:
                actions = {"upload": {"href": f"{upload}?X-Amz-Signature=secret", "header": {}}}
                actions = {"actions": actions | {"verify": {"href": f"{self.server.url}/lfs-verify", "header": {}}}}
            objects.append({"oid": oid, "size": size} | actions)
        self._answer(200, {"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._answer(400, {"error": "other bytes"})
        self.server.objects[oid] = body
        self.server.uploads[oid] += 1
        return self._answer(200, b"")

    def verify(self, body: bytes) -> None:
        self._answer(200 if json.loads(body)["oid"] in self.server.objects else 404, {})

    def commit(self, body: bytes, name: str, revision: str) -> None:
        files = dict(self.repository.files(revision))
        for line in body.splitlines():
            one = json.loads(line)
            value = one["value"]
            if one["key"] == "file":
                files[value["path"]] = Stored(base64.b64decode(value["content"]), "")
            elif one["key"] == "lfsFile":
                files[value["path"]] = Stored(self.server.objects[value["oid"]], value["oid"])
        self.repository.branches[revision].append(files)
        address = f"{self.server.url}/{name}/commit/{'2' * 40}"
        self._answer(200, {"commitUrl": address, "commitOid": "2" * 40, "success": True})

    def tree(self, body: bytes, name: str, revision: str, path: str = "") -> None:
        query = parse_qs(urlsplit(self.path).query)
        entries = _entries(self.repository.files(revision), path)
        if not entries and path:
            return self._missing("Entry")
        if query.get("recursive", ["false"])[0].lower() != "true":
            depth = path.count("/") + 1 if path else 0
            entries = [entry for entry in entries if entry["path"].count("/") == depth]
        start = int(query.get("cursor", ["0"])[0])
        headers = {}
        if start + PAGE < len(entries):
            kept = "&".join(f"{key}={values[0]}" for key, values in query.items() if key != "cursor")
            address = f"{self.server.url}{urlsplit(self.path).path}?{kept}&cursor={start + PAGE}"
            headers["Link"] = f'<{address}>; rel="next"'
        return self._answer(200, entries[start : start + PAGE], headers)

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        stored = self.repository.files(revision).get(path)
        if stored is None:
            return self._missing("Entry")
        about = {"ETag": f'"{stored.sha256 or stored.git_sha1}"', "X-Repo-Commit": "1" * 40, "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), min(int(match[2] or 1 << 60), len(stored.content) - 1)
            if start >= len(stored.content):
                return self._answer(416, b"")
            about["Content-Range"] = f"bytes {start}-{end}/{len(stored.content)}"
            return self._answer(206, stored.content[start : end + 1], about)
        return self._answer(200, stored.content, about)


def _entries(files: dict[str, Stored], folder: str) -> list[dict[str, Any]]:
    """What a listing says of the files and folders below a folder."""
    found: dict[str, dict[str, Any]] = {}
    for path, stored in files.items():
        if folder and not path.startswith(f"{folder}/"):
            continue
        for parent in map(str, Path(path).parents):
            if parent != "." and len(parent) > len(folder):
                found[parent] = {"type": "directory", "path": parent, "oid": "3" * 40, "size": 0}
        found[path] = {"type": "file", "path": path, "size": len(stored.content), "oid": stored.git_sha1}
        if stored.sha256:
            found[path]["lfs"] = {"oid": stored.sha256, "size": len(stored.content), "pointerSize": 130}
    return [found[path] for path in sorted(found)]


_API = r"/api/(?P<kind>dataset|model)s/(?P<name>[^/]+/[^/]+)"
_READ = r"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)"
ROUTES = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", rf"{_API}/branch/(?P<revision>[^/]+)", Handler.branch),
    ("POST", rf"{_API}/preupload/(?P<revision>[^/]+)", Handler.preupload),
    ("POST", rf"{_API}/commit/(?P<revision>[^/]+)", Handler.commit),
    ("GET", rf"{_API}/tree/(?P<revision>[^/]+)(/(?P<path>.+))?", Handler.tree),
    ("GET", rf"{_API}/revision/(?P<revision>[^/]+)", Handler.info),
    ("GET", _API, Handler.info),
    ("POST", rf"{_READ}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", Handler.put),
    ("POST", "/lfs-verify", Handler.verify),
    ("GET", rf"{_READ}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
]


def use_hub(url: str, patch: pytest.MonkeyPatch, token: str = TOKEN) -> None:
    """Let huggingface_hub talk to a stand-in, with a token, without xet and without long waits."""
    import fsspec
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    from leandit.tools.export import hub

    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    patch.setattr(_http, "time", SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None}))
    patch.setattr(hub, "FIRST_WAIT_SECONDS", 0.001)
    patch.setenv("HF_TOKEN", token)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    fsspec.get_filesystem_class("hf").clear_instance_cache()


@contextmanager
def hub_server() -> Iterator[Hub]:
    """An empty hub that huggingface_hub finds while the block runs."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        use_hub(server.url, patch)
        yield server
    server.shutdown()
    server.server_close()
