"""``leandit inspect``, ``verify`` and ``compact``: commands on an existing store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ....errors import DamageError, RecipeError, StoreIncomplete
from ...terminal.outcome import print_next
from ...terminal.text import print_result, print_rows
from ..options import (
    AnyStore,
    AsJson,
    Device,
    LocalStore,
    Overrides,
    Revision,
    Vae,
    is_url,
    output,
    print_line,
    torch_device,
)


def inspect(
    store: AnyStore,
    key: Annotated[str | None, Argument(metavar="KEY", help="Key of one record.")] = None,
    as_json: AsJson = False,
    revision: Revision = 0,
    rejects: Annotated[bool, Option("--rejects", help="List every rejected record.")] = False,
    sheet: Annotated[Path | None, output("Write a contact sheet of decoded records here (PNG).")] = None,
    count: Annotated[int, Option(min=1, max=600, help="Images on the contact sheet.")] = 24,
    bucket: Annotated[str | None, Option(help="Only this bucket, HxW in pixels.")] = None,
    class_: Annotated[
        str | None, Option("--class", metavar="NAME", help="Only this class: name, wnid or index.")
    ] = None,
    originals: Annotated[
        bool, Option("--originals", help="Show source images beside the decoded ones; needs --source.")
    ] = False,
    source: Annotated[list[str] | None, Option(help="Source images of the store, for a sheet; repeatable.")] = None,
    vae: Vae = None,
) -> None:
    """Show the contents of a store, and whether its numbers look right.

    Example: leandit inspect imagenet-256 --sheet sheet.png
    """
    is_chosen, is_of_sheet = bucket or class_, bucket or class_ or originals or source
    contradictions = {
        f"inspect --originals: it takes no value, so '{key}' is the key of a record. Pass the images that the "
        "store was made from with --source PATH.": originals and key and not source,
        "inspect: --bucket, --class, --originals and --source apply only to a contact sheet. Pass --sheet.": is_of_sheet
        and not sheet,
        "inspect --originals: the store does not hold the source images. Pass --source PATH.": originals and not source,
        "inspect --rejects: it lists all rejects. Leave out KEY, --bucket and --class.": rejects and (key or is_chosen),
        "inspect KEY: it shows one record. Leave out --bucket and --class.": key and is_chosen,
    }
    for problem, is_found in contradictions.items():
        if is_found:
            raise RecipeError(problem)
    from ....datasets.store import LatentStore
    from ...inspection.store_facts import StoreFacts, describe_record
    from ...inspection.store_text import render, render_ledger, render_record

    opened = LatentStore(store, revision=revision, allow_incomplete=True)
    if sheet:
        from ...inspection.images import write_sheet

        which = {"key": key, "rejects": rejects, "count": count, "bucket": bucket, "class_name": class_}
        shown = write_sheet(opened, sheet, **which, source=source, with_originals=originals, vae=vae)
        print_line(f"contact sheet of {shown} written to {sheet}")
    facts = StoreFacts(opened)
    if rejects:
        print_result(facts.rejected.to_pylist(), render_ledger, as_json=as_json)
    elif key:
        print_result(describe_record(opened, opened.record(key)), render_record, as_json=as_json)
    else:
        print_result(facts.to_json() if as_json else facts, render, as_json=as_json)


def verify(
    store: AnyStore,
    quick: Annotated[bool, Option("--quick", help="Check sizes and metadata only, not every byte.")] = False,
    deep: Annotated[bool, Option("--deep", help="Also re-encode a sample and compare.")] = False,
    repair: Annotated[bool, Option("--repair", help="Restore damaged files.")] = False,
    source: Annotated[list[str] | None, Option(help="Source images, for --deep and --repair; repeatable.")] = None,
    device: Device = "auto",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte of a store; name and repair damage.

    Example: leandit verify imagenet-256 --repair --source imagenet/train
    """
    from ...inspection.verify import check, check_url, render
    from ...terminal.progress import ProgressLine

    if is_url(store):
        verification, done = check_url(store, quick=quick, deep=deep, repair=repair)
    else:
        with ProgressLine() as progress:
            verification, done = check(
                Path(store),
                quick=quick,
                deep=deep,
                repair=repair,
                source=source,
                device=lambda: torch_device(device),
                overrides=overrides or [],
                progress=progress,
            )
    print(json.dumps(verification.to_json() | done, indent=1) if as_json else render(verification, done))
    if verification.damaged:
        raise typer.Exit(DamageError.exit_code)
    if not verification.complete:
        raise typer.Exit(StoreIncomplete.exit_code)
    if quick:
        print_next(["verify", store])


def compact(
    store: LocalStore,
    out: Annotated[Path, output("Folder of the new store.")],
    without: Annotated[
        list[str] | None,
        Option(help="Text encoder, feature or companion to leave out; repeatable.", metavar="NAME"),
    ] = None,
) -> None:
    """Copy what a store still uses into a new store of one revision, without re-encoding.

    Example: leandit compact imagenet-256 --out imagenet-256-compact
    """
    from ...export.compact import compact as run
    from ...terminal.progress import ProgressLine

    with ProgressLine() as progress:
        manifest = run(store, out, progress=progress, without=without or ())
    rows = [("store", f"{out}: revision {manifest.revision}, {manifest.num_stored:,} records")]
    rows.append(("old store", f"{store}: unchanged; remove it once no run reads it"))
    print_rows([*rows, ("root hash", manifest.root_hash)])
    print_next(["verify", out], ["inspect", out])
