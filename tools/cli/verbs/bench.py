"""``leandit bench``: measure a store and a recipe on this machine; comparisons with others are in benchmarks/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ...terminal.text import print_result
from ..options import AsJson, Device, Overrides, Recipe, StoreOfRecipe, output, read_path, torch_device

bench = typer.Typer(no_args_is_help=True)


@bench.callback()
def bench_options() -> None:
    """Measure a store or a recipe on this machine.

    Example: leandit bench loader store
    """


@bench.command("loader")
def bench_loader(
    store: Annotated[Path, Argument(parser=read_path, metavar="STORE", help="Folder of the store.")],
    batch: Annotated[int, Option(min=1, help="Records per batch.")] = 256,
    seconds: Annotated[float, Option(min=0.01, help="Length of each measured window.")] = 2.0,
    cold: Annotated[
        bool, Option("--cold", help="Also measure from disk: drop the store from the page cache first.")
    ] = False,
    scratch: Annotated[
        Path | None, output("Folder for a temporary flat copy of at most 512 MiB; default: the system's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast a store is read, compared with a flat gather of the same rows.

    Example: leandit bench loader store --cold
    """
    from ...bench.loader import render, run

    result = run(store, batch=batch, seconds=seconds, cold=cold, scratch=scratch)
    print_result(result, render, as_json=as_json)


@bench.command("train")
def bench_train(
    context: typer.Context,
    recipe: Recipe,
    store: StoreOfRecipe = None,
    rounds: Annotated[int, Option(min=1, help="Number of measurements.")] = 3,
    steps: Annotated[int, Option(min=1, help="Steps per measurement.")] = 50,
    device: Device = "auto",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure a training step on a store: seconds, data wait, memory, MFU.

    Example: leandit bench train dit-b-2-256 --store imagenet-256
    """
    from ....train.config import load
    from ...bench.train import measure, render
    from ...plan.workload import workload_of_stores
    from ...terminal.progress import ProgressLine

    loaded = load(recipe, overrides or [])
    work, where = workload_of_stores(loaded, store), torch_device(device)
    with ProgressLine() as progress:
        result = measure(work, store, where, rounds=rounds, steps=steps, stop=context.obj, progress=progress)
    print_result(result, render, as_json=as_json)
