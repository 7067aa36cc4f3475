"""A repository on the Hugging Face hub: what it lists, and commits of several files, with retries.

Endpoint and token are huggingface_hub's: ``HF_ENDPOINT``, ``HF_TOKEN`` or ``hf auth login``. No message holds a token.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import xxhash

from ...datasets.disk.hashing import BLOCK_BYTES
from ...datasets.errors import DamageError, RecipeError, StoreError
from ...datasets.remote.failures import is_not_allowed, lasts, library_errors, one_line, status_code

ATTEMPTS = 6  # of a request; huggingface_hub also repeats some of its own
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 1.0, 30.0
THREADS = 5  # uploads at a time
GIT_BYTES = 1 << 26  # larger files are never plain files of a git repository
URL = re.compile(
    r"hf://(?P<datasets>datasets/)?(?!(?:datasets|spaces|models|buckets|kernels)/)(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/?",
    re.ASCII,
)
BRANCH = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)*", re.ASCII)
QUERY = re.compile(r"\?[^\s'\")]*")  # of a URL: it may be signed

Answer = TypeVar("Answer")


class Digests(NamedTuple):
    """Hashes of a file: of a manifest, of large files on the hub, and of small ones there (empty if it is large)."""

    xxh3_128: str
    sha256: str
    git_sha1: str


@dataclass(frozen=True)
class OutgoingFile:
    """A file to publish.

    Args:
      path: in the repository.
      content: a file on disk, or the bytes.
      xxh3_128: as its manifest has it; empty if none lists it.
    """

    path: str
    content: Path | bytes
    xxh3_128: str = ""

    @cached_property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    @cached_property
    def digests(self) -> Digests:
        """All hashes, from one reading.

        Raises: DamageError: the bytes are not those of the manifest.
        """
        xxh3, sha256, git = xxhash.xxh3_128(), hashlib.sha256(), hashlib.sha1(b"blob %d\0" % self.size)
        hashes = [xxh3, sha256] + ([git] if self.size <= GIT_BYTES else [])
        if isinstance(self.content, bytes):
            for each in hashes:
                each.update(self.content)
        else:
            with open(self.content, "rb") as file:
                while block := file.read(BLOCK_BYTES):
                    for each in hashes:
                        each.update(block)
        if self.xxh3_128 and xxh3.hexdigest() != self.xxh3_128:
            raise DamageError(
                f"file '{self.content}': its bytes are not those of the manifest, so it is not published. Run 'leandit "
                "verify --repair --source PATH', then publish again."
            )
        return Digests(xxh3.hexdigest(), sha256.hexdigest(), git.hexdigest() if len(hashes) == 3 else "")

    def is_same(self, listed: ListedFile | None) -> bool:
        """Whether the repository lists these bytes."""
        if listed is None or listed.size != self.size:
            return False
        return listed.sha256 == self.digests.sha256 if listed.sha256 else listed.git_sha1 == self.digests.git_sha1


class ListedFile(NamedTuple):
    """A file as the hub lists it; ``sha256`` is empty for a plain file of the git repository."""

    size: int
    sha256: str
    git_sha1: str


class HubRepository:
    """A repository of data sets or models.

    Args:
      url: ``hf://datasets/OWNER/NAME`` or ``hf://OWNER/NAME``.
      branch: that is read and written.
    Raises: RecipeError: the URL names no repository, or the branch cannot be one.
    """

    def __init__(self, url: str, branch: str = "main") -> None:
        match = URL.fullmatch(url)
        if match is None:
            raise RecipeError(
                f"--to '{url}': needed hf://datasets/OWNER/NAME for a store, hf://OWNER/NAME for a run. A branch is "
                "named with --revision."
            )
        if not BRANCH.fullmatch(branch):
            raise RecipeError(
                f"--revision '{branch}': needed the name of a branch: letters, digits, '_', '.', '-', '/'."
            )
        self.url, self.name, self.branch = url.rstrip("/"), match["name"], branch
        self.kind = "dataset" if match["datasets"] else "model"
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its warnings print URLs that are signed
        self._api: Any = HfApi()

    @cached_property
    def address(self) -> str:
        """How readers name it: the URL, with the branch unless it is main."""
        return self.url if self.branch == "main" else f"{self.url}@{quote(self.branch, safe='')}"

    def is_private(self) -> bool | None:
        """Whether it is private; None if it does not exist, or may not be seen."""
        from huggingface_hub.errors import RepositoryNotFoundError

        def look() -> bool | None:
            try:
                return bool(self._api.repo_info(self.name, repo_type=self.kind).private)
            except RepositoryNotFoundError:
                return None

        return self._ask("be looked at", look)

    def create(self, *, private: bool) -> None:
        """Create the repository and its branch where they are missing."""
        make: dict[str, Any] = {"repo_type": self.kind, "exist_ok": True}
        self._ask("be created", lambda: self._api.create_repo(self.name, private=private, **make))
        if self.branch != "main":
            self._ask("get a branch", lambda: self._api.create_branch(self.name, branch=self.branch, **make))

    def listing(self) -> dict[str, ListedFile]:
        """Every file of the branch, by path; empty if there is no such branch."""
        from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

        def ask() -> dict[str, ListedFile]:
            how = {"repo_type": self.kind, "revision": self.branch, "recursive": True}
            try:
                entries = list(self._api.list_repo_tree(self.name, **how))
            except (RevisionNotFoundError, EntryNotFoundError):
                return {}
            files = [entry for entry in entries if hasattr(entry, "blob_id")]
            return {one.path: ListedFile(one.size, one.lfs.sha256 if one.lfs else "", one.blob_id) for one in files}

        return self._ask("be listed", ask)

    def read_text(self, path: str, num_bytes: int | None = None) -> str:
        """A text of the branch, or its first bytes."""
        from fsspec.core import url_to_fs

        def read() -> str:
            files, place = url_to_fs(f"{self.address}/{path}")
            files.invalidate_cache()
            return files.cat_file(place, end=num_bytes).decode(errors="replace")

        return self._ask("be read", read)

    def commit(self, files: Sequence[OutgoingFile], message: str) -> None:
        """Upload files and commit them at once. What was uploaded before is not uploaded again."""

        def send() -> None:
            from huggingface_hub import CommitOperationAdd

            operations = []
            for file in files:
                content = file.content if isinstance(file.content, bytes) else str(file.content)
                operation = CommitOperationAdd(file.path, content)
                operation.upload_info.sha256 = bytes.fromhex(file.digests.sha256)
                operations.append(operation)
            how = {"repo_type": self.kind, "revision": self.branch, "num_threads": THREADS}
            self._api.create_commit(self.name, operations, commit_message=message, **how)

        self._ask("be written", send)

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        """Make a request; repeat it after errors that may pass.

        Raises: StoreError: it is not allowed, refused, or all attempts failed.
        """
        for attempt in range(ATTEMPTS):
            try:
                return request()
            except (OSError, RuntimeError, ValueError, *library_errors()) as error:
                cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
                said = QUERY.sub("", one_line(cause))
                if isinstance(cause, DamageError | FileNotFoundError):
                    raise
                if is_not_allowed(cause) or status_code(cause) == 404:
                    raise StoreError(
                        f"'{self.address}' may not {what} ({said}). Log in with 'hf auth login', or set HF_TOKEN to a "
                        "token that may write there."
                    ) from error
                if lasts(cause) or isinstance(cause, ValueError):
                    raise StoreError(
                        f"'{self.address}' cannot {what} ({said}). Correct that, then publish again."
                    ) from error
                if attempt == ATTEMPTS - 1:
                    raise StoreError(
                        f"'{self.address}' could not {what} in {ATTEMPTS} attempts, the last gave: {said}. Check the "
                        "network, then run the same command again: it resumes."
                    ) from error
            time.sleep(min(FIRST_WAIT_SECONDS * 2**attempt, MAX_WAIT_SECONDS) * random.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")
