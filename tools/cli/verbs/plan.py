"""``leandit plan`` estimates a training before it runs; ``leandit bench`` measures a store or a recipe on this machine.

Comparisons with other programs are in benchmarks/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ....errors import RecipeError
from ...terminal.outcome import print_next
from ...terminal.text import print_result
from ..options import (
    AsJson,
    Device,
    Overrides,
    Recipe,
    StoreOfRecipe,
    local_input,
    output,
    path_or_url,
    read_path,
    torch_device,
)

plan = typer.Typer(no_args_is_help=True)


@plan.callback()
def plan_options() -> None:
    """Estimate the memory and time of a training run before you rent a GPU.

    Example: leandit plan train dit-xl-2-256 --resolution 256
    """


@plan.command("train")
def plan_train(
    recipe: Recipe,
    store: Annotated[
        str | None,
        Option(
            parser=path_or_url,
            metavar="PATH",
            help="Store to train on, unless the recipe names stores; or pass --resolution.",
        ),
    ] = None,
    resolution: Annotated[int | None, Option(min=8, help="Image side in pixels, if there is no store yet.")] = None,
    gpu: Annotated[str, Option(help="GPU to compare the strategies on.")] = "H200",
    gpus: Annotated[int, Option(min=1, help="Number of GPUs.")] = 1,
    network_gbit: Annotated[
        float, Option(min=1, help="Network bandwidth of each GPU between machines, Gbit/s.")
    ] = 400.0,
    images: Annotated[int, Option(min=0, help="Images to train on; 0: from the recipe's steps.")] = 0,
    run: Annotated[Path | None, local_input("Run whose measured MFU to use instead of an estimate.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print memory for each strategy, largest microbatch, GPUs that fit, time, and scaling.

    No model is run.

    Example: leandit plan train dit-xl-2-256 --resolution 256 --gpus 8 --gpu A100-40
    """
    if store and resolution:
        raise RecipeError("plan train: a store has its own resolution. Pass either --store or --resolution.")
    from ....train.config import load
    from ...plan.strategies import with_ds_config
    from ...plan.training import plan as make_plan
    from ...plan.training import render
    from ...plan.workload import workload_at_resolution, workload_of_stores
    from ...terminal.progress import ProgressLine

    loaded = load(recipe, overrides or [])
    if not (store or resolution or loaded.data.mixture):
        raise RecipeError("plan train: expected --store PATH, or --resolution PX where there is no store yet.")
    loaded, changes = with_ds_config(loaded, gpus)
    workload = workload_at_resolution(loaded, resolution) if resolution else workload_of_stores(loaded, store)
    how = {"num_gpus": gpus, "images": images, "run": run, "network_gbit": network_gbit, "changes": changes}
    with ProgressLine() as progress:  # each strategy is traced, which takes half a minute of a core for a large model
        result = make_plan(workload, gpu=gpu, **how, progress=progress)
    print_result(result, render, as_json=as_json)
    if not resolution:
        places = [*(("--store", store) if store else ()), "--run", f"runs/{Path(recipe).name.removesuffix('.toml')}"]
        changed = [word for override in overrides or () for word in ("--set", override)]
        print_next(["train", recipe, *places, *changed])


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
