"""``leandit bench``: every figure of docs/benchmarks.md comes from one of these commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import AsJson, print_rows

bench = typer.Typer(no_args_is_help=True)


@bench.callback()
def bench_options() -> None:
    """Measure leandit beside its peers, on this machine.

    Example: leandit bench loader --scratch bench
    """


@bench.command("loader")
def bench_loader(
    scratch: Annotated[Path, typer.Option(help="Folder for the store and the peers' files; they stay there.")],
    workload: Annotated[str, typer.Option(help="latents, captions or both.")] = "both",
    rounds: Annotated[int, typer.Option(min=1, help="Times that every peer is measured.")] = 5,
    peers: Annotated[str | None, typer.Option(metavar="A,B", help="Only these peers, beside the limit.")] = None,
    records: Annotated[
        int | None, typer.Option(min=40, help="Of each workload, else 100000 latents and 2000 with captions.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of a measured window.")] = 1.0,
    pythons: Annotated[
        list[str] | None,
        typer.Option("--python", metavar="PEER=PATH", help="Interpreter of a peer's own environment; repeatable."),
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="Write a bar chart here (PNG).")] = None,
) -> None:
    """Read the same records through this store and through its peers, side by side.

    Example: leandit bench loader --scratch bench --workload latents --plot loaders.png
    """
    from .bench import make_request, run
    from .bench_report import check_plot, render
    from .bench_report import plot as draw
    from .progress import ProgressLine

    request = make_request(scratch, workload, records, peers, pythons or [], rounds=rounds, seconds=seconds)
    if plot:
        check_plot(plot)
    with ProgressLine() as progress:
        result = run(request, progress)
    print(json.dumps(result, indent=1) if as_json else render(result))
    if plot:
        draw(result, plot)
        print(f"leandit: chart written to {plot}", file=sys.stderr)


@bench.command("open")
def bench_open(
    scratch: Annotated[Path, typer.Option(help="Folder for the store; it stays there.")],
    records: Annotated[int, typer.Option(min=1000, help="Of the store; 8 KiB each.")] = 1_281_167,
    rounds: Annotated[int, typer.Option(min=1, help="Times that it is opened.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure how long a store takes to open, what it holds in memory, and what a batch costs to plan.

    Example: leandit bench open --scratch bench
    """
    from .bench_open import render, run

    result = run(scratch, records, rounds)
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        print_rows(render(result))


@bench.command("decode")
def bench_decode(
    source: Annotated[str, typer.Option(help="Pictures: a folder, a file or a URL; docs/sources.md.")],
    resolution: Annotated[int, typer.Option(min=16, max=4096, help="Side of the square, in pixels.")] = 256,
    records: Annotated[int, typer.Option(min=1, help="Pictures, the first ones of the source.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every way is measured.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure how many pictures a core decodes and crops, and what another JPEG decoder would change.

    Example: leandit bench decode --source imagenet/train
    """
    from .bench_decode import render, run

    result = run(source, resolution, rounds, records)
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        print_rows(render(result))
