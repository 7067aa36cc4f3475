"""``leandit sample``: a grid of pictures, or a set of them for an evaluation."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...datasets.errors import RecipeError
from ...datasets.revisions.catalog import check_store
from ..terminal.text import print_rows
from .options import AsJson, Device, Run, local_input, output, rank_device
from .preflight import check_run, check_subjects

if TYPE_CHECKING:  # torch takes a second to import
    from ...train.parallel.ranks import Ranks

LARGEST_GRID = 256  # pictures; of more, each has a file


class SamplerName(StrEnum):
    """What ``--sampler`` may be; those of ``train.sample.Sampler``."""

    auto = "auto"
    euler = "euler"
    heun = "heun"
    ddim = "ddim"
    dpm = "dpm"
    ddpm = "ddpm"


class PrecisionName(StrEnum):
    """What ``--precision`` may be."""

    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


def sample(
    run: Run,
    out: Annotated[Path, output("Folder for grid.png and samples.json, or for the pictures of a set.")],
    label: Annotated[list[str] | None, typer.Option(help="Class name, folder (wnid) or index; repeatable.")] = None,
    caption: Annotated[list[str] | None, typer.Option(help="Caption; repeatable.")] = None,
    num: Annotated[
        int | None,
        typer.Option(min=1, help="Pictures of each label or caption, else of all; without it 1 of each, else 16."),
    ] = None,
    npz: Annotated[bool, typer.Option("--npz", help=f"A set of files, as for more than {LARGEST_GRID} pictures.")] = (
        False
    ),
    batch: Annotated[int, typer.Option(min=1, help="Pictures drawn at once.")] = 64,
    bucket: Annotated[str | None, typer.Option(help="HxW in pixels, else the most common bucket.")] = None,
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance; 1 is none.")] = 4.0,
    guidance_interval: Annotated[
        str, typer.Option(metavar="LOW,HIGH", help="Times of guidance: 0 is data, 1 noise.")
    ] = "0,1",
    guidance_channels: Annotated[int, typer.Option(min=0, help="Guide the first channels alone; 0: all.")] = 0,
    sampler: Annotated[
        SamplerName, typer.Option(help="flow: euler, heun, dpm. ddpm: ddim, dpm, ddpm.")
    ] = SamplerName.auto,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps of the solver.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise.")] = 0,
    precision: Annotated[PrecisionName, typer.Option(help="Of the model's forwards; tf32 and bf16 on a GPU.")] = (
        PrecisionName.fp32
    ),
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile the blocks; for many pictures.")] = False,
    recipe: Annotated[str, typer.Option(help="Train recipe of a published checkpoint, given as RUN.")] = "",
    encoders: Annotated[str, typer.Option(help="Precompute recipe of its VAE and text encoder.")] = "",
    store: Annotated[Path | None, local_input("Store of the captions, else the run's own.")] = None,
    vae: Annotated[str | None, typer.Option(help="Folder or hub id to decode with, else the store's VAE.")] = None,
    text: Annotated[str | None, typer.Option(help="Folder or hub id for captions not in the store.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Draw pictures with a trained model: a PNG grid, or files and an .npz for an evaluation.

    Example: leandit sample runs/dit-s --out samples --label 207 --label 360
    """
    interval = interval_of(guidance_interval)
    if not (recipe or encoders):  # else it is a published checkpoint, which may lie on the hub
        check_run(run)
        check_subjects(run, label or (), caption or ())
    if store:
        check_store(store)
    from ..sample.sampler import SampleRequest
    from ..sample.sampler import sample as draw

    ranks = place()
    where = rank_device(device, ranks.local_rank if ranks.world_size > 1 else None)
    request = SampleRequest(
        labels=label or (),
        captions=caption or (),
        count=num or 0,
        bucket=bucket,
        steps=steps,
        guidance=guidance,
        seed=seed,
        sampler=sampler.value,
        interval=interval,
        guided_channels=guidance_channels,
        precision=precision.value,
        batch=batch,
        recipe=recipe,
        encoders=encoders,
        compiled=compiled,
    )
    places = {"out": out, "device": where, "store": store, "vae": vae, "text": text}
    if npz or request.total > LARGEST_GRID or ranks.world_size > 1:
        from ..sample.sample_set import sample_set
        from ..terminal.progress import ProgressLine

        with ProgressLine() if ranks.is_first else contextlib.nullcontext() as line:
            result = sample_set(run, request, **places, ranks=ranks, progress=line or (lambda *_: None))
        shown = ("snapshot", "bucket", "sampler", "guidance", "npz")
        first = ("samples", f"{result['there']} of {result['of']}, {result['drawn']} drawn by this process")
    else:
        result = draw(run, request, **places)
        shown, first = ("snapshot", "bucket", "sampler", "guidance", "grid"), ("samples", str(len(result["samples"])))
    if result["warning"] and ranks.is_first:
        print(f"leandit: {result['warning']}", file=sys.stderr)
    if as_json:
        print(json.dumps(result, indent=1))
    elif ranks.is_first or result.get("npz"):
        print_rows([first, *((name, str(result[name])) for name in shown if result[name] is not None)])


def place() -> Ranks:
    """Which process this is; they never meet, so where is no matter."""
    from ...train.parallel.ranks import read_ranks

    return read_ranks({"MASTER_ADDR": "", "MASTER_PORT": "", **os.environ})


def interval_of(text: str) -> tuple[float, float]:
    """Read "LOW,HIGH".

    Raises: RecipeError: it is not that.
    """
    low, comma, high = text.partition(",")
    try:
        interval = float(low), float(high)
    except ValueError:
        comma, interval = "", (0.0, 0.0)
    if not comma or not 0 <= interval[0] <= interval[1] <= 1:
        raise RecipeError(f"--guidance-interval '{text}': needed two times from 0 (data) to 1 (noise), as 0.1,0.8.")
    return interval
