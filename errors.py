"""The exception tree. Every message says where, what was got, what was expected, what to do.

    LeanditError                    exit code 1
    ├── RecipeError (ValueError)              2   a recipe or an option is wrong
    ├── SourceError                           3   the images or captions cannot be read as asked
    ├── EncoderError                          3   a VAE, text encoder or tokenizer is not usable
    ├── StoreError                            3   a store cannot be used as asked
    │   ├── StoreNotFound (FileNotFoundError)
    │   ├── UnknownKey (KeyError)
    │   ├── RowOutOfRange (IndexError)
    │   ├── StoreIncomplete
    │   ├── InvalidRecord (ValueError)
    │   ├── FormatVersionError
    │   └── FingerprintMismatch
    ├── RunError                              3   a run or checkpoint does not fit
    ├── DamageError                           4   bytes on disk are not the bytes that were written
    └── ResourceError                         5   disk or memory ran out

``StoreWarning`` is shown and never raised. ``RecordRejected`` is not part of the tree: it is caught for each record,
and becomes a line of the ledger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class LeanditError(Exception):
    """Base of all errors that a user can fix; the command line prints it as one line."""

    exit_code = 1


class RecipeError(LeanditError, ValueError):
    """A recipe, an override or an option is wrong."""

    exit_code = 2


class SourceError(LeanditError):
    """The source of images and captions cannot be read as asked."""

    exit_code = 3


class EncoderError(LeanditError):
    """A VAE, text encoder or tokenizer is missing or not usable."""

    exit_code = 3


class StoreError(LeanditError):
    """A store cannot be used as asked."""

    exit_code = 3


class StoreNotFound(StoreError, FileNotFoundError):
    """The path has no store."""


class UnknownKey(StoreError, KeyError):
    """A store has no record with this key, or no bucket with this name."""

    __str__ = Exception.__str__  # KeyError would quote the message


class RowOutOfRange(StoreError, IndexError):
    """A row of an array, or a record or caption of a store, does not exist."""


class StoreIncomplete(StoreError):
    """Some planned shards are not committed yet."""


class InvalidRecord(StoreError, ValueError):
    """A record that was to be added to a store is not what the store was declared to hold.

    Args:
      key: of the record.
      reason: one of the closed list in ``table_schemas.REJECT_REASONS``.
      detail: what was got, and what was expected.
    """

    def __init__(self, key: str, reason: str, detail: str) -> None:
        super().__init__(f"record {key[:200]!r}: {detail}")
        self.key = key
        self.reason = reason
        self.detail = detail


class FormatVersionError(StoreError):
    """This release does not read the store's format version."""


class FingerprintMismatch(StoreError):
    """The store was encoded with other encoders or settings."""


class RunError(LeanditError):
    """A run directory, checkpoint or snapshot does not fit the recipe, the store or the model."""

    exit_code = 3


class DamageError(LeanditError):
    """Bytes on disk are not the bytes that were written."""

    exit_code = 4


class ResourceError(LeanditError):
    """Disk or memory ran out."""

    exit_code = 5


class StoreWarning(RuntimeWarning):
    """A store can be read, but not all is as it should be; the command line prints it as one line."""


class RecordRejected(Exception):
    """One record is rejected.

    Args:
      stage: "scan", "decode" or "encode".
      reason: one of the closed list in ``table_schemas.REJECT_REASONS``.
      detail: the observation, for people.
    """

    def __init__(self, stage: str, reason: str, detail: str) -> None:
        super().__init__(f"{stage}: {reason}: {detail}")
        self.stage, self.reason, self.detail = stage, reason, detail

    def without_traceback(self) -> RecordRejected:
        """The same reject, to be kept: the frames of its traceback would keep all bytes that were read in them."""
        return RecordRejected(self.stage, self.reason, self.detail)


@contextlib.contextmanager
def needs_extra(extra: str, key: str, instead: str) -> Iterator[None]:
    """Import packages of an extra within the block.

    Args:
      key: of the recipe, which asks for them.
      instead: what the user can do without them.
    Raises: RecipeError: one of them is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{key}: it needs the package '{error.name}', which is not installed. Install leandit with its extra "
            f"'{extra}', or {instead}."
        ) from error
