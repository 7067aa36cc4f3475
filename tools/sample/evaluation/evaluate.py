"""``leandit evaluate``: a set of images beside a reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....datasets.disk.hashing import read_json
from ....datasets.disk.strays import write_output
from ....datasets.format.layout import GROUP
from ....datasets.order.slices import spread
from ....datasets.store import LatentStore
from ....errors import DamageError, RecipeError, SourceError
from ....precompute.run.clock import Progress
from ....train.weights.folders import EVALUATIONS, is_run
from ....units import plural
from ...terminal.text import finite
from ..npz import Npz
from ..request import INCEPTION, EvaluateRequest
from ..sample import RESULT, SET, sample_set
from .distances import Moments, measure
from .images import IMAGES, ImageSet, decoded_images, folder_images, npz_images, read_captions, source_images
from .moments import COVARIANCE, MEAN, check_kept, compute_batches, kept_moments, moments_of, read_moments
from .networks import ClipScore, Network, open_network

METADATA = "metadata.jsonl"
FEW_IMAGES = 1000  # of a side, below which a share of them is rough: its standard error is above 0.01
SCORES = ("frechet", "kid", "cmmd", "precision", "recall", "density", "coverage", "clip_score")


def evaluate(request: EvaluateRequest, *, device: torch.device, progress: Progress) -> dict[str, Any]:
    """Measure a set of images.

    The numbers of a run are added to its ``evaluations.jsonl`` too.

    Returns: the numbers and what they are of, as plain values.
    Raises: RecipeError, SourceError, StoreError, RunError, EncoderError, DamageError.
    """
    check_options(request)
    network = open_network(request.features, request.resize, device) if request.against else None
    clip = ClipScore(request.clip, device) if request.clip else None
    reference = open_reference(request, network, device) if network else None
    target = open_target(request, network, device, progress)
    result: dict[str, Any] = {"images": target.description}
    notes = [target.description["warning"]] if target.description.get("warning") else []
    if network and reference:
        theirs = kept_moments(reference, network, request.keep, progress)
        ours = moments_of(target, network, "images", progress)
        result |= {"reference": reference.description, "features": network.description}
        result |= measure(ours, theirs, is_clip=network.is_clip, device=device)
        notes += find_notes(ours, theirs, reference, network)
    if clip:
        score, num_cut = clip_score(request, clip, target, progress)
        result |= {"clip": clip.description, "clip_score": score}
        if num_cut:
            notes.append(f"{plural(num_cut, 'caption')} longer than CLIP reads: truncated")
    result = finite(result | {"notes": notes})
    if is_run(request.target):
        path = request.target / EVALUATIONS
        before = path.read_bytes() if path.is_file() else b""
        before = before[: before.rfind(b"\n") + 1]  # without a line that a crash cut off
        write_output(path, before + json.dumps(result, allow_nan=False).encode() + b"\n")
    return result


# -------------------------------------------------------------------------------------------------------------- inputs


def check_options(request: EvaluateRequest) -> None:
    """Raise RecipeError for an option that would change nothing."""
    of_reference = {"--source": request.source, "--against-num": request.most, "--keep-statistics": request.keep}
    if not request.against and (unused := [name for name, value in of_reference.items() if value]):
        raise RecipeError(f"{unused[0]}: it applies only to a reference. Pass one with --against, or leave it out.")
    if request.captions and not request.clip:
        raise RecipeError("--captions: they are for the CLIP score. Pass a CLIP with --clip, or leave them out.")
    sides = [path for path in (request.target, request.against) if path and path.is_dir()]
    if request.crop_px and all(is_run(path) or (path / GROUP).is_file() for path in sides):
        raise RecipeError("--crop: it crops folders of images, and neither side is one. Leave it out.")


def open_reference(request: EvaluateRequest, network: Network, device: torch.device) -> ImageSet:
    """The reference, with as many images as requested; raises as ``open_images``."""
    assert request.against is not None
    path, most = request.against, request.most
    if request.source and path.exists() and not (path / GROUP).is_file():
        raise RecipeError(f"--source: it is for stores, and '{path}' is not one. Leave it out.")
    images = open_images(path, network, request, device, request.source)
    options = {f"--against-num {most}": most, f"--keep-statistics '{request.keep}'": request.keep}
    if not images.read and (unused := [name for name, value in options.items() if value]):
        raise RecipeError(f"{unused[0]}: '{path}' holds statistics, not images. Leave it out.")
    return images.some(spread(images.count, most), of=images.count) if 0 < most < images.count else images


def open_target(
    request: EvaluateRequest, network: Network | None, device: torch.device, progress: Progress
) -> ImageSet:
    """The images to measure; those of a run are drawn first, unless they are there."""
    if not is_run(request.target):
        return open_images(request.target, network, request, device)
    assert request.out is not None
    draw, out = request.draw, request.out
    drawn = sample_set(request.target, draw, out=out, device=device, progress=progress)
    settings = {key: value for key, value in read_json(out / SET).items() if value not in ([], None)}
    description = {"kind": "run", "path": str(request.target)} | settings
    description |= {key: drawn[key] for key in ("step", "weights", "warning")}
    description |= {"count": draw.total, "drawn_to": str(out)}
    return replace(folder_images(out).some(np.arange(draw.total)), description=description)


def open_images(
    path: Path, network: Network | None, request: EvaluateRequest, device: torch.device, source: Sequence[str] = ()
) -> ImageSet:
    """Open a store, a folder of images or a .npz file.

    Args:
      network: None: statistics are of no use.
      source: of a store: its source images are read instead of decoding it.
    Raises: SourceError, StoreError, EncoderError, DamageError, RecipeError.
    """
    if not path.exists():
        raise SourceError(f"'{path}': there is no such file or folder. Check the path.")
    if path.is_file():
        return _open_npz(Npz(path), network)
    if (path / GROUP).is_file():
        store = LatentStore(path)
        return source_images(store, source) if source else decoded_images(store, request.draw.vae, device)
    return folder_images(path, request.crop_px)


def _open_npz(file: Npz, network: Network | None) -> ImageSet:
    """Images, kept statistics, or ``mu`` and ``sigma`` of another program, which are of Inception."""
    if network and (described := file.text()):
        if not all(isinstance(described.get(what), dict) for what in ("network", "images")):
            raise DamageError(f"'{file.path}': it does not say which images its statistics describe. Create it again.")
        check_kept(file, network=network.description)
        description = described["images"] | {"statistics": str(file.path)}
        return ImageSet(description, None, statistics=read_moments(file))
    has_moments = MEAN in file and COVARIANCE in file
    images = npz_images(file) if IMAGES in file else None
    if network and has_moments and network.description["network"] == INCEPTION:
        images = images or ImageSet({"path": str(file.path)}, None)
        description = images.description | {"kind": "npz, mu and sigma"}
        return replace(images, description=description, statistics=read_moments(file))
    if images:
        return images
    got = f"{MEAN} and {COVARIANCE}, which are of Inception" if has_moments else "neither images nor statistics"
    raise SourceError(
        f"'{file.path}': it has {got}. Expected {IMAGES} (N, height, width, 3) uint8, or {MEAN} and {COVARIANCE} with "
        "--features inception."
    )


# ------------------------------------------------------------------------------------------------------------ measures


def find_notes(images: Moments, reference: Moments, opened: ImageSet, network: Network) -> list[str]:
    """What a reader of the numbers should know."""
    notes, width = [], len(reference.mean)
    sides = {"images": images, "of the reference": reference}
    if few := [f"{side.count} {name}" for name, side in sides.items() if 0 < side.count <= width]:
        notes.append(
            f"{' and '.join(few)} for {width} features, so the Fréchet distance is too large; compare it only at equal "
            "numbers"
        )
    if images.features is None or reference.features is None:
        notes.append("only the mean and covariance of one side are known, so only the Fréchet distance is computed")
    elif (fewest := min(len(images.features), len(reference.features))) < FEW_IMAGES:
        notes.append(
            f"precision, recall, density and coverage are rough with fewer than {FEW_IMAGES:,} images a side: a share "
            f"of {fewest} has a standard error of up to {0.5 / fewest**0.5:.2f}"
        )
    if "decoder_sha256" in opened.description:
        notes.append("the reference is decoded, so the error of the VAE is not counted; --source counts it")
    if opened.statistics and not reference.count and network.description["resize"] != "tensorflow":
        notes.append(
            "mu and sigma of another program: if it resized as TensorFlow does (ADM, the original FID), use "
            "--resize tensorflow"
        )
    return notes


def clip_score(request: EvaluateRequest, clip: ClipScore, target: ImageSet, progress: Progress) -> tuple[float, int]:
    """The mean score, and the number of captions that were cut."""
    if target.read is None:
        raise RecipeError(f"--clip: '{request.target}' has statistics, not images. Leave it out.")
    folder = request.out if request.out and is_run(request.target) else request.target
    file = request.captions or next((folder / name for name in (RESULT, METADATA) if (folder / name).is_file()), None)
    if file is None:
        raise RecipeError(f"--clip: '{folder}' has neither {RESULT} nor {METADATA}. Pass the captions with --captions.")
    captions = read_captions(file, target.names or list(map(str, range(target.count))))

    def compute(pixels: list[np.ndarray], numbers: np.ndarray) -> np.ndarray:
        return clip.scores(pixels, [captions[number] for number in numbers])

    rows = np.concatenate(list(compute_batches(target, compute, "captions", progress)))
    return float(rows[:, 0].mean()), int(rows[:, 1].sum())


def rows_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    """A result as names and values, for a terminal."""
    rows = []
    for side in ("images", "reference"):
        if of_side := result.get(side):
            count = f"{of_side['count']:,}" if "count" in of_side else "an unknown number"
            rows.append((side, f"{of_side['kind']} '{of_side['path']}', {count} images"))
            if "guidance" in of_side:
                how = f"{of_side['sampler']}, {of_side['steps']} steps, guidance {of_side['guidance']:g}"
                how += f", shift {of_side['shift']:g}" if "shift" in of_side else ""
                rows.append(("drawn with", f"{of_side['weights']} weights, {how}"))
    if network := result.get("features"):
        rows.append(("features", f"{network['network']}, {network['side_px']} px, {network['resize']}"))
    return rows + [(name, f"{result[name]:.6g}") for name in SCORES if result.get(name) is not None]
