"""``leandit sample``: a grid of pictures, or a set of them; ``leandit evaluate``: its distance from a reference."""

from __future__ import annotations

import contextlib
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ....datasets.errors import RecipeError
from ....datasets.revisions.catalog import check_store
from ....train.weights.folders import RUN
from ...terminal.next_steps import print_next
from ...terminal.text import print_result, print_rows
from ..options import (
    AsJson,
    Base,
    Device,
    Run,
    Weights,
    WeightsName,
    local_input,
    output,
    print_line,
    rank_device,
    read_path,
)
from ..preflight import check_evaluation, check_run, check_subjects

if TYPE_CHECKING:  # torch takes a second to import
    from ....train.parallel.ranks import Ranks
    from ...sample.sampler import SampleRequest

LARGEST_GRID = 256  # pictures; a larger number becomes a set of files


class SamplerName(StrEnum):
    """Values of ``--sampler``; those of ``train.sampling.schedulers.Sampler``."""

    auto = "auto"
    euler = "euler"
    heun = "heun"
    sde = "sde"
    ddim = "ddim"
    dpm = "dpm"
    ddpm = "ddpm"


class DiffusionName(StrEnum):
    """Values of ``--diffusion``; those of ``train.sampling.euler_maruyama.Diffusion``."""

    sigma = "sigma"
    linear = "linear"
    constant = "constant"
    decreasing = "decreasing"
    increasing_decreasing = "increasing-decreasing"


class LastStepName(StrEnum):
    """Values of ``--last-step``; those of ``train.sampling.euler_maruyama.LastStep``."""

    mean = "mean"
    euler = "euler"
    tweedie = "tweedie"


class PrecisionName(StrEnum):
    """Values of ``--precision``."""

    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


Num = typer.Option(min=1, help="Pictures of each label or caption, else of all; without it 1 of each, else 16.")
Npz = typer.Option("--npz", help=f"A set of files, as for more than {LARGEST_GRID} pictures.")
Interval = typer.Option(metavar="LOW,HIGH", help="Times of guidance: 0 is data, 1 noise.")
Channels = typer.Option(min=0, help="Guide the first channels alone; 0: all.")
SamplerOption = typer.Option(help="flow: euler, heun, dpm, sde. ddpm: ddim, dpm, ddpm.")
Shift = typer.Option(min=0.01, help="Of the times of flow towards noise, else that of training.")
DiffusionOption = typer.Option(help="Of sde: its diffusion coefficient.")
LastStepOption = typer.Option(help="Of sde: its last step, without noise.")
Compile = typer.Option("--compile/--no-compile", help="torch.compile the blocks; else a GPU does for many pictures.")
Precision = typer.Option(help="Of the model's forwards; tf32 and bf16 on a GPU.")


