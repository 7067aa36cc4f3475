"""The revisions of a store and their specs; refuses folders that are not stores."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from ..disk.hashing import read_json
from ..errors import DamageError, FormatVersionError, StoreError, StoreIncomplete, StoreNotFound
from ..format.layout import COMMITS, GROUP, MANIFEST, revision_prefix, revisions_with
from ..format.schema import FORMAT_VERSION, StoreSpec
from .plan import planned_revisions, read_plan

REPAIR = "Run 'leandit verify --repair --source PATH': it restores damaged files."


def sealed_revisions(path: Path) -> list[int]:
    """Complete revisions of a store, in order."""
    return revisions_with(path, MANIFEST)


def begun_revisions(path: Path) -> list[int]:
    """Revisions of a store that have a plan or commit records, complete or not, in order."""
    return sorted({*planned_revisions(path), *revisions_with(path, COMMITS, Path.is_dir)})


def unsealed(revision: int) -> str:
    """A sentence on a revision that was begun and has no manifest, and what to do."""
    return (
        f"Revision {revision} was begun and has no manifest: it is not finished (run the same precompute command "
        "again), or the manifest is lost (run 'leandit verify --repair --source PATH')."
    )


def check_store(path: Path) -> None:
    """Check that a folder is a store.

    Raises: StoreNotFound, StoreError (it is something else), StoreIncomplete (it holds only a plan).
    """
    if not path.is_dir():
        raise StoreNotFound(f"store '{path}': no such folder. Create it with 'leandit precompute'.")
    if not (path / GROUP).is_file():
        if planned_revisions(path):
            read_plan(path, 1)  # raises if the plan is damaged
            raise StoreIncomplete(f"store '{path}': nothing is encoded yet. Run the same precompute command again.")
        raise StoreError(
            f"store '{path}': the folder holds no 'zarr.json', so it is not a leandit store. Check the path."
        )


def read_spec(path: Path, revision: int = 1) -> StoreSpec:
    """Read the spec of a revision.

    Raises: StoreError (not a store), FormatVersionError, DamageError.
    """
    name = revision_prefix(revision) + GROUP
    group = read_json(path / name) if (path / name).is_file() else None
    attributes = (group.get("attributes") or {}).get("leandit") if isinstance(group, dict) else None
    if not isinstance(attributes, dict):
        raise StoreError(f"store '{path}': '{name}' is missing, or has no 'leandit' attribute. {REPAIR}")
    version = attributes.get("format_version")
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"store '{path}': format version {version}, this release reads {FORMAT_VERSION}. "
            "Use the release that wrote it, or precompute again."
        )
    try:
        return StoreSpec.model_validate(attributes)
    except ValidationError as error:
        raise DamageError(f"store '{path}': its attributes are not valid: {error.errors()[0]['msg']}.") from error
