"""``leandit bench``: every figure of docs/benchmarks.md comes from one of these commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...terminal.text import print_result
from ..options import (
    AsJson,
    Device,
    Overrides,
    Recipe,
    local_input,
    output,
    path_or_url,
    print_line,
    read_path,
    torch_device,
)

bench = typer.Typer(no_args_is_help=True)
FastDit = Annotated[
    Path | None, local_input("Checkout of github.com/chuanyangjin/fast-DiT, to put beside ours; else left out.")
]


@bench.callback()
def bench_options() -> None:
    """Compare leandit with its peers, on this machine.

    Example: leandit bench loader --scratch bench
    """


@bench.command("loader")
def bench_loader(
    scratch: Annotated[Path, output("Folder for the store and the peers' files; they stay there.")],
    workload: Annotated[str, typer.Option(help="latents, captions, aligned, both (the first two) or all.")] = "both",
    rounds: Annotated[int, typer.Option(min=1, help="Times that every peer is measured.")] = 5,
    peers: Annotated[str | None, typer.Option(metavar="A,B", help="Only these peers, and the limit.")] = None,
    records: Annotated[
        int | None, typer.Option(min=40, help="Of each workload, else 100000 latents and 2000 of the others.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of a measured window.")] = 1.0,
    pythons: Annotated[
        list[str] | None,
        typer.Option("--python", metavar="PEER=PATH", help="Interpreter of a peer's own environment; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read the same records through this store and through its peers, side by side.

    Example: leandit bench loader --scratch bench --workload latents
    """
    from ...bench.loader.bench import make_request, run
    from ...bench.loader.report import render
    from ...terminal.progress import ProgressLine

    request = make_request(scratch, workload, records, peers, pythons or [], rounds=rounds, seconds=seconds)
    with ProgressLine() as progress:
        result = run(request, progress)
    print_result(result, render, as_json=as_json)


