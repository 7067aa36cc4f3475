"""A repository on the Hugging Face hub: what it lists, and commits of several files, with retries.

Endpoint and token are huggingface_hub's: ``HF_ENDPOINT``, ``HF_TOKEN`` or ``hf auth login``. No message holds a token.
"""

from __future__ import annotations

import copy
import logging
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from ...datasets.disk.hashing import xxh3_file
from ...datasets.remote.failures import is_not_allowed, lasts, library_errors, one_line, status_code
from ...errors import DamageError, RecipeError, StoreError

ATTEMPTS = 6  # of a request; huggingface_hub also repeats some of its own
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 1.0, 30.0
URL = re.compile(
    r"hf://(?P<datasets>datasets/)?(?!(?:datasets|spaces|models|buckets|kernels)/)(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/?",
    re.ASCII,
)
BRANCH = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)*", re.ASCII)
QUERY = re.compile(r"\?[^\s'\")]*")  # of a URL: it may be signed

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class OutgoingFile:
    """A file to publish.

    Args:
      path: in the repository.
      content: a file on disk, or the bytes.
      xxh3_128: as its manifest has it; empty if none lists it.
      is_last: it is committed at once with all such files, after the others: it makes them readable, or is the card.
    """

    path: str
    content: Path | bytes
    xxh3_128: str = ""
    is_last: bool = False

    @cached_property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    @cached_property
    def operation(self) -> Any:
        """The ``CommitOperationAdd`` of the file, with its SHA-256.

        Raises: DamageError: the bytes are not those of the manifest.
        """
        from huggingface_hub import CommitOperationAdd

        if self.xxh3_128 and isinstance(self.content, Path) and xxh3_file(self.content) != self.xxh3_128:
            raise DamageError(
                f"file '{self.content}': its bytes are not those of the manifest, so it is not published. Run 'leandit "
                "verify --repair --source PATH', then publish again."
            )
        return CommitOperationAdd(self.path, self.content)

    def read(self) -> bytes:
        """The bytes."""
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()

    def is_same(self, listed: Any) -> bool:
        """Whether the repository lists these bytes: a ``RepoFile``, or None."""
        from huggingface_hub.utils.sha import git_hash

        if listed is None or listed.size != self.size:
            return False
        sha256 = self.operation.upload_info.sha256.hex()
        return sha256 == listed.lfs.sha256 if listed.lfs else git_hash(self.read()) == listed.blob_id


class HubRepository:
    """A repository of data sets or models.

    Args:
      url: ``hf://datasets/OWNER/NAME`` or ``hf://OWNER/NAME``.
      branch: that is read and written.
    Raises: RecipeError: the URL names no repository, or the branch cannot be one. Each method raises StoreError: a
      request is not allowed, is refused, or failed ``ATTEMPTS`` times.
    """

    def __init__(self, url: str, branch: str = "main") -> None:
        match = URL.fullmatch(url)
        if match is None:
            raise RecipeError(
                f"--to '{url}': expected hf://datasets/OWNER/NAME for a store, hf://OWNER/NAME for a run. A branch is "
                "named with --revision."
            )
        if not BRANCH.fullmatch(branch):
            raise RecipeError(
                f"--revision '{branch}': expected the name of a branch: letters, digits, '_', '.', '-', '/'."
            )
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its warnings print URLs that are signed
        self._api: Any = HfApi()
        self.name, self.branch, self.kind = match["name"], branch, "dataset" if match["datasets"] else "model"
        self.title = self.name.partition("/")[2]
        self._in_branch = {"repo_type": self.kind, "revision": branch}
        # How readers name it: the URL, with the branch unless it is main.
        self.address = url.rstrip("/") + ("" if branch == "main" else f"@{quote(branch, safe='')}")

    def is_private(self) -> bool | None:
        """Whether it is private; None if it does not exist, or may not be seen."""
        from huggingface_hub.errors import RepositoryNotFoundError

        info = self._retry(
            "be read", lambda: self._api.repo_info(self.name, repo_type=self.kind), RepositoryNotFoundError
        )
        return info and bool(info.private)

    def create(self, *, private: bool) -> None:
        """Create the repository and its branch where they are missing."""
        make: dict[str, Any] = {"repo_type": self.kind, "exist_ok": True}
        self._retry("be created", lambda: self._api.create_repo(self.name, private=private, **make))
        if self.branch != "main":
            self._retry("get a branch", lambda: self._api.create_branch(self.name, branch=self.branch, **make))

    def listing(self) -> dict[str, Any]:
        """Every file of the branch as a ``RepoFile``, by path; empty if there is no such branch."""
        from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

        def fetch() -> list[Any]:
            return list(self._api.list_repo_tree(self.name, recursive=True, **self._in_branch))

        entries = self._retry("be listed", fetch, RevisionNotFoundError, EntryNotFoundError)
        return {entry.path: entry for entry in entries or () if hasattr(entry, "blob_id")}

    def read_text(self, path: str, num_bytes: int | None = None) -> str:
        """A text of the branch, or its first bytes."""
        from fsspec.core import url_to_fs

        def read() -> str:
            files, place = url_to_fs(f"{self.address}/{path}")
            files.invalidate_cache()
            return files.cat_file(place, end=num_bytes).decode(errors="replace")

        return self._retry("be read", read) or ""

    def commit(self, files: Sequence[OutgoingFile], message: str) -> None:
        """Upload files and commit them at once. What was uploaded before is not uploaded again."""
        self._retry(
            "be written",
            lambda: self._api.create_commit(
                self.name,
                [copy.copy(file.operation) for file in files],  # which a request marks as sent
                commit_message=message,
                **self._in_branch,
            ),
        )

    def _retry(self, what: str, request: Callable[[], Answer], *missing: type[Exception]) -> Answer | None:
        """Make a request; repeat it after errors that may pass.

        Args:
          missing: errors that mean that there is nothing: None is returned.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return request()
            except missing:
                return None
            except (OSError, RuntimeError, ValueError, *library_errors()) as error:
                cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
                reason = QUERY.sub("", one_line(cause))
                if isinstance(cause, DamageError | FileNotFoundError):
                    raise
                problem = ""
                if is_not_allowed(cause) or status_code(cause) == 404:
                    hint = "Log in with 'hf auth login', or set HF_TOKEN to a token that can write there."
                    problem = f"cannot {what} ({reason}). {hint}"
                elif lasts(cause) or isinstance(cause, ValueError):
                    problem = f"cannot {what} ({reason}). Correct that, then publish again."
                elif attempt == ATTEMPTS:
                    hint = "Check the network, then run the same command again: it resumes."
                    problem = f"could not {what} in {attempt} attempts, the last error was: {reason}. {hint}"
                if problem:
                    raise StoreError(f"'{self.address}' {problem}") from error
            time.sleep(min(FIRST_WAIT_SECONDS * 2 ** (attempt - 1), MAX_WAIT_SECONDS) * random.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")
