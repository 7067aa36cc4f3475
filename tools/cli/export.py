"""``leandit export``: what other programs load."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..terminal.text import print_rows
from .options import AsJson, Run, output
from .preflight import check_run


class Layout(StrEnum):
    """What ``--format`` may be."""

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
    as_json: AsJson = False,
) -> None:
    """Write the averaged weights of a run as a folder that diffusers' pipelines load.

    Example: leandit export runs/dit-s --out dit-s-diffusers
    """
    check_run(run)
    from ..export.export import export as write

    result = write(run, out, layout=layout.value, step=step, encoders=encoders, vae=vae, text=text)
    for note in result["notes"]:
        print(f"leandit: {note}", file=sys.stderr)
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        shown = ("snapshot", "format", "pipeline", "out")
        print_rows([(name, str(result[name])) for name in shown if result[name] is not None])
