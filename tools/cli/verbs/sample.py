"""``leandit sample``: a grid of images, or a set of them; ``leandit evaluate``: its distance from a reference."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from typer import Option

from ....datasets.disk.files import write_atomic
from ....datasets.disk.hashing import canonical_json
from ....datasets.errors import RecipeError
from ....train.weights.folders import RUN
from ...sample.request import LARGEST_GRID, EvaluateRequest, SampleRequest
from ...terminal.outcome import Command, print_next
from ...terminal.text import print_result, print_rows
from ..options import (
    AsJson,
    Device,
    Run,
    local_input,
    output,
    print_line,
    rank_device,
    rank_progress,
    read_path,
    torch_device,
)
from ..preflight import check_evaluation, check_run, check_subjects

NOT_EVALUATED = (
    "labels",
    "captions",
    "image",
    "count",
    "batch",
    "recipe",
    "encoders",
    "compiled",
)  # options of sample alone


def expand(name: str, request: Any, *left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose argument ``name`` is a dataclass: each of its fields with an ``Option`` becomes an option.

    Args:
      left_out: fields that keep their defaults.
    """
    hints = get_type_hints(request, include_extras=True)
    options = {
        field.name: inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if field.default is dataclasses.MISSING else field.default,  # a list is made by its factory
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(request)
        if get_origin(hints[field.name]) is Annotated and field.name not in left_out
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature, shown = inspect.signature(command, eval_str=True), list[inspect.Parameter]()
        for parameter in signature.parameters.values():
            is_request = parameter.name == name
            shown += options.values() if is_request else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            fields = {option: value for option in options if (value := values.pop(option)) is not None}
            command(**values, **{name: request(**fields)})

        run.__signature__ = signature.replace(parameters=shown)  # pyright: ignore[reportAttributeAccessIssue]
        return run

    return decorate


@expand("request", SampleRequest)
def sample(
    run: Run,
    out: Annotated[Path, output("Folder for grid.png and samples.json, or for the images of a set.")],
    request: SampleRequest,
    store: Annotated[Path | None, local_input("Store of the captions; default: the run's.")] = None,
    npz: Annotated[
        bool, Option("--npz", help=f"Write single files and an .npz, as for more than {LARGEST_GRID} images.")
    ] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Generate images with a trained model: a PNG grid, or files and an .npz for evaluation.

    Example: leandit sample runs/dit-s --out samples --label 207 --label 360
    """
    if not request.is_published:  # a published checkpoint may be on the hub
        check_run(run)
        check_subjects(run, request.labels, request.captions)
    if store:
        from ....datasets.revisions.catalog import check_store

        check_store(store)
    from ....train.parallel.ranks import read_ranks

    # Processes do not communicate, so the address of the first is not needed.
    ranks = read_ranks({"MASTER_ADDR": "", "MASTER_PORT": "", **os.environ})
    request = dataclasses.replace(request, store=store)
    where = {"out": out, "device": rank_device(device, ranks)}
    if npz or request.total > LARGEST_GRID or ranks.world_size > 1:
        from ...sample.sample import sample_set

        with rank_progress(ranks) as progress:
            result = sample_set(run, request, **where, ranks=ranks, progress=progress)
        file, drawn = "npz", f"{result['there']} of {result['of']}, {result['drawn']} drawn by this process"
    else:
        from ...sample.sample import sample_grid

        result = sample_grid(run, request, **where)
        file, drawn = "grid", str(len(result["samples"]))
    if result["warning"] and ranks.is_first:
        print_line(result["warning"])
    if as_json or ranks.is_first or result.get("npz"):
        names = ("snapshot", "bucket", "sampler", "guidance", file)
        rows = [("samples", drawn), *((name, str(result[name])) for name in names if result[name] is not None)]
        print_result(result, lambda _: rows, as_json=as_json)
        if result.get("npz"):
            print_next(["evaluate", out, "--against", "REFERENCE"])
        elif file == "grid" and not request.recipe:
            print_next(*_after_grid(run, request.base))


def _after_grid(run: Path, base: str) -> list[Command]:
    """What to run after a grid: look at the curves of the run, and export it in a layout that holds its model."""
    from ...export.export import fitting_layout

    layout = fitting_layout(run)
    commands: list[Command] = [["report", run, "--out", f"{run}.html"]] if (run / RUN).is_file() else []
    if layout and not (out := Path(f"{run}-{layout}")).exists():
        how = ["--format", layout] if layout != "diffusers" else []
        commands.append(["export", run, "--out", out, *how, *(["--base", base] if base else [])])
    return commands


@expand("measure", EvaluateRequest)
@expand("draw", SampleRequest, *NOT_EVALUATED)
def evaluate(
    target: Annotated[
        Path, typer.Argument(parser=read_path, metavar="RUN|FOLDER|NPZ", help="Run to sample from, or images.")
    ],
    *,
    against: Annotated[
        Path | None,
        local_input("Reference: a store, a folder of images, or an .npz of images or statistics.", "--against"),
    ] = None,
    keep: Annotated[
        Path | None,
        output("Cache the reference's statistics in this .npz.", "--keep-statistics"),
    ] = None,
    captions: Annotated[
        Path | None, local_input("Captions of the images: a samples.json or metadata.jsonl; default: the folder's.")
    ] = None,
    out: Annotated[Path | None, output("Folder for the images generated from a run.")] = None,
    num: Annotated[int, Option(min=6, help="Images to generate from a run.")] = 50_000,
    measure: EvaluateRequest,
    draw: SampleRequest,
    json_file: Annotated[Path | None, output("Write the numbers here, as one JSON object.", "--json")] = None,
    device: Device = "auto",
) -> None:
    """Measure how far images are from a reference: Fréchet distance, KID, CMMD, precision, recall, CLIP score.

    Example: leandit evaluate runs/xl --against imagenet-256 --source imagenet/train --out fid
    """
    check_evaluation(target, against, clip=measure.clip, captions=captions, features=measure.features, out=out)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise RecipeError(
            "evaluate: expected one process. Draw in several with 'leandit sample RUN --num N --out OUT', then measure "
            "with the same options and --out in one: it draws only what is missing."
        )
    from ...sample.evaluation.evaluate import evaluate as run_evaluation
    from ...sample.evaluation.evaluate import rows_of
    from ...terminal.progress import ProgressLine

    paths = {"target": target, "against": against, "keep": keep, "captions": captions, "out": out}
    request = dataclasses.replace(measure, **paths, draw=dataclasses.replace(draw, count=num))
    with ProgressLine() as progress:
        result = run_evaluation(request, device=torch_device(device), progress=progress)
    if json_file:
        write_atomic(json_file, canonical_json(result))
    for note in result["notes"]:
        print_line(note)
    print_rows(rows_of(result))
    if (target / RUN).is_file():
        print_next(["report", target, "--out", f"{target}.html"])
