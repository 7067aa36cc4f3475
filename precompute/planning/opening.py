"""Open the newest plan of a store, and raise if the store does not match or the disk is too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...datasets.disk.files import TEMPORARY_PREFIX
from ...datasets.format.layout import LEASES, REVISIONS
from ...datasets.format.schema import StoreSpec
from ...datasets.revisions.catalog import (
    begun_revision,
    check_chain,
    check_not_lost,
    check_store,
    has_journal,
    planned_revisions,
    sealed_revisions,
    sweep_store,
)
from ...datasets.revisions.plan import FrozenPlan, read_plan
from ...errors import FingerprintMismatch, SourceError, StoreError, StoreIncomplete
from ...recipe import flatten
from ..config import PrecomputeRecipe
from ..sources.source import Source

TABLES = {"texts": "text", "features": "features", "companions": "companions"}  # in an identity, in a recipe


def newest_plan(root: Path) -> FrozenPlan | None:
    """The plan of the newest revision, complete or not; removes files of dead processes first.

    Returns, Raises: as ``look_for_plan``.
    """
    sweep_store(root)
    return look_for_plan(root)


def check_apart(root: Path, source: Source) -> None:
    """Raise if the store is inside a source of class folders: it would become a class and shift the labels.

    Raises: SourceError.
    """
    for part in source.parts:
        has_classes = part.kind == "imagefolder" and source.classes
        folder, store = Path(part.name.removeprefix("file://")).resolve(), root.resolve()
        is_inside = store.is_relative_to(folder)
        if has_classes and is_inside and not any(part.startswith(".") for part in store.relative_to(folder).parts):
            raise SourceError(
                f"store '{root}': it is inside source '{part.name}', whose folders are its classes: the store "
                "would become one of them. Nothing was changed. Pass a --store elsewhere."
            )


def label_warnings(recipe: PrecomputeRecipe, source: Source) -> list[str]:
    """What to say if no model of leandit could be trained on the store: neither labels nor captions."""
    if source.classes or recipe.text or recipe.source.labels == "none":
        return []
    return [
        f"source '{source.name}': it has no labels, and the recipe encodes no captions, so 'leandit train' refuses the "
        "store: its models need one of them. Put the images in class folders, add a table with the header "
        "'image,label', or encode captions with [text]; source.labels=none stores none without this warning."
    ]


def look_for_plan(root: Path) -> FrozenPlan | None:
    """The plan of the newest revision, complete or not; changes nothing.

    Returns: None if nothing is planned yet.
    Raises: StoreError: the path is something else; StoreIncomplete: the store has lost its plan; DamageError.
    """
    if root.exists() and not root.is_dir():
        raise StoreError(f"store '{root}': it is a file; expected a folder, or nothing. Use another --store.")
    if not root.exists():
        return None
    if has_journal(root):
        check_store(root)  # raises unless the store is sealed
    check_not_lost(root)
    check_chain(root)
    if revisions := [*sealed_revisions(root), *planned_revisions(root)]:
        return read_plan(root, max(revisions))
    others = (path.name for path in root.iterdir() if path.name not in (LEASES, REVISIONS))
    if any(not name.startswith(TEMPORARY_PREFIX) for name in others):  # of a plan that another process is writing
        if planned_revisions(root):  # another process has just finished it
            return look_for_plan(root)
        if revision := begun_revision(root):
            raise StoreIncomplete(
                f"store '{root}': the plan of revision {revision} is missing. Run the same precompute command again: "
                "it plans the revision again, and keeps the shards that the same plan has encoded."
            )
        check_store(root)  # raises if it is not a store
        raise StoreError(
            f"store '{root}': it has neither a plan nor a manifest, so nothing can be added. Nothing was changed. Use "
            "another --store."
        )
    return None


def check_fingerprint(root: Path, stored: StoreSpec, expected: StoreSpec) -> None:
    """Raise if other encoders or settings made the store, naming each field.

    Raises: FingerprintMismatch.
    """
    if stored.fingerprint == expected.fingerprint:
        return
    advice = ""
    if unfinished := planned_revisions(root):
        advice = "; or first finish this one with the settings that made it"
        if is_extension(stored, expected):
            advice += ", and then run this command again: it adds the rest"
        if max(unfinished) > 1:
            advice += ". To give the addition up, remove its folder, the last in revisions/"
    elif left_out := _left_out(stored, expected):
        names = " ".join(f"--without {name}" for name in left_out)
        advice = f"; 'leandit compact {root} --out NEW {names}' makes a store without what the recipe leaves out"
    fields = "".join(f"\n  {line}" for line in _differences(stored, expected))
    raise FingerprintMismatch(
        f"store '{root}': made with other encoders or settings. Nothing was changed. Use the settings that made it, or "
        f"use another --store{advice}. What differs:{fields}"
    )


def _left_out(stored: StoreSpec, expected: StoreSpec) -> list[str]:
    """Names of what a store has and a recipe leaves out, as far as a copy can be without it."""
    names = [part.name for part in (*stored.text_encoders[1:], *stored.features, *stored.companions)]
    kept = {part.name for part in (*expected.text_encoders, *expected.features, *expected.companions)}
    return [name for name in names if name not in kept]


def _named(spec: StoreSpec) -> dict[str, Any]:
    """The identity of a spec, in which all TABLES are by name, in the order of the store."""
    identity = {kind: {} for kind in TABLES} | spec.identity()
    text = {role: identity.pop(role) for role in ("text", "text_encoder")}
    identity["texts"] = ({"": text} if text["text"] else {}) | identity["texts"]
    return identity | {"companions": {part["name"]: part for part in identity["companions"]}}


def _differences(stored: StoreSpec, expected: StoreSpec) -> list[str]:
    """Lines on what a store and a recipe do not have in common: whole tables, else each field."""
    old, new, lines = _named(stored), _named(expected), []
    for kind, table in TABLES.items():
        before, now = list(old[kind]), list(new[kind])
        for name in sorted({*before} ^ {*now}):
            where = "the store, not in the recipe" if name in before else "the recipe, not in the store"
            lines.append(f"[{f'{table}.{name}' if name else table}] is in {where}")
        both = [name for name in before if name in now]
        for tables in (old, new):
            tables[kind] = {name: tables[kind][name] for name in both}
            tables |= tables[kind].pop("", {})  # fields of [text] as they are called in the store
        if kind == "companions" and both != now[: len(both)]:
            lines.append(f"[companions.NAME] come as {', '.join(now)}, expected {', '.join(both)} first")
    old, new = flatten(old), flatten(new)
    differing = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    return lines + [f"{key} is {old.get(key)!r} in the store, {new.get(key)!r} now" for key in differing]


def is_extension(before: StoreSpec, after: StoreSpec) -> bool:
    """Whether a spec equals an earlier one, but for text encoders, features and companions that it adds at the end."""
    old, new = _named(before), _named(after)
    for kind in TABLES:
        earlier, later = list(old.pop(kind).items()), list(new.pop(kind).items())
        if later[: len(earlier)] != earlier:
            return False
    return old == new