def sample(
    run: Run,
    out: Annotated[Path, output("Folder for grid.png and samples.json, or for the pictures of a set.")],
    label: Annotated[list[str] | None, typer.Option(help="Class name, folder (wnid) or index; repeatable.")] = None,
    caption: Annotated[list[str] | None, typer.Option(help="Caption; repeatable.")] = None,
    num: Annotated[int | None, Num] = None,
    npz: Annotated[bool, Npz] = False,
    batch: Annotated[int, typer.Option(min=1, help="Pictures drawn at once.")] = 64,
    bucket: Annotated[str | None, typer.Option(help="HxW in pixels, else the most common bucket.")] = None,
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance; 1 is none.")] = 4.0,
    guidance_interval: Annotated[str, Interval] = "0,1",
    guidance_channels: Annotated[int, Channels] = 0,
    sampler: Annotated[SamplerName, SamplerOption] = SamplerName.auto,
    shift: Annotated[float | None, Shift] = None,
    diffusion: Annotated[DiffusionName, DiffusionOption] = DiffusionName.sigma,
    last_step: Annotated[LastStepName, LastStepOption] = LastStepName.mean,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps of the solver.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise.")] = 0,
    precision: Annotated[PrecisionName, Precision] = PrecisionName.fp32,
    compiled: Annotated[bool | None, Compile] = None,
    recipe: Annotated[str, typer.Option(help="Train recipe of a published checkpoint, given as RUN.")] = "",
    encoders: Annotated[str, typer.Option(help="Precompute recipe of its VAE and text encoder.")] = "",
    store: Annotated[Path | None, local_input("Store of the captions, else the run's own.")] = None,
    vae: Annotated[str | None, typer.Option(help="Folder or hub id to decode with, else the store's VAE.")] = None,
    text: Annotated[str | None, typer.Option(help="Folder or hub id for captions not in the store.")] = None,
    base: Base = "",
    weights: Weights = WeightsName.averaged,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Draw pictures with a trained model: a PNG grid, or files and an .npz for an evaluation.

    Example: leandit sample runs/dit-s --out samples --label 207 --label 360
    """
    interval = parse_interval(guidance_interval)
    if not (recipe or encoders):  # a published checkpoint may be on the hub
        check_run(run)
        check_subjects(run, label or (), caption or ())
    if store:
        check_store(store)
    from ...sample.sampler import SampleRequest

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
        shift=shift,
        diffusion=diffusion.value,
        last_step=last_step.value,
        precision=precision.value,
        batch=batch,
        recipe=recipe,
        encoders=encoders,
        compiled=compiled,
        base=base,
        weights=weights.value,
    )
    places = {"out": out, "store": store, "vae": vae, "text": text}
    _draw(run, request, read_rank(), device, places, as_set=npz, as_json=as_json)


def _draw(
    run: Path, request: SampleRequest, ranks: Ranks, device: str, places: dict[str, Any], *, as_set: bool, as_json: bool
) -> None:
    """Draw a grid or a set; the first rank reports, and any rank that completes a set."""
    places["device"] = rank_device(device, ranks.local_rank if ranks.world_size > 1 else None)
    if as_set or request.total > LARGEST_GRID or ranks.world_size > 1:
        from ...sample.sample_set import sample_set
        from ...terminal.progress import ProgressLine

        with ProgressLine() if ranks.is_first else contextlib.nullcontext() as line:
            result = sample_set(run, request, **places, ranks=ranks, progress=line or (lambda *_: None))
        file, drawn = "npz", f"{result['there']} of {result['of']}, {result['drawn']} drawn by this process"
    else:
        from ...sample.sampler import sample as draw_grid

        result = draw_grid(run, request, **places)
        file, drawn = "grid", str(len(result["samples"]))
    if result["warning"] and ranks.is_first:
        print_line(result["warning"])
    if as_json or ranks.is_first or result.get("npz"):
        names = ("snapshot", "bucket", "sampler", "guidance", file)
        rows = [("samples", drawn), *((name, str(result[name])) for name in names if result[name] is not None)]
        print_result(result, lambda _: rows, as_json=as_json)
        if result.get("npz"):
            print_next(["evaluate", places["out"], "--against", "REFERENCE"])
        elif file == "grid" and not request.recipe:
            print_next(*_after_grid(run, request.base))


def _after_grid(run: Path, base: str) -> list[list[object]]:
    """What to run after a grid: look at the curves of the run, and export it in a layout that holds its model."""
    from ...export.export import fitting_layout

    layout = fitting_layout(run)
    commands: list[list[object]] = [["report", run, "--out", f"{run}.html"]] if (run / RUN).is_file() else []
    if layout and not (out := Path(f"{run}-{layout}")).exists():
        how = ["--format", layout] if layout != "diffusers" else []
        commands.append(["export", run, "--out", out, *how, *(["--base", base] if base else [])])
    return commands


def read_rank() -> Ranks:
    """Which process this is. Processes do not communicate, so the address of the first is not needed."""
    from ....train.parallel.ranks import read_ranks

    return read_ranks({"MASTER_ADDR": "", "MASTER_PORT": "", **os.environ})


def parse_interval(text: str) -> tuple[float, float]:
    """Read "LOW,HIGH".

    Raises: RecipeError: not two times in order.
    """
    low, comma, high = text.partition(",")
    try:
        interval = float(low), float(high)
    except ValueError:
        comma, interval = "", (0.0, 0.0)
    if not comma or not 0 <= interval[0] <= interval[1] <= 1:
        raise RecipeError(f"--guidance-interval '{text}': needed two times from 0 (data) to 1 (noise), as 0.1,0.8.")
    return interval


class FeatureResize(StrEnum):
    """Values of ``--resize``."""

    antialiased = "antialiased"
    tensorflow = "tensorflow"


Target = typer.Argument(parser=read_path, metavar="RUN|FOLDER|NPZ", help="Run to draw from, or pictures.")
Reference = local_input("Reference: a store, a folder of pictures, or an .npz of pictures or statistics.", "--against")
Features = typer.Option(help='"inception", a file of its weights, or folder or hub id of a vision model.')
ResizeOption = typer.Option(help="Of Inception: tensorflow as ADM's evaluator and the original FID.")
Crop = typer.Option("--crop", min=0, metavar="PX", help="Crop the pictures of folders to squares, as ADM; 0: as is.")
Most = typer.Option("--against-num", min=0, help="Pictures of the reference, spread evenly over it; 0: all.")
Keep = output("Keep the statistics of the reference in this .npz, or read them from it.", "--keep-statistics")
Clip = typer.Option("--clip", help="Folder or hub id of a CLIP, for the CLIP score of the captions.")
CaptionFile = local_input("Captions of the pictures: samples.json or metadata.jsonl; else that of the folder.")


def evaluate(
    target: Annotated[Path, Target],
    against: Annotated[Path | None, Reference] = None,
    features: Annotated[str, Features] = "inception",
    resize: Annotated[FeatureResize | None, ResizeOption] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="Source pictures of the store, instead of decoding it; repeatable.")
    ] = None,
    crop_px: Annotated[int, Crop] = 0,
    most: Annotated[int, Most] = 0,
    keep: Annotated[Path | None, Keep] = None,
    clip: Annotated[str | None, Clip] = None,
    captions: Annotated[Path | None, CaptionFile] = None,
    out: Annotated[Path | None, output("Folder for the pictures that a run draws.")] = None,
    num: Annotated[int, typer.Option(min=6, help="Pictures that a run draws.")] = 50_000,
    bucket: Annotated[str | None, typer.Option(help="HxW in pixels, else the most common bucket.")] = None,
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance; 1 is none.")] = 4.0,
    guidance_interval: Annotated[str, Interval] = "0,1",
    guidance_channels: Annotated[int, Channels] = 0,
    sampler: Annotated[SamplerName, SamplerOption] = SamplerName.auto,
    shift: Annotated[float | None, Shift] = None,
    diffusion: Annotated[DiffusionName, DiffusionOption] = DiffusionName.sigma,
    last_step: Annotated[LastStepName, LastStepOption] = LastStepName.mean,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps of the solver.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise.")] = 0,
    precision: Annotated[PrecisionName, Precision] = PrecisionName.fp32,
    vae: Annotated[str | None, typer.Option(help="Folder or hub id to decode with, else the store's VAE.")] = None,
    text: Annotated[str | None, typer.Option(help="Folder or hub id for captions not in the store.")] = None,
    base: Base = "",
    weights: Weights = WeightsName.averaged,
    json_file: Annotated[Path | None, output("Write the numbers here, as one JSON object.", "--json")] = None,
    device: Device = "auto",
) -> None:
    """Measure how far pictures are from a reference: Fréchet distance, KID, CMMD, precision, recall, CLIP score.

    Example: leandit evaluate runs/xl --against imagenet-256 --source imagenet/train --out fid
    """
    interval = parse_interval(guidance_interval)
    check_evaluation(target, against, clip=clip, captions=captions, features=features, out=out)
    from ....train.parallel.ranks import read_ranks
    from ...sample.evaluation.evaluate import EvaluateRequest
    from ...sample.evaluation.evaluate import evaluate as measure
    from ...sample.sampler import SampleRequest
    from ...terminal.progress import ProgressLine

    ranks = read_ranks()
    draw = SampleRequest(
        count=num,
        bucket=bucket,
        guidance=guidance,
        sampler=sampler.value,
        steps=steps,
        seed=seed,
        interval=interval,
        guided_channels=guidance_channels,
        shift=shift,
        diffusion=diffusion.value,
        last_step=last_step.value,
        precision=precision.value,
        base=base,
        weights=weights.value,
    )
    request = EvaluateRequest(
        target=target,
        against=against,
        features=features,
        resize=resize.value if resize else None,
        source=tuple(source or ()),
        crop_px=crop_px,
        most=most,
        keep=keep,
        clip=clip,
        captions=captions,
        draw=draw,
        out=out,
        vae=vae,
        text=text,
    )
    with ProgressLine() if ranks.is_first else contextlib.nullcontext() as line:
        place = rank_device(device, ranks.local_rank if ranks.world_size > 1 else None)
        result = measure(request, device=place, ranks=ranks, progress=line or (lambda *_: None))
    if result:
        _report(result, json_file)
        if (target / RUN).is_file():
            print_next(["report", target, "--out", f"{target}.html"])


def _report(result: dict[str, Any], json_file: Path | None) -> None:
    """Print the numbers of an evaluation, and write them if asked."""
    from ....datasets.disk.files import write_atomic
    from ....datasets.disk.hashing import canonical_json
    from ...sample.evaluation.evaluate import rows_of

    if json_file:
        write_atomic(json_file, canonical_json(result))
    for note in result["notes"]:
        print_line(note)
    print_rows(rows_of(result))
