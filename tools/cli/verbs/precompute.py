"""``leandit precompute`` and ``leandit import``: commands that make a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ....datasets.errors import RecipeError, SourceError
from ....train.parallel.stop import StopRequest
from ...terminal.next_steps import after_store, command_without, print_next
from ...terminal.text import print_rows, print_text
from ..options import Devices, DryRun, Overrides, Recipe, local_input, output, print_line, torch_devices

if TYPE_CHECKING:  # torch takes a second to import
    from ....precompute.progress.clock import Progress


class EngineName(StrEnum):
    """Values of ``--engine``."""

    local = "local"
    ray = "ray"


def parse_part(text: str) -> Any:
    """Read ``--part``.

    Raises: BadParameter: malformed, or no such part.
    """
    from ....precompute.sharing.part import part_of

    try:
        return part_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


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
        str | None, typer.Option(parser=parse_part, metavar="I/N", help="Only the I-th of N shares of the shards.")
    ] = None,
    engine: Annotated[EngineName, typer.Option(help="ray: the GPUs of a Ray cluster.")] = EngineName.local,
    address: Annotated[
        str, typer.Option(help="Address of the Ray cluster; auto: the cluster of this machine.")
    ] = "auto",
) -> None:
    """Encode every picture and caption once into a store; run again, it resumes, or adds what has changed.

    Example: leandit precompute imagenet-256 --source imagenet/train --store imagenet-256
    """
    from ....precompute.config import load
    from ....precompute.planning.compare import Options
    from ..preflight import check_encoders, check_sources

    loaded = load(recipe, overrides or [])
    options = Options(drop_gone=drop_gone, retry_rejected=retry_rejected)
    if not dry_run and not (source and store):
        raise RecipeError("precompute: expected --source PATH and --store PATH (or --dry-run).")
    check_sources(loaded, source or [])
    if dry_run:
        from ...plan.dry_run import describe_precompute
        from ...plan.precompute_cost import check_room

        devices = torch_devices(device)
        how: dict[str, Any] = {"num_devices": len(devices), "store": store, "new_revision": new_revision}
        planned = describe_precompute(loaded, source or None, devices[0], **how, options=options, say=print_line)
        print_text(planned.text)
        if store:
            check_room(store, planned.store_bytes)
        if planned.refusal:
            raise planned.refusal  # as the run would
        if source and store:
            print_next(command_without("--dry-run"))
        return
    assert source
    assert store
    check_encoders(loaded)
    from ....precompute.unchanged import Unchanged, unchanged
    from ...terminal.outcome import precompute_rows, unchanged_rows

    is_plain = options == Options() and not (new_revision or part) and engine == EngineName.local
    listed = unchanged(loaded, source, store, device=device) if is_plain else None
    if isinstance(listed, Unchanged):
        for note in listed.notes:
            print_line(note)
        print_rows(unchanged_rows(listed, store))
        print_next(*after_store(store, recipe))
        return
    devices = [] if engine == EngineName.ray else [str(one) for one in torch_devices(device)]
    from ....precompute.engines.job import Job

    shared: Any = part  # parsed
    job = Job(loaded, tuple(source), store, options, new_revision, shared, device=devices[0] if devices else device)
    with _stoppable_progress(context.obj) as progress:
        if engine == EngineName.ray:
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
    if not source.exists():
        raise SourceError(f"source '{source}': no such file or folder. Check the path.")
    from ....precompute.importing.pipeline import import_features
    from ...terminal.outcome import import_rows

    with _stoppable_progress(context.obj) as progress:
        report = import_features(kind, settings, source_path=source, store_path=store, progress=progress, null=null)
    print_rows(import_rows(report, store))
    print_next(["verify", store], *after_store(store))
