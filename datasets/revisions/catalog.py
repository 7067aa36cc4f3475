"""Which revisions a folder holds, and what each says of itself; refuses what is no store."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from ..disk.hashing import read_json
from ..errors import DamageError, FormatVersionError, StoreError, StoreIncomplete, StoreNotFound
from ..format.layout import GROUP, MANIFEST, revision_prefix, revisions_with
from ..format.schema import FORMAT_VERSION, StoreSpec
from .plan import planned_revisions, read_plan

REPAIR = "Run 'leandit verify --repair --source PATH': it makes what is damaged anew."


def sealed_revisions(path: Path) -> list[int]:
    """Complete revisions of a store, in order."""
    return revisions_with(path, MANIFEST)


def check_store(path: Path) -> None:
    """Refuse what is no store.

    Raises: StoreNotFound, StoreError (something else is there), StoreIncomplete (only its plan is there).
    """
    if not path.is_dir():
        raise StoreNotFound(f"store '{path}': there is no such folder. Make it with 'leandit precompute'.")
    if not (path / GROUP).is_file():
        if planned_revisions(path):
            read_plan(path, 1)  # refuses a plan that is none
            raise StoreIncomplete(f"store '{path}': nothing is encoded yet. Run the same precompute command again.")
        raise StoreError(f"store '{path}': the folder holds no 'zarr.json', so it is no leandit store. Check the path.")


def read_spec(path: Path, revision: int = 1) -> StoreSpec:
    """Read what a revision of a store says of itself.

    Raises: StoreError (something else is there), FormatVersionError, DamageError.
    """
    name = revision_prefix(revision) + GROUP
    group = read_json(path / name) if (path / name).is_file() else None
    attributes = (group.get("attributes") or {}).get("leandit") if isinstance(group, dict) else None
    if not isinstance(attributes, dict):
        raise StoreError(
            f"store '{path}': '{name}' is missing or not that of a leandit store (no 'leandit' attribute). {REPAIR}"
        )
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