@bench.command("plan")
def bench_plan(
    scratch: Annotated[Path, output("Folder for the manifest and the plan; they stay there.")],
    records: Annotated[int, typer.Option(min=1, help="Rows of the manifest.")] = 1_281_167,
    sizes: Annotated[str, typer.Option(help="Where sizes come from: header or manifest.")] = "manifest",
    captions: Annotated[bool, typer.Option(help="Plan captions too; else class labels alone.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure how long a manifest takes to plan and to seal, and the memory that it takes, whatever its length.

    Example: leandit bench plan --scratch bench --records 100000
    """
    from ...bench.encode.plan import render, run

    result = run(scratch, records, sizes, captions=captions)
    print_result(result, render, as_json=as_json)


@bench.command("bytes")
def bench_bytes(
    tokens: Annotated[int, typer.Option(min=1, help="Valid tokens of each caption.")] = 60,
    as_json: AsJson = False,
) -> None:
    """Compare bytes a record with the caches of other trainers, from the formats alone.

    Example: leandit bench bytes --tokens 120
    """
    from ...bench.encode.cache_bytes import render, run

    print_result(run(tokens), render, as_json=as_json)


@bench.command("search")
def bench_search(
    records: Annotated[int, typer.Option(min=1000, help="Records with a caption each.")] = 1_281_167,
    as_json: AsJson = False,
) -> None:
    """Measure how long 'leandit view' searches the records of a large store.

    Example: leandit bench search
    """
    from ...bench.loader.search import render, run

    print_result(run(records), render, as_json=as_json)


@bench.command("open")
def bench_open(
    scratch: Annotated[Path, output("Folder for the store; it stays there.")],
    records: Annotated[int, typer.Option(min=1000, help="Of the store; 8 KiB each.")] = 1_281_167,
    rounds: Annotated[int, typer.Option(min=1, help="Times that it is opened.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure how long a store takes to open, what it holds in memory, and what a batch costs to plan.

    Example: leandit bench open --scratch bench
    """
    from ...bench.loader.open import render, run

    result = run(scratch, records, rounds)
    print_result(result, render, as_json=as_json)


@bench.command("precompute")
def bench_precompute(
    source: Annotated[str, typer.Option(help="Pictures, with captions for --text; a sample of them is used.")],
    scratch: Annotated[Path, output("Folder for the sample, the stores and the peers' files.")],
    vae: Annotated[str, typer.Option(help="Hub id, folder, or random:sd.")] = "random:sd",
    text: Annotated[str | None, typer.Option(help="Hub id, folder, or random:t5-base and others; else none.")] = None,
    tokenizer: Annotated[Path | None, local_input("Folder with the tokenizer of a random text encoder.")] = None,
    records: Annotated[int, typer.Option(min=1, help="Pictures to encode; those of the source again, if fewer.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Times that everything is measured.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.01, help="Least length of a measured loop.")] = 5.0,
    device: Device = "auto",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compare a precompute with its bare encoder and with the extraction loops of fast-DiT and PixArt.

    Example: leandit bench precompute --source coco --scratch bench
    """
    from ...bench.encode.precompute import run
    from ...bench.encode.rates import PrecomputeRequest
    from ...bench.encode.ratios import render
    from ...terminal.progress import ProgressLine

    request = PrecomputeRequest(
        source,
        scratch.resolve(),
        torch_device(device),
        vae=vae,
        text=text,
        tokenizer=tokenizer,
        records=records,
        rounds=rounds,
        seconds=seconds,
        overrides=overrides or [],
    )
    with ProgressLine() as progress:
        result = run(request, progress)
    print_result(result, render, as_json=as_json)


@bench.command("planner")
def bench_planner(
    device: Device = "auto",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compare the memory that 'plan train' says with the peak of real steps, for a list of configurations.

    Example: leandit bench planner --device cpu
    """
    from ...bench.training.planner import ON_CPU, ON_GPU, render, run
    from ...terminal.progress import ProgressLine

    where = torch_device(device)
    with ProgressLine() as progress:
        result = run(where, overrides or [], ON_GPU if where.type == "cuda" else ON_CPU, progress)
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


@bench.command("kernels")
def bench_kernels(
    recipe: Recipe,
    resolution: Annotated[int, typer.Option(min=8, help="Side of the pictures, in pixels.")] = 256,
    fast_dit: FastDit = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Count the kernels of a training step and the bytes that they move, ours and the usual ones; on any machine.

    Example: leandit bench kernels dit-xl-2-256 --set run.global_batch=64
    """
    import torch

    from ....train.config import load
    from ...bench.training.kernels import render, run
    from ...bench.training.steps import StepRequest
    from ...plan.workload import workload_at_resolution
    from ...terminal.progress import ProgressLine

    workload = workload_at_resolution(load(recipe, overrides or []), resolution)
    request = StepRequest(workload, torch.device("cpu"), 1, 1, "synthetic", fast_dit=fast_dit)
    with ProgressLine() as progress:
        result = run(request, progress)
    print_result(result, render, as_json=as_json)


@bench.command("learning")
def bench_learning(
    out: Annotated[Path, output("Folder for pictures, store, runs and results; the same command resumes.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each recipe.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Of each run.")] = 800,
    pictures: Annotated[int, typer.Option(min=12, help="To draw.")] = 3000,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compare what REPA, routing and contrastive flow bring a small DiT on the demo's pictures, on a CPU.

    Example: leandit bench learning --out learning
    """
    from ...bench.training.learning import LearningRequest, render, run
    from ...bench.training.learning_chart import draw
    from ...terminal.progress import ProgressLine

    with ProgressLine() as progress:
        result = run(LearningRequest(out.resolve(), seeds, steps, pictures, tuple(overrides or ())), progress)
    draw(result, out / "learning.png")
    print_result(result, render, as_json=as_json)


@bench.command("caching")
def bench_caching(
    recipe: Recipe,
    scratch: Annotated[Path, output("Folder for the store and random encoders; they stay there.")],
    resolution: Annotated[int, typer.Option(min=8, help="Side of the pictures, in pixels.")] = 256,
    vae: Annotated[str, typer.Option(help="Hub id, folder, or random:sd.")] = "random:sd",
    text: Annotated[str | None, typer.Option(help="Hub id, folder, or random:t5-xxl and others; else none.")] = None,
    tokenizer: Annotated[Path | None, local_input("Folder with the tokenizer of a random text encoder.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that both are measured.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each, in each round.")] = 10,
    device: Device = "auto",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compare training on a store with training that encodes every picture and caption again.

    Example: leandit bench caching dit-b-2-256 --scratch bench
    """
    from ....train.config import load
    from ...bench.encode.caching import CachingRequest, render, run
    from ...terminal.progress import ProgressLine

    loaded = load(recipe, overrides or [])
    where = torch_device(device)
    request = CachingRequest(loaded, resolution, vae, text, tokenizer, scratch.resolve(), where, rounds, steps)
    with ProgressLine() as progress:
        result = run(request, progress)
    print_result(result, render, as_json=as_json)


@bench.command("gpu")
def bench_gpu(
    out: Annotated[Path, output("Folder of the results; the same command goes on where it was cut.")],
    minutes: Annotated[
        float, typer.Option(min=0.1, help="For all of it; a cell that might not end by then is left out.")
    ] = 40,
    scratch: Annotated[
        Path | None, output("Folder for stores, random encoders and checkpoints, 60 GB; else a folder of --out.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny sizes, as always on a CPU: to see that it works.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Try cells again that have failed or were skipped.")] = False,
    fast_dit: FastDit = None,
    device: Device = "auto",
) -> None:
    """Measure all that needs a GPU, the most worthy first, each in a process of its own; cut it at any second.

    Example: leandit bench gpu --minutes 40 --out gpu
    """
    from ...bench.gpu.runner import GpuRequest, run
    from ...bench.training.fast_dit import check_checkout

    if fast_dit:
        check_checkout(fast_dit)
        fast_dit = fast_dit.resolve()
    where = torch_device(device)
    is_tiny = tiny or where.type == "cpu"
    folders = out.resolve(), (scratch or out / "scratch").resolve()
    request = GpuRequest(*folders, str(where), minutes, is_tiny, again, fast_dit)
    run(request, print_line)
    print_line(f"next: leandit bench table {out}")


@bench.command("table")
def bench_table(
    results: Annotated[Path, typer.Argument(parser=read_path, metavar="DIR", help="What 'bench gpu' has measured.")],
) -> None:
    """Print the results of 'leandit bench gpu' as tables in Markdown.

    Example: leandit bench table gpu
    """
    from ...bench.gpu.results import read_results
    from ...bench.gpu.tables import render

    print(render(read_results(results)))
