"""``leandit precompute`` and ``leandit import``: what makes a store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ...datasets.errors import RecipeError
from ...precompute.sharing.part import Part, part_of
from ...train.parallel.stop import StopRequest
from ..terminal.text import print_rows
from .engine import LOCAL, chosen_engine, engine_name
from .options import Devices, DryRun, Overrides, local_input, output, torch_device, torch_devices
from .preflight import check_import, check_precompute, check_source


def precompute(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="Name of a shipped recipe, or path of a TOML file.")],
    source: Annotated[
        list[str] | None, typer.Option(help="Pictures: a folder, a file or a URL; docs/sources.md; repeatable.")
    ] = None,
    store: Annotated[Path | None, output("Folder of the store; the same command again resumes.")] = None,
    device: Devices = "auto",
    overrides: Overrides = None,
    dry_run: DryRun = False,
    drop_gone: Annotated[bool, typer.Option("--drop-gone", help="Leave out records gone from the source.")] = False,
    retry_rejected: Annotated[bool, typer.Option("--retry-rejected", help="Try rejected records again.")] = False,
    new_revision: Annotated[
        bool,
        typer.Option("--new-revision", help="With other encoders or settings: encode all again, beside what is there."),
    ] = False,
    part: Annotated[
        Part | None,
        typer.Option(parser=part_of, metavar="I/N", help="Only the I-th of N shares of the shards."),
    ] = None,
    engine: Annotated[
        str, typer.Option(parser=engine_name, metavar="NAME", help="local, or ray: the actors of a Ray cluster.")
    ] = "local",
    address: Annotated[
        str, typer.Option(help="Address of the Ray cluster; auto: the one that this machine is part of.")
    ] = "auto",
) -> None:
    """Encode every picture and caption once into a store; run again, it resumes, or adds what has changed.

    Example: leandit precompute imagenet-256 --source imagenet/train --store imagenet-256
    """
    from ...precompute.config import load

    loaded = load(recipe, overrides or [])
    if dry_run:
        check_source(loaded, source or [])
        from ...precompute.planning.compare import Options
        from ..plan.dry_run import describe_precompute
        from ..plan.precompute_cost import check_room

        devices = torch_devices(device)
        found = describe_precompute(
            loaded,
            source or None,
            devices[0],
            num_devices=len(devices),
            store=store,
            new_revision=new_revision,
            options=Options(drop_gone=drop_gone, retry_rejected=retry_rejected),
        )
        print(found.text)
        if store:
            check_room(store, found.store_bytes)
        if found.refusal:
            raise found.refusal  # as the run would
        return
    if not source or store is None:
        raise RecipeError("precompute: needed --source PATH and --store PATH (or --dry-run).")
    from ...precompute.unchanged import Unchanged, unchanged

    check_precompute(loaded, source)
    is_plain = not (drop_gone or retry_rejected or new_revision or part) and engine == LOCAL
    found = unchanged(loaded, source, store, device=device) if is_plain else None
    if isinstance(found, Unchanged):
        from ..terminal.outcome import unchanged_rows

        for note in found.notes:
            print(f"leandit: {note}", file=sys.stderr)
        print_rows(unchanged_rows(found, store))
        return
    from ...precompute.pipeline import precompute as run
    from ...precompute.planning.compare import Options
    from ..terminal.outcome import precompute_rows
    from ..terminal.progress import ProgressLine

    stop: StopRequest = context.obj
    chosen = chosen_engine(loaded, store, source, devices=device, name=engine, address=address)
    with ProgressLine() as line, chosen as elsewhere:

        def progress(stage: str, done: int, total: int) -> None:
            stop.check()
            line(stage, done, total)

        report = run(
            loaded,
            source_path=source,
            store_path=store,
            device=torch_device("cpu") if elsewhere else torch_devices(device)[0],
            progress=progress,
            options=Options(drop_gone=drop_gone, retry_rejected=retry_rejected),
            new_revision=new_revision,
            part=part,
            engine=elsewhere,
            listed=found,
            say=lambda note: print(f"leandit: {note}", file=sys.stderr),
        )
    print_rows(precompute_rows(report, store))


def import_(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(help="fast-dit, lightningdit, mar, edm2, pixart or mds.")],
    source: Annotated[Path, local_input("Features: the folder or file that the other program wrote.")],
    store: Annotated[Path, output("Folder of the store; the same command again resumes.")],
    null: Annotated[str | None, typer.Option(help="Null caption: .npy, a checkpoint, or zeros.")] = None,
    overrides: Overrides = None,
) -> None:
    """Make a store of features that another program has encoded, number for number; nothing is encoded again.

    Example: leandit import mar --source cached-imagenet --store imagenet-256
    """
    from ...precompute.importing.formats.recipe import load

    settings = load(overrides or [])
    check_import(source)
    from ...precompute.importing.pipeline import import_features
    from ..terminal.outcome import import_rows
    from ..terminal.progress import ProgressLine

    stop: StopRequest = context.obj
    with ProgressLine() as line:

        def progress(stage: str, done: int, total: int) -> None:
            stop.check()
            line(stage, done, total)

        report = import_features(kind, settings, source_path=source, store_path=store, progress=progress, null=null)
    print_rows(import_rows(report, store))
