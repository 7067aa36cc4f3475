"""``leandit report`` and ``view``: what a store or a run is like, to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ....datasets.errors import RecipeError
from ....train.weights.folders import is_run
from ...terminal.outcome import print_next
from ...terminal.text import print_rows
from ..options import Device, Revision, Vae, is_url, local_input, output, path_or_url, print_line, torch_device


def report(
    targets: Annotated[
        list[str], Argument(parser=path_or_url, metavar="STORE|RUN", help="Stores, or runs, side by side.")
    ],
    out: Annotated[Path, output("HTML file to write.")],
    source: Annotated[list[str] | None, Option(help="Source images of the store, to show rejects; repeatable.")] = None,
    vae: Vae = None,
    count: Annotated[int, Option(min=0, max=60, help="Images for each bucket of a store.")] = 8,
    scores: Annotated[
        Path | None, local_input("Parquet file with a score for each key: pictures are spread over its range.")
    ] = None,
    score: Annotated[str, Option(metavar="COLUMN", help="Column of the scores.")] = "score",
    seed: Annotated[int, Option(min=0, help="Seed for the images shown without scores.")] = 0,
) -> None:
    """Write one HTML file about stores or runs, warnings first.

    Example: leandit report imagenet-256 --out imagenet-256.html
    """
    # One that is named twice is shown once.
    places = {target.rstrip("/") if is_url(target) else str(Path(target).resolve()): target for target in targets}
    targets = list(places.values())
    kinds = [not is_url(target) and is_run(Path(target)) for target in targets]
    if len(set(kinds)) > 1:
        run, other = targets[kinds.index(True)], targets[kinds.index(False)]
        raise RecipeError(f"report: '{run}' is a run, '{other}' is not. Give stores alone, or runs alone.")
    are_runs = kinds[0]
    if are_runs and (source or vae or scores):
        raise RecipeError(
            f"report '{targets[0]}': --source, --vae and --scores are of stores, and it is a run. Leave them out."
        )
    from ....datasets.order.filters import ScoreTable
    from ...inspection.report.run import report_runs
    from ...inspection.report.store_page import report_stores
    from ...terminal.progress import ProgressLine

    with ProgressLine() as progress:
        if are_runs:
            done = report_runs(targets, out, progress=progress)
        else:
            table = ScoreTable(scores, score, minimum=0.0) if scores else None
            done = report_stores(
                targets, out, source=source, vae=vae, count=count, scores=table, seed=seed, progress=progress
            )
    print_rows([("report", str(out)), *done])
    print_next(["view", targets[0]])


def view(
    target: Annotated[
        str, Argument(parser=path_or_url, metavar="STORE|RUN", help="Store: a folder, or a URL. Or a run.")
    ],
    port: Annotated[int, Option(min=0, max=65535, help="Port of 127.0.0.1; 0: a free one.")] = 0,
    open_browser: Annotated[bool, Option("--open/--no-open", help="Open the page in your browser.")] = True,
    vae: Annotated[
        str | None, Option(help="Folder or hub id to decode with, such as a tiny VAE; else the store's own.")
    ] = None,
    device: Device = "cpu",
    revision: Revision = 0,
) -> None:
    """Show a store or a run in a browser; it reads and never writes. Ctrl-C or SIGTERM ends it.

    Example: leandit view imagenet-256
    """
    from ...inspection.view.server import check_installed, end_process, serve

    check_installed()
    if not is_url(target) and is_run(Path(target)):
        from ...inspection.view.run_site import RunSite

        app = RunSite(Path(target)).app()
    else:
        from ....datasets.store import LatentStore
        from ...inspection.view.images import Decode
        from ...inspection.view.store_site import StoreSite

        store = LatentStore(target, revision=revision, allow_incomplete=True)

        def load_decoder() -> Decode:
            from ...inspection.pictures import LatentDecoder

            return LatentDecoder.of_store(store, vae, torch_device(device)).decode_rows

        app = StoreSite(store, load_decoder).app()
    print_line("Ctrl-C ends it")
    serve(app, port=port, open_browser=open_browser, say=lambda address: print(f"view        {address}", flush=True))
    end_process()
