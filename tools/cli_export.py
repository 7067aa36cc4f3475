"""``leandit export``: what other programs load."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import AsJson, print_rows


class Layout(StrEnum):
    """What ``--format`` may be."""

    diffusers = "diffusers"
    official = "official"


def export(
    run: Annotated[Path, typer.Argument(help="Run, or a folder that 'leandit average' has made.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    layout: Annotated[
        Layout, typer.Option("--format", help="A pipeline of diffusers, or the official layout of DiT.")
    ] = Layout.diffusers,
    step: Annotated[int, typer.Option(min=0, help="Of which snapshot; 0: the newest.")] = 0,
    encoders: Annotated[
        bool, typer.Option("--encoders", help="Copy the store's VAE, text encoder and tokenizer too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the averaged weights of a run as a folder that diffusers' pipelines load.

    Example: leandit export runs/dit-s --out dit-s-diffusers
    """
    from .export import export as write

    result = write(run, out, layout=layout.value, step=step, encoders=encoders)
    for note in result["notes"]:
        print(f"leandit: {note}", file=sys.stderr)
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        shown = ("snapshot", "format", "pipeline", "out")
        print_rows([(name, str(result[name])) for name in shown if result[name] is not None])
