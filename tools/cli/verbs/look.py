"""``leandit report`` and ``view``: what a store or a run is like, to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ....errors import RecipeError
from ....train.weights.folders import is_run
from ...terminal.outcome import print_next
from ...terminal.text import print_rows
from ..options import Device, Revision, Vae, is_url, output, path_or_url, print_line, torch_device

Target = Annotated[str, Argument(parser=path_or_url, metavar="STORE|RUN", help="Store (folder or URL) or run.")]


def report(
    target: Target,
    out: Annotated[Path, output("HTML file to write.")],
    vae: Vae = None,
    count: Annotated[int, Option(min=0, max=60, help="Images shown per bucket of a store.")] = 8,
) -> None:
    """Write one HTML file about a store or a run, warnings first.

    Example: leandit report imagenet-256 --out imagenet-256.html
    """
    if not is_url(target) and is_run(Path(target)):
        if vae:
            raise RecipeError(f"report '{target}': --vae is for stores, and this is a run. Leave it out.")
        from ...inspection.report.run import report_run

        done = report_run(Path(target), out)
    else:
        from ...inspection.report.store_page import report_store
        from ...terminal.progress import ProgressLine

        with ProgressLine() as progress:
            done = report_store(target, out, vae=vae, count=count, progress=progress)
    print_rows([("report", str(out)), *done])
    print_next(["view", target])


def view(
    target: Target,
    port: Annotated[int, Option(min=0, max=65535, help="Port of 127.0.0.1; 0: a free one.")] = 0,
    open_browser: Annotated[bool, Option("--open/--no-open", help="Open the page in your browser.")] = True,
    vae: Annotated[
        str | None, Option(help="VAE to decode with (folder or hub id), such as a tiny one; default: the store's.")
    ] = None,
    device: Device = "cpu",
    revision: Revision = 0,
) -> None:
    """Browse a store or a run, read-only; Ctrl-C or SIGTERM ends it.

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
            from ...inspection.images import LatentDecoder

            return LatentDecoder.of_store(store, vae, torch_device(device)).decode_rows

        app = StoreSite(store, load_decoder).app()
    print_line("Ctrl-C ends it")

    def say(address: str) -> None:
        print(f"view        {address}", flush=True)

    serve(app, port=port, open_browser=open_browser, say=say, warn=print_line)
    end_process()
