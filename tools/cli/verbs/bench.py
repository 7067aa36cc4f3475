"""``leandit bench``: measure a store and a recipe on this machine; comparisons with others are in benchmarks/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...terminal.text import print_result
from ..options import AsJson, Device, Overrides, Recipe, output, path_or_url, read_path, torch_device

bench = typer.Typer(no_args_is_help=True)


@bench.callback()
def bench_options() -> None:
    """Measure a store or a recipe on this machine.

    Example: leandit bench loader store
    """


@bench.command("loader")
def bench_loader(
    store: Annotated[Path, typer.Argument(parser=read_path, metavar="STORE", help="Folder of the store.")],
    batch: Annotated[int, typer.Option(min=1, help="Records of a batch.")] = 256,
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of each measured window.")] = 2.0,
    cold: Annotated[
        bool, typer.Option("--cold", help="Read from the disk too: drop the store from the page cache first.")
    ] = False,
    scratch: Annotated[
        Path | None, output("Folder for a temporary flat copy of 512 MiB at most; else the system's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast a store is read, beside what this machine can do with the same rows.

    Example: leandit bench loader store --cold
    """
    from ...bench.loader import render, run

    result = run(store, batch=batch, seconds=seconds, cold=cold, scratch=scratch)
    print_result(result, render, as_json=as_json)


@bench.command("train")
def bench_train(
    recipe: Recipe,
    resolution: Annotated[int, typer.Option(min=8, help="Side of the pictures, in pixels.")] = 256,
    data: Annotated[
        str, typer.Option(help="synthetic; or store: the real loop on a store, and its step.")
    ] = "synthetic",
    store: Annotated[
        str | None, typer.Option(parser=path_or_url, metavar="PATH", help="Store for --data store, else one of noise.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that everything is measured.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each, in each round.")] = 10,
    device: Device = "auto",
    without: Annotated[
        list[str] | None, typer.Option(metavar="SECTION", help="Compare with the recipe without a section; repeatable.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compare our training step with that around diffusers' model, or our real loop with its step.

    Example: leandit bench train dit-b-2-256 --set run.global_batch=8
    """
    from ....train.config import load
    from ...bench.training.steps import StepRequest
    from ...bench.training.train import render, run
    from ...plan.workload import workload_at_resolution, workload_of_stores
    from ...terminal.progress import ProgressLine

    loaded = load(recipe, overrides or [])
    has_stores = store or loaded.data.turns
    workload = workload_of_stores(loaded, store) if has_stores else workload_at_resolution(loaded, resolution)
    with ProgressLine() as progress:
        request = StepRequest(workload, torch_device(device), rounds, steps, data, store, tuple(without or ()))
        result = run(request, progress)
    print_result(result, render, as_json=as_json)
