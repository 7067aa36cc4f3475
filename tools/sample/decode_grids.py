"""Decode the grids that a run has drawn: ``samples/step-<step>.safetensors`` to ``.png``, the oldest first.

The trainer starts this as a process of its own: python -m leandit.tools.sample.decode_grids RUN/samples [--vae PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ...datasets.disk.files import remove
from ...datasets.disk.strays import write_output
from ...datasets.format.schema import LatentSpec
from ...errors import DamageError, EncoderError, LeanditError
from ...train.run.evaluation.decoding import IMAGE, LATENTS, grid_files
from ..inspection.images import EDITED, Cell, LatentDecoder, draw_sheet, png_bytes
from .sampler import decode_in_parts

DECODED = 4  # images decoded at once
NICENESS = 10  # the loader of the run comes first
CORES_SHARE = 4  # a quarter of the cores


def decode_grids(folder: Path, vae: str | None = None) -> None:
    """Decode all grids of a folder, also those that come meanwhile; a decoded one loses its latents.

    Args:
      vae: hub id or folder instead of the VAE that made the store.
    Raises: EncoderError: the VAE cannot be loaded, or is another one; DamageError: a grid cannot be read; the others
      are decoded before.
    """
    decoder: LatentDecoder | None = None
    unreadable: dict[Path, DamageError] = {}
    while path := next((path for path in grid_files(folder, LATENTS).values() if path not in unreadable), None):
        try:
            latents, references, spec, grid = _read(path)
        except DamageError as error:
            unreadable[path] = error
            continue
        if decoder is None:
            decoder = LatentDecoder(grid["vae"], spec, vae, torch.device("cpu"), where=f"grid '{path}'")
            if not (vae or decoder.is_own):
                raise EncoderError(
                    f"vae '{decoder.identity.model}': it is not the one that made the store. Name it with --vae to "
                    "use it."
                )
        images = decode_in_parts(decoder.decode, latents, DECODED)
        cells = [Cell(pixels, name) for pixels, name in zip(images, grid["names"], strict=True)]
        if references is not None:
            originals = decode_in_parts(decoder.decode, references, DECODED)
            cells = [cell._replace(original=pixels) for cell, pixels in zip(cells, originals, strict=True)]
        sheet = draw_sheet(cells, titles=None if references is None else EDITED)
        write_output(path.with_suffix(f".{IMAGE}"), png_bytes(sheet))
        remove(path)
    for error in unreadable.values():
        raise error


def _read(path: Path) -> tuple[np.ndarray, np.ndarray | None, LatentSpec, dict[str, Any]]:
    """(B, C, H, W) float32 raw latents, those of the edited images or None, their spec, and the rest of the file."""
    try:
        with safe_open(path, framework="np") as file:
            grid = json.loads(file.metadata()["grid"])
            latents, spec = file.get_tensor("latents"), LatentSpec.model_validate(grid["latent"])
            if latents.ndim != 4 or latents.shape[1] != spec.channels:
                raise ValueError(f"latents of {latents.shape}, expected (B, {spec.channels}, H, W)")
            references = file.get_tensor("reference") if "reference" in file.keys() else None  # noqa: SIM118
            if references is not None and references.shape != latents.shape:
                raise ValueError(f"edited images of {references.shape}, expected {latents.shape}")
            return latents, references, spec, grid
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamageError(f"grid '{path}': it cannot be read ({error}). Remove it.") from error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Decode the grids that a run has sampled.")
    parser.add_argument("folder", type=Path, help="samples/ of a run")
    parser.add_argument("--vae", help="hub id or folder of a VAE other than the store's")
    arguments = parser.parse_args()
    os.nice(NICENESS)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // CORES_SHARE))
    try:
        decode_grids(arguments.folder, arguments.vae)
    except LeanditError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from error
