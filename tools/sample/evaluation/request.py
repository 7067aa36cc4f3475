"""What ``leandit evaluate`` measures, and how: its options. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from ..request import SampleRequest

INCEPTION = "inception"


@dataclass(frozen=True)
class EvaluateRequest:
    """What to measure, and how. A field with an ``Option`` is one of the command line.

    Args:
      target: a run, a folder of images, or a .npz file.
      against: the reference: a store, a folder or a .npz file; None: only ``clip``.
      keep: file for the statistics of the reference.
      captions: as of ``read_captions``; None: ``samples.json`` or ``metadata.jsonl`` in the folder.
      draw: what a run draws; its ``vae`` decodes a store too.
      out: folder for it.
    """

    target: Path = Path()
    against: Path | None = None
    features: Annotated[
        str, Option(help='"inception", a file of its weights, or folder or hub id of a vision model.')
    ] = INCEPTION
    resize: Annotated[
        Literal["antialiased", "tensorflow"] | None,
        Option(help="Resize of Inception: tensorflow as ADM's evaluator and the original FID."),
    ] = None
    source: Annotated[list[str], Option(help="Source images of the store, instead of decoding it; repeatable.")] = (
        field(default_factory=list)
    )
    crop_px: Annotated[
        int, Option("--crop", min=0, metavar="PX", help="Crop images of folders to squares, as ADM; 0: as they are.")
    ] = 0
    most: Annotated[
        int, Option("--against-num", min=0, help="Images of the reference, spread evenly over it; 0: all.")
    ] = 0
    clip: Annotated[
        str | None, Option("--clip", help="Folder or hub id of a CLIP, for the CLIP score of the captions.")
    ] = None
    keep: Path | None = None
    captions: Path | None = None
    draw: SampleRequest = field(default_factory=SampleRequest)
    out: Path | None = None
