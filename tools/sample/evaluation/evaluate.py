"""``leandit evaluate``: a set of pictures beside a reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....datasets.disk.files import write_atomic
from ....datasets.disk.hashing import read_json
from ....datasets.errors import RecipeError, SourceError
from ....datasets.format.layout import GROUP
from ....precompute.progress.clock import Progress
from ....train.loop import print_warning
from ....train.parallel.ranks import Ranks, connected
from ....train.parallel.watchdog import Watchdog
from ....train.weights.folders import EVALUATIONS, is_run
from ..sample_set import RESULT, SET, sample_set
from ..sampler import SampleRequest
from .caption_score import ClipScore, read_captions
from .distances import (
    NEIGHBOURS_DENSITY,
    cmmd,
    density_coverage,
    frechet_distance,
    kernel_distance,
    precision_recall,
)
from .gather import Team
from .moments import Moments
from .networks.extractors import INCEPTION, Network, open_network
from .networks.resizing import Resize
from .npz import Npz
from .pictures import PICTURES, FolderPictures, NpzPictures, PictureSet, SpreadPictures
from .sets import MeasuredSet, kept_moments, moments_of, open_set

METADATA = "metadata.jsonl"
FEW_PICTURES = 1000  # of a side, below which a share of them is rough: its standard error is above 0.01
SCORES = ("frechet", "kid", "cmmd", "precision", "recall", "density", "coverage", "clip_score")


@dataclass(frozen=True)
class EvaluateRequest:
    """What to measure, and how.

    Args:
      target: a run, a folder of pictures, or a .npz file.
      against: the reference: a store, a folder or a .npz file; None: only ``clip``.
      features, resize: as of ``open_network``.
      source, crop_px, most: of the reference, as of ``open_set``; ``crop_px`` is of a target folder too.
      keep: file for the statistics of the reference.
      clip: folder or hub id of the CLIP of the CLIP score; None: not measured.
      captions: as of ``read_captions``; None: ``samples.json`` or ``metadata.jsonl`` in the folder.
      draw: what a run draws.
      out: folder for it.
      vae, text: as of ``sample_set``; ``vae`` decodes a store too.
    """

    target: Path
    against: Path | None
    features: str = INCEPTION
    resize: Resize | None = None
    source: tuple[str, ...] = ()
    crop_px: int = 0
    most: int = 0
    keep: Path | None = None
    clip: str | None = None
    captions: Path | None = None
    draw: SampleRequest | None = None
    out: Path | None = None
    vae: str | None = None
    text: str | None = None


def evaluate(
    request: EvaluateRequest,
    *,
    device: torch.device,
    ranks: Ranks,
    progress: Progress,
    warn: Callable[[str], None] = print_warning,
) -> dict[str, Any] | None:
    """Measure a set of pictures; all processes call it, and an error of one ends all.

    The numbers of a run are added to its ``evaluations.jsonl`` too.

    Args:
      warn: prints the error of a process, if there are several.
    Returns: the numbers and what they are of, as plain values; None for others than the first process.
    Raises: RecipeError, SourceError, StoreError, RunError, EncoderError, DamageError.
    """
    _check_options(request)
    with connected(ranks, device), Watchdog(ranks, warn) as watchdog:
        team = Team(watchdog)
        network = open_network(request.features, request.resize, device) if request.against else None
        clip = ClipScore(request.clip, device) if request.clip else None
        reference = _open_reference(request, network, device) if network else None
        target = _open_target(request, network, team, device=device, ranks=ranks, progress=progress)
        result: dict[str, Any] = {"pictures": target.description}
        notes = [target.description["warning"]] if target.description.get("warning") else []
        moments = other = None
        if network and reference:
            other = kept_moments(reference, network, team, request.keep, progress)
            moments = moments_of(target, network, team, "pictures", progress)
            result |= {"reference": reference.description, "features": network.description}
        if clip:
            score, num_cut = _clip_score(request, clip, target, team, progress)
            result |= {"clip": clip.description, "clip_score": score}
            if num_cut:
                notes.append(f"{num_cut} captions are longer than CLIP reads; the rest of each does not count")
        if moments and other and network and reference and team.is_first:
            result |= measure(moments, other, network, device)
            notes += find_notes(moments, other, reference, network)
        if not team.is_first:
            return None
        result["notes"] = notes
        if is_run(request.target):
            _note(request.target, result)
        return result


def _note(run: Path, result: dict[str, Any]) -> None:
    """Add a result to those of a run, without a line that a crash cut off."""
    path = run / EVALUATIONS
    before = path.read_bytes() if path.is_file() else b""
    write_atomic(path, before[: before.rfind(b"\n") + 1] + json.dumps(result).encode() + b"\n")


def rows_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    """A result as names and values, for a terminal."""
    rows = []
    for side in ("pictures", "reference"):
        if of_side := result.get(side):
            count = f"{of_side['count']:,}" if "count" in of_side else "an unknown number"
            rows.append((side, f"{of_side['kind']} '{of_side['path']}', {count} pictures"))
            if "guidance" in of_side:
                how = f"{of_side['sampler']}, {of_side['steps']} steps, guidance {of_side['guidance']:g}"
                how += f", shift {of_side['shift']:g}" if "shift" in of_side else ""
                rows.append(("drawn with", f"{of_side['weights']} weights, {how}"))
    if network := result.get("features"):
        rows.append(("features", f"{network['network']}, {network['side_px']} px, {network['resize']}"))
    return rows + [(name, f"{result[name]:.6g}") for name in SCORES if result.get(name) is not None]


def is_folder(path: Path) -> bool:
    """Whether a path is a folder of pictures: no run, no store."""
    return path.is_dir() and not is_run(path) and not (path / GROUP).is_file()


def measure(pictures: Moments, reference: Moments, network: Network, device: torch.device) -> dict[str, Any]:
    """All distances that the statistics allow; None for those that need features which a file does not have.

    Raises: SourceError: too few pictures, or statistics of another network.
    """
    if pictures.mean.shape != reference.mean.shape:
        raise SourceError(
            f"the pictures have {len(pictures.mean)} features, the reference {len(reference.mean)}. Needed both of "
            "the same network."
        )
    of_reference = reference.mean, reference.covariance
    found: dict[str, Any] = {"frechet": frechet_distance(pictures.mean, pictures.covariance, *of_reference)}
    ours, theirs = pictures.features, reference.features
    if ours is None or theirs is None:
        return found
    if min(len(ours), len(theirs)) <= NEIGHBOURS_DENSITY:
        raise SourceError(
            f"{len(ours)} pictures and {len(theirs)} of the reference: needed more than {NEIGHBOURS_DENSITY} of each, "
            "for their neighbours."
        )
    found["kid"], found["kid_std"] = kernel_distance(ours, theirs, device=device)
    found["cmmd"] = cmmd(ours, theirs, device=device) if network.is_clip else None
    found["precision"], found["recall"] = precision_recall(ours, theirs, device=device)
    found["density"], found["coverage"] = density_coverage(ours, theirs, device=device)
    return found


def find_notes(pictures: Moments, reference: Moments, opened: MeasuredSet, network: Network) -> list[str]:
    """What a reader of the numbers should know."""
    notes, width = [], len(reference.mean)
    sides = {"pictures": pictures, "of the reference": reference}
    if few := [f"{side.count} {name}" for name, side in sides.items() if 0 < side.count <= width]:
        notes.append(
            f"{' and '.join(few)} for {width} features, so the Fréchet distance is too large; compare it only at equal "
            "numbers"
        )
    kept = [side.features for side in sides.values() if side.features is not None]
    if len(kept) == len(sides) and (fewest := min(map(len, kept))) < FEW_PICTURES:
        notes.append(
            f"precision, recall, density and coverage are rough with fewer than {FEW_PICTURES:,} pictures a side: a "
            f"share of {fewest} has a standard error of up to {0.5 / fewest**0.5:.2f}"
        )
    if "decoder_sha256" in opened.description:
        notes.append("the reference is decoded, so the error of the VAE is not counted; --source counts it")
    if opened.statistics and not reference.count and network.description["resize"] != "tensorflow":
        notes.append(
            "mu and sigma of another program: if it resized as TensorFlow does (ADM, the original FID), use "
            "--resize tensorflow"
        )
    if reference.features is None or pictures.features is None:
        notes.append("mean and covariance alone are known of one side, so only the Fréchet distance is measured")
    return notes


def _check_options(request: EvaluateRequest) -> None:
    """Raise RecipeError for an option that would change nothing."""
    for_others = {"--source": request.source, "--against-num": request.most, "--keep-statistics": request.keep}
    if not request.against and (unused := [name for name, value in for_others.items() if value]):
        raise RecipeError(f"{unused[0]}: it is of a reference. Give one with --against, or leave it out.")
    if request.captions and not request.clip:
        raise RecipeError("--captions: they are for the CLIP score. Give a CLIP with --clip, or leave them out.")
    if request.crop_px and not any(is_folder(path) for path in (request.target, request.against) if path):
        raise RecipeError("--crop: it is of folders of pictures, and neither side is one. Leave it out.")


def _open_reference(request: EvaluateRequest, network: Network, device: torch.device) -> MeasuredSet:
    assert request.against is not None
    how = {"source": request.source, "vae": request.vae, "most": request.most}
    return open_set(request.against, network, device, crop_px=_crop_px(request, request.against), **how)


def _crop_px(request: EvaluateRequest, path: Path) -> int:
    """``request.crop_px`` for a folder of pictures, 0 for others."""
    return request.crop_px if is_folder(path) else 0


def _open_target(
    request: EvaluateRequest,
    network: Network | None,
    team: Team,
    *,
    device: torch.device,
    ranks: Ranks,
    progress: Progress,
) -> MeasuredSet:
    """The pictures to measure; those of a run are drawn first."""
    if not is_run(request.target):
        if network:
            return open_set(request.target, network, device, crop_px=_crop_px(request, request.target))
        pictures = _only_pictures(request)
        return MeasuredSet(pictures, None, pictures.description)
    assert request.draw is not None
    assert request.out is not None
    places: dict[str, Any] = {"store": None, "vae": request.vae, "text": request.text, "out": request.out}
    drawn = sample_set(request.target, request.draw, device=device, ranks=ranks, progress=progress, **places)
    team.wait()  # all pictures are there
    count = request.draw.total
    pictures = SpreadPictures(FolderPictures(request.out), np.arange(count))
    settings = {key: value for key, value in read_json(request.out / SET).items() if value not in ([], None)}
    described = settings | {key: drawn[key] for key in ("step", "weights", "warning")}
    described |= {"count": count, "drawn_to": str(request.out)}
    return MeasuredSet(pictures, None, {"kind": "run", "path": str(request.target)} | described)


def _only_pictures(request: EvaluateRequest) -> PictureSet:
    """The pictures of a folder or a .npz file, for a measure without a network of ``--features``."""
    if request.target.is_dir():
        return FolderPictures(request.target, crop_px=_crop_px(request, request.target))
    file = Npz(request.target)
    if PICTURES not in file:
        raise SourceError(f"'{request.target}': it has no pictures, {PICTURES}. Give a set of pictures.")
    return NpzPictures(file)


def _clip_score(
    request: EvaluateRequest, clip: ClipScore, target: MeasuredSet, team: Team, progress: Progress
) -> tuple[float, int]:
    """The mean score, and the number of captions that were cut."""
    pictures = target.pictures
    if pictures is None:
        raise RecipeError(f"--clip: '{request.target}' has statistics, not pictures. Leave it out.")
    captions = _captions(request, len(pictures))
    scored = team.run(
        pictures, lambda shown, numbers: clip.scores(shown, [captions[n] for n in numbers]), "captions", progress
    )
    rows = list(scored)
    return (float(np.concatenate(rows)[:, 0].mean()), int(np.concatenate(rows)[:, 1].sum())) if rows else (0.0, 0)


def _captions(request: EvaluateRequest, count: int) -> list[str]:
    folder = request.out if is_run(request.target) else request.target
    assert folder is not None
    file = request.captions or next((folder / name for name in (RESULT, METADATA) if (folder / name).is_file()), None)
    if file is None:
        raise RecipeError(f"--clip: '{folder}' has neither {RESULT} nor {METADATA}. Give the captions with --captions.")
    names = FolderPictures(folder).names if folder.is_dir() else [str(number) for number in range(count)]
    return read_captions(file, names[:count])
