"""``leandit precompute`` and ``leandit import``: commands that make a store."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from ....datasets.revisions.catalog import planned_revisions, sealed_revisions
from ....errors import RecipeError, SourceError
from ...terminal.outcome import after_store, command_without, import_rows, precompute_rows, print_next, unchanged_rows
from ...terminal.text import print_rows, print_text
from ..options import DryRun, Overrides, Recipe, local_input, output, print_line, torch_devices
from ..preflight import check_encoders, check_sources

if TYPE_CHECKING:  # pydantic's models take half of a second
    from ....precompute.config import PrecomputeRecipe


def parse_part(text: str) -> Any:
    """Read ``--part``.

    Raises: BadParameter: malformed, or no such part.
    """
    from ....precompute.sharing.leases import part_of

    try:
        return part_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


MAIN = f"{__name__.split('.')[0]}.tools.cli.main"
THIS_RUN = "this run"  # the row after those of the store

Part = Annotated[str | None, Option(parser=parse_part, metavar="I/N", help="Encode only part I of N of the shards.")]
STORE_HELP = "Folder of the store; the same command resumes."
DEVICE_HELP = "cpu or cuda:N, several separated by commas, one process each; cuda and auto: all GPUs."


def precompute(
    context: typer.Context,
    recipe: Recipe,
    source: Annotated[
        list[str] | None, Option(help="Images: a folder, a table or tars, also at a URL; repeatable.")
    ] = None,
    store: Annotated[Path | None, output(STORE_HELP)] = None,
    device: Annotated[str, Option(help=DEVICE_HELP)] = "auto",
    overrides: Overrides = None,
    dry_run: DryRun = False,
    drop_gone: Annotated[bool, Option("--drop-gone", help="Leave out records missing from the source.")] = False,
    retry_rejected: Annotated[bool, Option("--retry-rejected", help="Retry rejected records.")] = False,
    part: Part = None,
    engine: Annotated[Literal["local", "ray"], Option(help="ray: the GPUs of a Ray cluster.")] = "local",
    address: Annotated[str, Option(help="Address of the Ray cluster; auto: the cluster of this machine.")] = "auto",
) -> None:
    """Encode every image and caption once into a store; rerun to resume, or to add what has changed.

    Example: leandit precompute imagenet-256 --source imagenet/train --store imagenet-256
    """
    from ....precompute.config import load, notes
    from ....precompute.encoders.model_files import revision_notes
    from ....precompute.planning.compare import Options
    from ....precompute.unchanged import unchanged
    from ...terminal.progress import ProgressLine

    loaded = load(recipe, overrides or [])
    options = Options(drop_gone=drop_gone, retry_rejected=retry_rejected)
    if not dry_run and not (source and store):
        raise RecipeError("precompute: expected --source PATH and --store PATH (or --dry-run).")
    check_sources(loaded, source or [])
    for note in (*notes(loaded), *revision_notes(loaded)):
        print_line(note)
    if dry_run:
        how = {"store": store, "options": options, "say": print_line}
        _show_plan(loaded, source or None, torch_devices(device), **how)
        return
    assert source
    assert store
    check_encoders(loaded)
    is_plain = options == Options() and not part and engine == "local"
    manifest, listed = unchanged(loaded, source, store, device=device) if is_plain else (None, None)
    if manifest and listed:
        for note in listed.notes:
            print_line(f"source '{listed.name}': {note}")
        print_rows(unchanged_rows(manifest, listed, store))
        print_next(*after_store(store, recipe))
        return
    devices = [device] if engine == "ray" else [str(one) for one in torch_devices(device)]
    if engine == "ray" or len(devices) > 1:
        words = _words(recipe, source, store, overrides or [], part, drop_gone=drop_gone, is_on_cluster=engine == "ray")
        _run_on_devices(words, store, devices, address if engine == "ray" else "", retry_rejected, context.obj.check)
    else:
        from ....precompute.pipeline import precompute as encode
        from ....precompute.sharing.leases import ALL_SHARDS

        shards: Any = part or ALL_SHARDS  # parsed
        with ProgressLine(check=context.obj.check) as progress:
            report = encode(
                loaded,
                source_path=source,
                store_path=store,
                device=torch_devices(device)[0],
                progress=progress,
                options=options,
                part=shards,
                listed=listed,
                say=print_line,
            )
        print_rows(precompute_rows(report, store))
    if sealed_revisions(store) and not planned_revisions(store):
        print_next(*after_store(store, recipe))


def _words(
    recipe: str,
    source: list[str],
    store: Path,
    overrides: list[str],
    part: Any,
    *,
    drop_gone: bool,
    is_on_cluster: bool,
) -> list[str]:
    """The words of this command for another process; on a cluster with absolute paths."""
    words = ["precompute", recipe, "--store", str(store.absolute() if is_on_cluster else store)]
    for path in source:
        words += ["--source", os.path.abspath(path) if is_on_cluster and "://" not in path else path]
    for override in overrides:
        words += ["--set", override]
    words += ["--part", f"{part.start + 1}/{part.step}"] if part else []
    return words + ["--drop-gone"] * drop_gone


def _run_on_devices(
    words: list[str], store: Path, devices: list[str], address: str, retry_rejected: bool, check: Callable[[], None]
) -> None:
    """Run the command of ``words`` once a device, and print its results.

    Args:
      devices: of this machine; or of the Ray cluster at ``address``, as --device names them.
    """
    import torch

    from ....precompute.pipeline import newest_revision

    before, flags = newest_revision(store), [flag for flag in ("--traceback", "--verbose") if flag in sys.argv]

    def words_of(device: str) -> list[str]:
        # Rejects are tried again in one revision, not in another by each process that is started later.
        retry = ["--retry-rejected"] * (retry_rejected and newest_revision(store) == before)
        return [MAIN, *flags, *words, "--device", device, *retry]

    how: dict[str, Any] = {
        "store": store.absolute(),
        "num_threads": torch.get_num_threads(),
        "say": print_line,
        "check": check,
    }
    if address:
        from ....precompute.engines.cluster import run_on_cluster

        outputs = run_on_cluster(words_of, address, devices[0], **how)
    else:
        from ....precompute.engines.devices import run_on_devices

        outputs = run_on_devices(words_of, devices, **how)
    *_, last = outputs.values()
    of_store = itertools.takewhile(lambda line: not line.startswith(THIS_RUN), last.splitlines())
    print("\n".join(of_store))
    for name, stdout in outputs.items():
        runs = [line.removeprefix(THIS_RUN).strip() for line in stdout.splitlines() if line.startswith(THIS_RUN)]
        print_rows([(THIS_RUN, f"{name}: {run}") for run in runs])


def _show_plan(
    recipe: PrecomputeRecipe, source: list[str] | None, devices: list[Any], *, store: Path | None, **how: Any
) -> None:
    """Print what would be done. Raises: LeanditError: as the precompute would; ResourceError: the disk is too small."""
    from ...plan.dry_run import describe_precompute
    from ...plan.precompute_cost import check_room

    planned = describe_precompute(recipe, source, devices[0], num_devices=len(devices), store=store, **how)
    print_text(planned.text)
    if store:
        check_room(store, planned.store_bytes)
    if planned.refusal:
        raise planned.refusal
    if source and store:
        print_next(command_without("--dry-run"))


def import_(
    context: typer.Context,
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="fast-dit, lightningdit, mar, edm2, pixart, mds, mlperf-flux or nemo.")
    ],
    source: Annotated[Path, local_input("Folder or file written by the other program.")],
    store: Annotated[Path, output(STORE_HELP)],
    null: Annotated[
        str | None, Option(help="Null caption: .npy, a checkpoint, a folder for several text encoders, or zeros.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Convert latents cached by another program into a store, exactly, without re-encoding.

    Example: leandit import mar --source cached-imagenet --store imagenet-256
    """
    from ....precompute.importing.recipe import load

    settings = load(overrides or [])
    if not source.exists():
        raise SourceError(f"source '{source}': no such file or folder. Check the path.")
    from ....precompute.importing.pipeline import import_features
    from ...terminal.progress import ProgressLine

    with ProgressLine(check=context.obj.check) as progress:
        report = import_features(kind, settings, source_path=source, store_path=store, progress=progress, null=null)
    print_rows(import_rows(report, store))
    print_next(["verify", store], *after_store(store))
