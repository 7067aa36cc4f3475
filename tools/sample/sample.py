"""``leandit sample``: a grid of images, or a set of numbered files, drawn by any number of processes.

Each image depends on the seed and its number alone; the process and the batch that draw it change only rounding.
Process r of n draws the missing numbers among r, r + n, r + 2n, ...; processes do not communicate. A process that finds
all images packs them for ADM's evaluator (guided-diffusion, evaluations/evaluator.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...datasets.disk.files import TEMPORARY_PREFIX, write_atomic
from ...datasets.disk.hashing import canonical_json, read_json
from ...datasets.disk.strays import sweep_strays, write_output
from ...datasets.format.buckets import bucket_size
from ...errors import DamageError, RunError
from ...precompute.run.clock import Progress
from ...train.parallel.ranks import ALONE, Ranks
from ..inspection.images import COLUMNS, EDITED, Cell, draw_sheet, png_bytes
from .npz import Rows, write_npz
from .request import SampleRequest
from .sampler import ImageSampler, open_sampler

SET, RESULT = "set.json", "samples.json"
SET_FILE = re.compile(r"set\.json|samples\.json|samples_[0-9x]+\.npz|[0-9]{6,}\.png")  # what a set consists of
LARGEST_ROW = 12  # images of one label or caption in a row of the grid


def sample_grid(run: Path, request: SampleRequest, *, out: Path, device: torch.device) -> dict[str, Any]:
    """Draw images and write ``grid.png`` and ``samples.json``.

    A grid shows all images of the first label or caption, then all of the next; image number n is that of a set.

    Args:
      run: a run, or with ``request.recipe`` a published checkpoint.
    Returns: what was drawn, as plain values.
    Raises: RunError, EncoderError, StoreError, RecipeError.
    """
    sampler = open_sampler(run, request, device, evenly=True)
    subject_count, of_each = request.num_subjects or 1, request.count or 1
    numbers = sorted(range(sampler.subjects.total), key=lambda number: number % subject_count)
    classes, subjects = sampler.snapshot.class_names, [sampler.subjects[number] for number in numbers]
    names = [each if isinstance(each, str) else f"{each}: {classes.describe(each)}" for each in subjects]
    cells = [Cell(pixels, name) for (_, pixels), name in zip(sampler.draw(numbers), names, strict=True)]
    titles = None
    if sampler.snapshot.spec.reference:
        originals, titles = sampler.originals(numbers), EDITED
        cells = [cell._replace(original=pixels) for cell, pixels in zip(cells, originals, strict=True)]
    columns = of_each if request.num_subjects and 1 < of_each <= LARGEST_ROW else COLUMNS
    write_output(out / "grid.png", png_bytes(draw_sheet(cells, columns=columns, titles=titles)))
    files = {"samples": names, "grid": str(out / "grid.png")}
    result = sampler.summary() | {"steps": request.steps, "seed": request.seed} | files
    write_output(out / RESULT, canonical_json(result))
    return result


def sample_set(
    run: Path,
    request: SampleRequest,
    *,
    out: Path,
    device: torch.device,
    ranks: Ranks = ALONE,
    progress: Progress,
) -> dict[str, Any]:
    """Draw the missing images of this process; pack the set if it is complete.

    Args:
      out: folder for ``000000.png`` and so on, the same for all processes.
    Returns: what was drawn and how many images exist, as plain values.
    Raises: RunError: the folder holds another set; RecipeError, EncoderError, StoreError.
    """
    sampler, count = open_sampler(run, request, device, processes=ranks.world_size), request.total
    open_set(out, describe(sampler))
    own = range(ranks.rank, count, ranks.world_size)
    missing = [number for number in own if not image_path(out, number).is_file()]
    existing = len(own) - len(missing)
    if missing:  # so that the rate counts from here
        progress("sample", existing, len(own))
    for done, (number, pixels) in enumerate(sampler.draw(missing), existing + 1):
        write_atomic(image_path(out, number), png_bytes(Image.fromarray(pixels)))
        progress("sample", done, len(own))
    num_images = sum(image_path(out, number).is_file() for number in range(count))
    packed = str(pack(out, count, sampler)) if num_images == count else None
    return sampler.summary() | {"drawn": len(missing), "there": num_images, "of": count, "npz": packed}


def describe(sampler: ImageSampler) -> dict[str, Any]:
    """Everything that determines the images of a set."""
    request = sampler.request
    more: dict[str, Any] = {} if sampler.shift is None else {"shift": sampler.shift}
    if sampler.sampler == "sde":
        more |= {"diffusion": request.diffusion, "last_step": request.last_step}
    return more | {
        "snapshot": sampler.snapshot.path.name,
        "weights_xxh3_128": sampler.snapshot.weights_hash,
        "decoder_sha256": sampler.decoder.identity.weights_sha256,
        "bucket": sampler.bucket,
        "sampler": sampler.sampler,
        "steps": request.steps,
        "guidance": sampler.guidance,
        "interval": list(request.interval),
        "guided_channels": request.guided_channels,
        "precision": request.precision,
        "seed": request.seed,
        "labels": sampler.subjects.labels,
        "captions": request.captions,
        **sampler.subjects.edits(),
    }


def open_set(out: Path, description: dict[str, Any]) -> None:
    """Start a set, or resume one with the same description.

    Raises: RunError: the folder holds another set, or other images; DamageError.
    """
    if not (out / SET).is_file():
        names = os.listdir(out) if out.is_dir() else []
        if any(Path(name).suffix in (".png", ".npz") and not name.startswith(TEMPORARY_PREFIX) for name in names):
            raise RunError(f"folder '{out}': its images are not a set generated by leandit. Use another --out.")
        write_atomic(out / SET, canonical_json(description))
    existing = read_json(out / SET)
    if not isinstance(existing, dict):
        raise DamageError(f"folder '{out}': '{SET}' is damaged. Use another --out.")
    for key in existing | description:
        before, now = existing.get(key), description.get(key)
        if before != now:
            raise RunError(
                f"folder '{out}': its images were generated with {key} {before!r}, this command has {now!r}. Use "
                "another --out."
            )
    sweep_strays(out, below=False, is_output=lambda name: SET_FILE.fullmatch(name) is not None)


def pack(out: Path, count: int, sampler: ImageSampler) -> Path:
    """Write ``samples.json`` and, unless it exists, ``samples_NxHxWx3.npz``.

    The .npz holds ``arr_0`` (N, H, W, 3) uint8 and, for classes, ``arr_1`` (N,) int64. One image is in memory at a
    time.
    """
    shape, subjects = (*bucket_size(sampler.bucket), 3), [sampler.subjects[number] for number in range(count)]
    path = out / f"samples_{count}x{shape[0]}x{shape[1]}x3.npz"
    if not path.is_file():
        images = (read_image(image_path(out, number), shape) for number in range(count))
        arrays: dict[str, Any] = {"arr_0": Rows((count, *shape), "|u1", images)}
        if not isinstance(subjects[0], str):
            arrays["arr_1"] = np.array(subjects, np.int64)
        write_npz(path, arrays)
    names = list(map(str, subjects))
    write_atomic(out / RESULT, canonical_json(read_json(out / SET) | {"npz": path.name, "samples": names}))
    return path


def image_path(out: Path, number: int) -> Path:
    """Path of an image of a set."""
    return out / f"{number:06d}.png"


def read_image(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Pixels of an image of a set, (height, width, 3) uint8.

    Raises: DamageError: it cannot be read, or has another shape.
    """
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise DamageError(f"image '{path}': it cannot be read ({error}). Remove it, and sample again.") from error
    if pixels.shape != shape:
        raise DamageError(f"image '{path}': it is {pixels.shape}, expected {shape}. Remove it, and sample again.")
    return pixels
