"""``leandit export``: a model for other programs; ``leandit publish``: a store or a run for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from ....train.weights.folders import is_run
from ...terminal.outcome import command_without, print_next
from ...terminal.text import print_result
from ..options import AsJson, Base, DryRun, Run, Weights, output, print_line, read_path
from ..preflight import check_run

LAYOUT_HELP = "A diffusers pipeline, or DiT's official layout."
Layout = Annotated[Literal["diffusers", "official"], Option("--format", help=LAYOUT_HELP)]


def export(
    run: Run,
    out: Annotated[Path, output("Folder to create.")],
    layout: Layout = "diffusers",
    step: Annotated[int, Option(min=0, help="Step of the snapshot; 0: the newest.")] = 0,
    encoders: Annotated[
        bool, Option("--encoders", help="Copy the store's VAE, text encoder and tokenizer too.")
    ] = False,
    vae: Annotated[str | None, Option(help="Current location of the VAE: folder or hub id.")] = None,
    text: Annotated[str | None, Option(help="Current location of the text encoder: folder or hub id.")] = None,
    merged: Annotated[bool, Option("--merged", help="Merge the adapters into the weights.")] = False,
    base: Base = "",
    weights: Weights = "averaged",
    as_json: AsJson = False,
) -> None:
    """Export the weights of a run for diffusers' pipelines.

    Example: leandit export runs/dit-s --out dit-s-diffusers
    """
    check_run(run)
    from ...export.export import export as write

    options = {"encoders": encoders, "vae": vae, "text": text, "merged": merged, "base": base}
    result = write(run, out, layout=layout, step=step, weights=weights, **options)
    for note in result["notes"]:
        print_line(note)
    names = ("snapshot", "format", "pipeline", "out")
    rows = [(name, str(result[name])) for name in names if result[name] is not None]
    print_result(result, lambda _: rows, as_json=as_json)


def publish(
    target: Annotated[Path, Argument(parser=read_path, metavar="STORE|RUN", help="Folder of a store or a run.")],
    to: Annotated[str, Option(help="hf://datasets/OWNER/NAME for a store, hf://OWNER/NAME for a run.")],
    private: Annotated[
        bool | None, Option("--private/--public", help="Visibility of the repository; required.")
    ] = None,
    licence: Annotated[
        str,
        Option("--license", help="License of the images (store) or weights (run); required."),
    ] = "",
    encoder_licence: Annotated[str, Option("--encoder-license", help="License of the encoders; required.")] = "",
    branch: Annotated[str, Option("--revision", help="Branch of the repository.")] = "main",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Publish a store or a run on the Hugging Face hub, with a card; the same command resumes.

    Example: leandit publish imagenet-256 --to hf://datasets/OWNER/NAME --private --license NAME --encoder-license mit
    """
    from ...export.publish import publish as send
    from ...export.publish import render
    from ...terminal.progress import ProgressLine

    terms = {"private": private, "licence": licence, "encoder_licence": encoder_licence}
    with ProgressLine() as progress:
        result = send(target, to, progress, **terms, branch=branch, dry_run=dry_run)
    for note in result["notes"]:
        print_line(note)
    print_result(result, render, as_json=as_json)
    if dry_run:
        print_next(command_without("--dry-run"))
    elif branch == "main" and not is_run(target):
        print_next(["inspect", to])
