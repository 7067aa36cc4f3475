"""Errors of the libraries behind a URL: access denied, lasting, or passing.

They have no common base exception, so their errors are looked up by name among the loaded modules.
"""

from __future__ import annotations

import errno
import sys

_ERRORS = {
    "aiohttp": ("ClientError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "http.client": ("HTTPException",),
    "httpx": ("HTTPError",),
    "httpx2": ("HTTPError",),
    "requests": ("RequestException",),
    "urllib3.exceptions": ("HTTPError",),
}
_NOT_ALLOWED = {
    "CredentialRetrievalError",
    "GatedRepoError",
    "GoogleAuthError",
    "NoAuthTokenError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "PermissionError",
    "ProfileNotFound",
    "RefreshError",
    "DefaultCredentialsError",
}
# Errors that a retry does not fix.
_LASTING_NUMBERS = {errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG}
_LASTING_NUMBERS |= {getattr(errno, "EREMCHG", errno.EINVAL)}  # s3fs: the bucket is in another region
_PASSING_STATUS = {408, 409, 425, 429}


def library_errors() -> tuple[type[BaseException], ...]:
    """Base exceptions of the loaded libraries; not all of them are OSErrors."""
    found = [getattr(sys.modules.get(name), kind, None) for name, kinds in _ERRORS.items() for kind in kinds]
    return tuple(kind for kind in found if kind is not None)


def is_not_allowed(error: BaseException) -> bool:
    """Whether access is denied."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _NOT_ALLOWED) or status_code(error) in (401, 403)


def lasts(error: BaseException) -> bool:
    """Whether a retry does not fix it."""
    code = status_code(error)
    if code is not None:
        return 400 <= code < 500 and code not in _PASSING_STATUS
    return isinstance(error, OSError) and error.errno in _LASTING_NUMBERS


def status_code(error: BaseException) -> int | None:
    """HTTP status of an error; each library stores it elsewhere."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", getattr(error, "status", getattr(error, "code", None)))
    return found if isinstance(found, int) else None


def one_line(error: BaseException) -> str:
    """The message of an error, printable, without its full stop."""
    text = " ".join(f"{error}".split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text)[:300].rstrip(".")
