"""``leandit precompute`` and ``leandit import``: what makes a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..datasets.errors import RecipeError
from ..precompute.part import Part, part_of
from ..train.stop import StopRequest
from .cli_options import Devices, DryRun, Overrides, print_rows, resolution_and_path, torch_device, torch_devices
from .engine import LOCAL, chosen_engine, engine_name


def precompute(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="Name of a shipped recipe, or path of a TOML file.")],
    source: Annotated[str | None, typer.Option(help="Pictures: a folder, a file or a URL; docs/sources.md.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder of the store; the same command again resumes.")] = None,
    device: Devices = "auto",
    overrides: Overrides = None,
    dry_run: DryRun = False,
    drop_gone: Annotated[bool, typer.Option("--drop-gone", help="Leave out records gone from the source.")] = False,
    retry_rejected: Annotated[bool, typer.Option("--retry-rejected", help="Try rejected records again.")] = False,
    new_revision: Annotated[
        bool, typer.Option("--new-revision", help="Other encoders or settings: encode all anew, beside what is there.")
    ] = False,
    part: Annotated[
        Part | None,
        typer.Option(parser=part_of, metavar="I/N", help="Only the I-th of N shares of the shards."),
    ] = None,
    engine: Annotated[
        str, typer.Option(parser=engine_name, metavar="NAME", help="local, or ray: the actors of a Ray cluster.")
    ] = "local",
    address: Annotated[
        str, typer.Option(help="Of the Ray cluster; auto: the one that this machine is part of.")
    ] = "auto",
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="RES=PATH", help="The same at another resolution, into its own store; repeatable."),
    ] = None,
) -> None:
    """Run every picture and caption through the encoders, exactly once; again, it resumes, or adds what changed.

    Example: leandit precompute imagenet-256 --source imagenet/train --store imagenet-256
    """
    from ..precompute.config import load

    loaded = load(recipe, overrides or [])
    others = [
        (load(recipe, [*(overrides or []), f"images.resolution={side}"]), path)
        for side, path in map(resolution_and_path, also or [])
    ]
    if others and (engine != LOCAL or len(torch_devices(device)) > 1):
        raise RecipeError("--also: one process makes all stores. Needed --engine local and one device, as cuda:0.")
    if dry_run:
        from ..precompute.several import Target, check_targets
        from .dry_run import describe_precompute
        from .prediction import check_room

        if others:
            check_targets([Target(one, path) for one, path in [(loaded, store), *others] if path])
        rooms: dict[Path, int] = {}
        devices = torch_devices(device)
        for one, path in [(loaded, store), *others]:
            text, needed = describe_precompute(
                one, source, devices[0], num_devices=len(devices), store=path, new_revision=new_revision
            )
            print(text)
            if path and needed:
                rooms[path] = needed.total
        check_room(rooms)
        return
    if source is None or store is None:
        raise RecipeError("precompute: needed --source PATH and --store PATH (or --dry-run).")
    from ..precompute.growth import Options
    from ..precompute.pipeline import precompute as run
    from ..precompute.several import Target, precompute_several
    from .outcome import precompute_rows, shared_rows
    from .progress import ProgressLine

    stop: StopRequest = context.obj
    chosen = chosen_engine(loaded, store, source, devices=device, name=engine, address=address)
    with ProgressLine() as line, chosen as elsewhere:

        def progress(stage: str, done: int, total: int) -> None:
            stop.check()
            line(stage, done, total)

        how: dict[str, Any] = {
            "source_path": source,
            "device": torch_device("cpu") if elsewhere else torch_devices(device)[0],
            "progress": progress,
            "options": Options(drop_gone=drop_gone, retry_rejected=retry_rejected),
            "new_revision": new_revision,
            "part": part,
        }
        if others:
            targets = [Target(loaded, store), *(Target(*other) for other in others)]
            rows = shared_rows(precompute_several(targets, **how), [target.store_path for target in targets])
        else:
            rows = precompute_rows(run(loaded, store_path=store, engine=elsewhere, **how), store)
    print_rows(rows)


def import_(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(help="fast-dit, lightningdit, mar, edm2, pixart or mds.")],
    source: Annotated[Path, typer.Option(help="Features: the folder or file that the other program wrote.")],
    store: Annotated[Path, typer.Option(help="Folder of the store; the same command again resumes.")],
    null: Annotated[str | None, typer.Option(help="Null caption: .npy, a checkpoint, or zeros.")] = None,
    overrides: Overrides = None,
) -> None:
    """Make a store of features that another program has encoded, number for number; nothing is encoded again.

    Example: leandit import mar --source cached-imagenet --store imagenet-256
    """
    from ..precompute.import_config import load
    from ..precompute.import_store import import_features
    from .outcome import import_rows
    from .progress import ProgressLine

    stop: StopRequest = context.obj
    with ProgressLine() as line:

        def progress(stage: str, done: int, total: int) -> None:
            stop.check()
            line(stage, done, total)

        settings = load(overrides or [])
        report = import_features(kind, settings, source_path=source, store_path=store, progress=progress, null=null)
    print_rows(import_rows(report, store))
