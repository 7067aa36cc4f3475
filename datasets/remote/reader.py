"""Reading files of a store at a URL, through fsspec, with retries and errors that say what to do.

``failures.py`` tells errors apart: file missing, access denied, and all others, which are retried.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import xxhash

from ...errors import DamageError, RecipeError, StoreError
from ..format.schema import FileEntry
from .failures import is_not_allowed, lasts, library_errors, one_line, status_code

LOG = logging.getLogger(__name__)
ATTEMPTS = 6  # per request; botocore and others retry internally as well
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.5, 20.0
PIECE_BYTES = 16 << 20  # per request: lost if a connection breaks, held in memory by each thread

Answer = TypeVar("Answer")


class _WrongBytes(Exception):
    """The bytes do not match the manifest."""


class RemoteReader:
    """The files of a store at a URL.

    Args:
      url: of the store, with the protocol of any fsspec file system.
      options: for that file system, such as ``endpoint_url``; it also reads its usual environment variables.
      what: "store" or "source", for messages.
    Raises: RecipeError: the protocol is unknown, or its package is not installed.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, what: str = "store") -> None:
        self.what = what
        self.url, self._connect = redact_url(url), lambda: _connect(url, options or {})
        try:
            self._connection, root = self._connect()
        except ImportError as error:
            raise RecipeError(
                f"{what} '{self.url}': {one_line(error)}. To read from a URL, install leandit with its extra "
                "'remote' (s3) or 'publish' (hf), or the package of the file system."
            ) from error
        except (ValueError, OSError, *library_errors()) as error:
            raise RecipeError(f"{what} '{self.url}': {one_line(error)}. Check the URL.") from error
        self.is_http = url.startswith(("http://", "https://"))
        self._root, self._process = str(root).rstrip("/"), os.getpid()
        self._fs.invalidate_cache()  # earlier listings of this process may be outdated

    @property
    def _fs(self) -> Any:
        """The file system; a new one after a fork, because fsspec's threads do not survive it."""
        if os.getpid() != self._process:
            self._connection, self._process = self._connect()[0], os.getpid()
        return self._connection

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of every file below a folder, by its path within the store, from one listing."""
        try:
            found = self._ask(folder, lambda: self._fs.find(f"{self._root}/{folder}", detail=True))
        except FileNotFoundError:
            return {}
        prefix = self._root.strip("/") + "/"
        return {path.strip("/").removeprefix(prefix): info["size"] for path, info in found.items()}

    def info(self, path: str) -> dict[str, Any] | None:
        """fsspec's ``info`` of a file or folder; None if it does not exist."""
        try:
            return self._ask(path, lambda: self._info(self._inside(path)))
        except FileNotFoundError:
            return None

    def _info(self, path: str) -> dict[str, Any]:
        try:
            return self._fs.info(path)
        except FileNotFoundError as error:  # fsspec raises it over HTTP for every failure
            cause = error.__cause__
            if isinstance(cause, (OSError, *library_errors())) and not lasts(cause):
                raise cause from error
            raise

    def entries(self, folder: str) -> dict[str, dict[str, Any]]:
        """fsspec's ``info`` of the entries directly below a folder, by name, without hidden ones."""
        where = self._inside(folder)
        try:
            found = self._ask(folder, lambda: self._fs.ls(where, detail=True))
        except FileNotFoundError:
            return {}
        self._fs.invalidate_cache(where)  # the cache would grow with every listing
        # Some file systems list the folder itself: its marker.
        inside = {
            str(info["name"]).strip("/"): info for info in found if str(info["name"]).strip("/") != where.strip("/")
        }
        named = {path.rpartition("/")[2]: info for path, info in inside.items()}
        return {name: info for name, info in named.items() if name and not name.startswith(".")}

    def read(self, path: str, start: int, end: int) -> bytes:
        """Bytes of a file from ``start`` to ``end``, or to the end of the file.

        Raises: FileNotFoundError; StoreError: access denied, all attempts failed, or the server sends whole files only.
        """
        return self._ask(path, lambda: self._request(self._inside(path), start, end))

    def _inside(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def pieces(self, entry: FileEntry) -> Iterator[bytes]:
        """The bytes of a file in pieces; after the last one, size and hash are checked.

        Args:
          entry: of the manifest; without a hash only the size is checked.
        Raises: StoreError: it cannot be read; DamageError: it is missing. Wrong bytes make ``checked`` retry.
        """
        digest, position = xxhash.xxh3_128(), 0
        while position < entry.bytes:
            end = min(position + PIECE_BYTES, entry.bytes)
            is_last = end == entry.bytes
            piece = self._read(entry.path, position, end + is_last)  # one byte more, to detect a file that grew
            if len(piece) != end - position:
                more = "more than " if len(piece) > end - position else ""
                raise _WrongBytes(f"{more}{position + min(len(piece), end - position)} bytes")
            digest.update(piece)
            position = end
            yield piece
        if entry.xxh3_128 and digest.hexdigest() != entry.xxh3_128:
            raise _WrongBytes(f"hash {digest.hexdigest()}")

    def checked(self, entry: FileEntry, fetch: Callable[[], Answer]) -> Answer:
        """Call a function that reads ``pieces`` of a file; call it once more if the bytes are wrong.

        Raises: DamageError: they are wrong again.
        """
        try:
            return fetch()
        except _WrongBytes as error:
            LOG.warning(
                "store '%s': file '%s' arrived with %s, unlike the manifest; retrying", self.url, entry.path, error
            )
            self._fs.invalidate_cache()
        try:
            return fetch()
        except _WrongBytes as error:
            raise DamageError(
                f"store '{self.url}': file '{entry.path}' has {error}, the manifest says {entry.bytes} bytes"
                f"{f' with hash {entry.xxh3_128}' if entry.xxh3_128 else ''}. It was damaged or changed: copy it there "
                "again from a store that passes 'leandit verify', or open the store again."
            ) from error

    def _read(self, path: str, start: int, end: int) -> bytes:
        try:
            return self.read(path, start, end)
        except FileNotFoundError as error:
            raise DamageError(
                f"store '{self.url}': file '{path}' is missing. Copy it there again from a store that passes "
                "'leandit verify'."
            ) from error

    def _request(self, path: str, start: int, end: int) -> bytes:
        async def check(answer: Any) -> None:  # before the body, which may be a file of many GiB
            if answer.status == 200 and (answer.content_length or 0) > end - start:
                answer.close()
                raise self._no_ranges()

        try:
            data = self._fs.cat_file(
                path, start=start, end=end, **({"raise_for_status": check} if self.is_http else {})
            )
        except (OSError, *library_errors()) as error:
            is_range = status_code(error) == 416 or (isinstance(error, OSError) and error.errno == errno.EINVAL)
            if is_range and self._fs.info(path)["size"] <= start:  # s3 refuses ranges that start at the end or later
                return b""
            raise
        if len(data) > end - start:
            raise self._no_ranges()
        return data

    def _no_ranges(self) -> StoreError:
        return StoreError(
            f"{self.what} '{self.url}': the server ignores Range requests and sends whole files. Use a "
            "server that supports them, such as nginx or S3, or copy the files to this machine."
        )

    def _ask(self, path: str, request: Callable[[], Answer]) -> Answer:
        """Make a request; retry with exponential backoff after errors that may be transient.

        Raises: FileNotFoundError; StoreError: access denied, or all attempts failed.
        """
        where = f"{self.what} '{self.url}': file '{path}'" if path else f"{self.what} '{self.url}'"
        for attempt in range(ATTEMPTS):
            try:
                return request()
            except FileNotFoundError:
                raise
            except (OSError, *library_errors()) as error:
                why = one_line(error)
                if is_not_allowed(error):
                    raise StoreError(
                        f"{where} cannot be accessed ({one_line(error)}). Provide credentials with access, as expected "
                        "by the file system: for s3 the AWS_* variables or ~/.aws, for hf HF_TOKEN."
                    ) from error
                if lasts(error):
                    raise StoreError(f"{where} cannot be read ({one_line(error)}). Check the URL.") from error
                if attempt == ATTEMPTS - 1:
                    raise StoreError(
                        f"{where} could not be read in {ATTEMPTS} attempts, the last error was: {one_line(error)}. "
                        "Check the network and the service, then run the same command again."
                    ) from error
            # Jitter, so that readers that failed together do not retry together.
            pause = min(FIRST_WAIT_SECONDS * 2**attempt, MAX_WAIT_SECONDS) * random.uniform(0.5, 1.0)
            LOG.warning(
                "%s: attempt %d of %d failed (%s), retrying in %.1f s", where, attempt + 1, ATTEMPTS, why, pause
            )
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


def _connect(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    import fsspec  # not a base dependency

    return fsspec.core.url_to_fs(url, **options)


def redact_url(url: str) -> str:
    """A URL without user, password and query, for messages and files."""
    return re.sub(r"://[^/@]*@", "://", url).partition("?")[0].rstrip("/")
