"""``leandit export``: a model for other programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ...terminal.text import print_result
from ..options import AsJson, Base, Run, output, print_line
from ..preflight import check_run


class Layout(StrEnum):
    """Values of ``--format``."""

    diffusers = "diffusers"
    official = "official"


def export(
    run: Run,
    out: Annotated[Path, output("Folder to make.")],
    layout: Annotated[
        Layout, typer.Option("--format", help="A pipeline of diffusers, or the official layout of DiT.")
    ] = Layout.diffusers,
    step: Annotated[int, typer.Option(min=0, help="Of which snapshot; 0: the newest.")] = 0,
    encoders: Annotated[
        bool, typer.Option("--encoders", help="Copy the store's VAE, text encoder and tokenizer too.")
    ] = False,
    vae: Annotated[str | None, typer.Option(help="Where the VAE lies now: folder or hub id.")] = None,
    text: Annotated[str | None, typer.Option(help="Where the text encoder lies now: folder or hub id.")] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="Of a run with adapters: the model with them, not the adapters alone.")
    ] = False,
    base: Base = "",
    as_json: AsJson = False,
) -> None:
    """Write the averaged weights of a run as a folder that diffusers' pipelines load.

    Example: leandit export runs/dit-s --out dit-s-diffusers
    """
    check_run(run)
    from ...export.export import export as write

    result = write(
        run, out, layout=layout.value, step=step, encoders=encoders, vae=vae, text=text, merged=merged, base=base
    )
    for note in result["notes"]:
        print_line(note)
    names = ("snapshot", "format", "pipeline", "out")
    rows = [(name, str(result[name])) for name in names if result[name] is not None]
    print_result(result, lambda _: rows, as_json=as_json)
