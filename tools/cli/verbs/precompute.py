"""``leandit precompute`` and ``leandit import``: commands that make a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....datasets.errors import RecipeError
from ....precompute.sharing.part import Part, part_of
from ....train.parallel.stop import StopRequest
from ...terminal.next_steps import after_store, command_without, print_next
from ...terminal.text import print_rows, print_text
from ..options import Devices, DryRun, Overrides, Recipe, local_input, output, print_line, torch_devices
from ..preflight import check_import, check_precompute, check_source

if TYPE_CHECKING:  # they load torch, which most commands do without
    from ....precompute.config import PrecomputeRecipe
    from ....precompute.planning.compare import Options
    from ....precompute.progress.clock import Progress

LOCAL, RAY = "local", "ray"


def parse_engine(text: str) -> str:
    """Read ``--engine``.

    Raises: ValueError: an unknown engine.
    """
    if text not in (LOCAL, RAY):
        raise ValueError(f"'{text}': needed {LOCAL} or {RAY}.")
    return text


def precompute(
    context: typer.Context,
    recipe: Recipe,
    source: Annotated[
        list[str] | None, typer.Option(help="Images: a folder, a table or tars, also at a URL; repeatable.")
    ] = None,
    store: Annotated[Path | None, output("Folder of the store; the same command again resumes.")] = None,
    device: Devices = "auto",
    overrides: Overrides = None,
    dry_run: DryRun = False,
    drop_gone: Annotated[bool, typer.Option("--drop-gone", help="Leave out records gone from the source.")] = False,
    retry_rejected: Annotated[bool, typer.Option("--retry-rejected", help="Try rejected records again.")] = False,
    new_revision: Annotated[
        bool,
        typer.Option("--new-revision", help="With other encoders or settings: encode everything as a new revision."),
    ] = False,
    part: Annotated[
        Part | None,
        typer.Option(parser=part_of, metavar="I/N", help="Only the I-th of N shares of the shards."),
    ] = None,
    engine: Annotated[
        str, typer.Option(parser=parse_engine, metavar="NAME", help="local, or ray: the GPUs of a Ray cluster.")
    ] = LOCAL,
    address: Annotated[
        str, typer.Option(help="Address of the Ray cluster; auto: the cluster of this machine.")
    ] = "auto",
) -> None:
    """Encode every picture and caption once into a store; run again, it resumes, or adds what has changed.

    Example: leandit precompute imagenet-256 --source imagenet/train --store imagenet-256
    """
    from ....precompute.config import load
    from ....precompute.planning.compare import Options

    loaded = load(recipe, overrides or [])
    options = Options(drop_gone=drop_gone, retry_rejected=retry_rejected)
    if dry_run:
        _dry_run(loaded, source or [], store, device, options, new_revision=new_revision)
        return
    if not source or store is None:
        raise RecipeError("precompute: needed --source PATH and --store PATH (or --dry-run).")
    from ....precompute.unchanged import Unchanged, unchanged

    check_precompute(loaded, source)
    is_plain = options == Options() and not (new_revision or part) and engine == LOCAL
    listed = unchanged(loaded, source, store, device=device) if is_plain else None
    if isinstance(listed, Unchanged):
        from ...terminal.outcome import unchanged_rows

        for note in listed.notes:
            print_line(note)
        print_rows(unchanged_rows(listed, store))
        print_next(*after_store(store, recipe))
        return
    from ...terminal.outcome import precompute_rows

    devices = [] if engine == RAY else [str(one) for one in torch_devices(device)]
    from ....precompute.engines.job import Job

    if len(devices) != 1:
        listed = None  # the process that leads lists again
    job = Job(loaded, tuple(source), store, options, new_revision, part, device=devices[0] if devices else device)
    with _stoppable_progress(context.obj) as progress:
        if engine == RAY:
            from ....precompute.engines.cluster import run_on_cluster

            report = run_on_cluster(job, address, progress=progress, say=print_line)
        elif len(devices) > 1:
            from ....precompute.engines.processes import run_on_devices

            report = run_on_devices(job, devices, progress=progress, say=print_line)
        else:
            report = job.precompute(progress, print_line, listed=listed)
    print_rows(precompute_rows(report, store))
    if report.manifest:
        print_next(*after_store(store, recipe))


def _dry_run(
    recipe: PrecomputeRecipe,
    source: list[str],
    store: Path | None,
    device: str,
    options: Options,
    *,
    new_revision: bool,
) -> None:
    check_source(recipe, source)
    from ...plan.dry_run import describe_precompute
    from ...plan.precompute_cost import check_room

    devices = torch_devices(device)
    planned = describe_precompute(
        recipe,
        source or None,
        devices[0],
        num_devices=len(devices),
        store=store,
        new_revision=new_revision,
        options=options,
        say=print_line,
    )
    print_text(planned.text)
    if store:
        check_room(store, planned.store_bytes)
    if planned.refusal:
        raise planned.refusal  # as the run would
    if source and store:
        print_next(command_without("--dry-run"))


@contextmanager
def _stoppable_progress(stop: StopRequest) -> Iterator[Progress]:
    """Progress on stderr; each report is a point where a stop request takes effect."""
    from ...terminal.progress import ProgressLine

    with ProgressLine() as line:

        def progress(stage: str, done: int, total: int) -> None:
            stop.check()
            line(stage, done, total)

        yield progress


def import_(
    context: typer.Context,
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="fast-dit, lightningdit, mar, edm2, pixart, mds, mlperf-flux or nemo.")
    ],
    source: Annotated[Path, local_input("Features: the folder or file that the other program wrote.")],
    store: Annotated[Path, output("Folder of the store; the same command again resumes.")],
    null: Annotated[
        str | None, typer.Option(help="Null caption: .npy, a checkpoint, a folder for several text encoders, or zeros.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Make a store of features that another program has encoded, number for number; nothing is encoded again.

    Example: leandit import mar --source cached-imagenet --store imagenet-256
    """
    from ....precompute.importing.formats.recipe import load

    settings = load(overrides or [])
    check_import(source)
    from ....precompute.importing.pipeline import import_features
    from ...terminal.outcome import import_rows

    with _stoppable_progress(context.obj) as progress:
        report = import_features(kind, settings, source_path=source, store_path=store, progress=progress, null=null)
    print_rows(import_rows(report, store))
    print_next(["verify", store], *after_store(store))
