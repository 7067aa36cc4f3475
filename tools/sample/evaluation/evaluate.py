"""``leandit evaluate``: a set of images beside a reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....datasets.disk.files import write_atomic
from ....datasets.disk.hashing import read_json
from ....datasets.errors import DamageError, RecipeError, SourceError
from ....datasets.format.layout import GROUP
from ....datasets.store import LatentStore
from ....precompute.progress.clock import Progress
from ....train.parallel.ranks import Ranks, connected
from ....train.weights.folders import EVALUATIONS, is_run
from ..npz import Npz
from ..sample_set import RESULT, SET, sample_set
from .distances import (
    NEIGHBOURS_DENSITY,
    cmmd,
    density_coverage,
    frechet_distance,
    kernel_distance,
    precision_recall,
)
from .images import IMAGES, ImageSet, decoded_images, folder_images, npz_images, read_captions, source_images
from .moments import (
    COVARIANCE,
    MEAN,
    Moments,
    Team,
    content_of,
    kept_moments,
    moments_of,
    read_moments,
    with_features,
)
from .networks import ClipScore, Network, open_network
from .request import INCEPTION, EvaluateRequest

METADATA = "metadata.jsonl"
FEW_IMAGES = 1000  # of a side, below which a share of them is rough: its standard error is above 0.01
SCORES = ("frechet", "kid", "cmmd", "precision", "recall", "density", "coverage", "clip_score")


@dataclass(frozen=True)
class Side:
    """Images, statistics of images, or both.

    Args:
      statistics: of a file. With images too, mean and covariance are of other images, as in ADM's reference batches: of
        all of ImageNet, beside 10,000 images.
      description: what they are, as plain values.
    """

    images: ImageSet | None
    statistics: Moments | None
    description: dict[str, Any]

    def moments(self, network: Network, team: Team, stage: str) -> Moments | None:
        """All statistics; a collective call. As ``moments_of``."""
        measured = moments_of(self.images, network, team, stage) if self.images else None
        if self.statistics and measured:
            return with_features(self.statistics, measured, self.description["path"])
        return measured or self.statistics


def evaluate(
    request: EvaluateRequest,
    *,
    device: torch.device,
    ranks: Ranks,
    progress: Progress,
) -> dict[str, Any] | None:
    """Measure a set of images; all processes call it, and an error of one ends all.

    The numbers of a run are added to its ``evaluations.jsonl`` too.

    Args:
    Returns: the numbers and what they are of, as plain values; None for others than the first process.
    Raises: RecipeError, SourceError, StoreError, RunError, EncoderError, DamageError.
    """
    check_options(request)
    with connected(ranks, device):
        team = Team(ranks, progress)
        network = open_network(request.features, request.resize, device) if request.against else None
        clip = ClipScore(request.clip, device) if request.clip else None
        reference = open_reference(request, network, device) if network else None
        target = open_target(request, network, team, device)
        result: dict[str, Any] = {"pictures": target.description}
        notes = [target.description["warning"]] if target.description.get("warning") else []
        moments = other = None
        if network and reference:
            if request.keep and reference.images:
                other = kept_moments(reference.images, network, team, request.keep)
            else:
                other = reference.moments(network, team, "reference")
            moments = target.moments(network, team, "pictures")
            result |= {"reference": reference.description, "features": network.description}
        if clip:
            score, num_cut = clip_score(request, clip, target, team)
            result |= {"clip": clip.description, "clip_score": score}
            if num_cut:
                notes.append(f"{num_cut} captions are longer than CLIP reads; the rest of each does not count")
        if not ranks.is_first:
            return None
        if moments and other and network and reference:
            result |= measure(moments, other, network, device)
            notes += find_notes(moments, other, reference, network)
        result["notes"] = notes
        if is_run(request.target):
            add_line(request.target / EVALUATIONS, result)
        return result


def add_line(path: Path, result: dict[str, Any]) -> None:
    """Add a result to a file of JSON lines, without a line that a crash cut off."""
    before = path.read_bytes() if path.is_file() else b""
    write_atomic(path, before[: before.rfind(b"\n") + 1] + json.dumps(result).encode() + b"\n")


# ------------------------------------------------------------------------------------------------------------- inputs


def check_options(request: EvaluateRequest) -> None:
    """Raise RecipeError for an option that would change nothing."""
    of_reference = {"--source": request.source, "--against-num": request.most, "--keep-statistics": request.keep}
    if not request.against and (unused := [name for name, value in of_reference.items() if value]):
        raise RecipeError(f"{unused[0]}: only a reference has it. Give one with --against, or leave it out.")
    if request.captions and not request.clip:
        raise RecipeError("--captions: they are for the CLIP score. Give a CLIP with --clip, or leave them out.")
    if request.crop_px and not any(_is_folder(path) for path in (request.target, request.against) if path):
        raise RecipeError("--crop: it crops folders of images, and neither side is one. Leave it out.")


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder of images: no run, no store."""
    return path.is_dir() and not is_run(path) and not (path / GROUP).is_file()


def open_reference(request: EvaluateRequest, network: Network, device: torch.device) -> Side:
    """The reference, with as many images as requested; raises as ``open_side``."""
    assert request.against is not None
    path, most = request.against, request.most
    if request.source and path.exists() and not (path / GROUP).is_file():
        raise RecipeError(f"--source: only a store has it, and '{path}' is none. Leave it out.")
    side = open_side(path, network, request, device, request.source)
    options = {f"--against-num {most}": most, f"--keep-statistics '{request.keep}'": request.keep}
    if not side.images and (unused := [name for name, value in options.items() if value]):
        raise RecipeError(f"{unused[0]}: '{path}' holds statistics, not images. Leave it out.")
    if not most or not side.images or most >= side.images.count:
        return side
    images = side.images.spread(most)
    return Side(images, side.statistics, images.description)


def open_target(request: EvaluateRequest, network: Network | None, team: Team, device: torch.device) -> Side:
    """The images to measure; those of a run are drawn first."""
    if not is_run(request.target):
        return open_side(request.target, network, request, device)
    assert request.out is not None
    draw, out = request.draw, request.out
    drawn = sample_set(request.target, draw, out=out, device=device, ranks=team.ranks, progress=team.progress)
    team.wait()  # all images are there
    settings = {key: value for key, value in read_json(out / SET).items() if value not in ([], None)}
    description = {"kind": "run", "path": str(request.target)} | settings
    description |= {key: drawn[key] for key in ("step", "weights", "warning")}
    description |= {"count": draw.total, "drawn_to": str(out)}
    return Side(folder_images(out).some(np.arange(draw.total)), None, description)


def open_side(
    path: Path, network: Network | None, request: EvaluateRequest, device: torch.device, source: Sequence[str] = ()
) -> Side:
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
        images = source_images(store, source) if source else decoded_images(store, request.draw.vae, device)
    else:
        images = folder_images(path, request.crop_px)
    return Side(images, None, images.description)


def _open_npz(file: Npz, network: Network | None) -> Side:
    """Images, kept statistics, or ``mu`` and ``sigma`` of another program, which are of Inception."""
    if network and (described := file.text()):
        if not all(isinstance(described.get(what), dict) for what in ("network", "pictures")):
            raise DamageError(f"'{file.path}': it does not say of what its statistics are. Make it again.")
        if content_of(described["network"]) != content_of(network.description):
            raise RecipeError(
                f"'{file.path}': its statistics are of {described.get('network')}, --features is "
                f"{network.description}. Give the same network, or other statistics."
            )
        return Side(None, read_moments(file), described["pictures"] | {"statistics": str(file.path)})
    has_moments = MEAN in file and COVARIANCE in file
    images = npz_images(file) if IMAGES in file else None
    if network and has_moments and network.description["network"] == INCEPTION:
        description = images.description if images else {"path": str(file.path)}
        return Side(images, read_moments(file), description | {"kind": "npz, mu and sigma"})
    if images:
        return Side(images, None, images.description)
    got = f"{MEAN} and {COVARIANCE}, which are of Inception" if has_moments else "neither images nor statistics"
    raise SourceError(
        f"'{file.path}': it has {got}. Expected {IMAGES} (N, height, width, 3) uint8, or {MEAN} and {COVARIANCE} with "
        "--features inception."
    )


# ------------------------------------------------------------------------------------------------------------ measures


def measure(images: Moments, reference: Moments, network: Network, device: torch.device) -> dict[str, Any]:
    """All distances that the statistics allow; None for those that need features which a file does not have.

    Raises: SourceError: too few images, or statistics of another network.
    """
    if images.mean.shape != reference.mean.shape:
        raise SourceError(
            f"the images have {len(images.mean)} features, the reference {len(reference.mean)}. Expected both of the "
            "same network."
        )
    frechet = frechet_distance(images.mean, images.covariance, reference.mean, reference.covariance)
    ours, theirs = images.features, reference.features
    if ours is None or theirs is None:
        return {"frechet": frechet}
    if min(len(ours), len(theirs)) <= NEIGHBOURS_DENSITY:
        raise SourceError(
            f"{len(ours)} images and {len(theirs)} of the reference: expected more than {NEIGHBOURS_DENSITY} of each, "
            "for their neighbours."
        )
    kid, kid_std = kernel_distance(ours, theirs, device=device)
    precision, recall = precision_recall(ours, theirs, device=device)
    density, coverage = density_coverage(ours, theirs, device=device)
    return {
        "frechet": frechet,
        "kid": kid,
        "kid_std": kid_std,
        "cmmd": cmmd(ours, theirs, device=device) if network.is_clip else None,
        "precision": precision,
        "recall": recall,
        "density": density,
        "coverage": coverage,
    }


def find_notes(images: Moments, reference: Moments, opened: Side, network: Network) -> list[str]:
    """What a reader of the numbers should know."""
    notes, width = [], len(reference.mean)
    sides = {"images": images, "of the reference": reference}
    if few := [f"{side.count} {name}" for name, side in sides.items() if 0 < side.count <= width]:
        notes.append(
            f"{' and '.join(few)} for {width} features, so the Fréchet distance is too large; compare it only at equal "
            "numbers"
        )
    if images.features is None or reference.features is None:
        notes.append("mean and covariance alone are known of one side, so only the Fréchet distance is measured")
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


def clip_score(request: EvaluateRequest, clip: ClipScore, target: Side, team: Team) -> tuple[float, int]:
    """The mean score, and the number of captions that were cut; a collective call, (0, 0) for others than the first."""
    images = target.images
    if images is None:
        raise RecipeError(f"--clip: '{request.target}' has statistics, not images. Leave it out.")
    folder = request.out if request.out and is_run(request.target) else request.target
    file = request.captions or next((folder / name for name in (RESULT, METADATA) if (folder / name).is_file()), None)
    if file is None:
        raise RecipeError(f"--clip: '{folder}' has neither {RESULT} nor {METADATA}. Give the captions with --captions.")
    captions = read_captions(file, images.names or list(map(str, range(images.count))))

    def compute(pixels: list[np.ndarray], numbers: np.ndarray) -> np.ndarray:
        return clip.scores(pixels, [captions[number] for number in numbers])

    rows = np.concatenate([np.zeros((0, 2)), *team.run(images, compute, "captions")])
    return (float(rows[:, 0].mean()), int(rows[:, 1].sum())) if len(rows) else (0.0, 0)


def rows_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    """A result as names and values, for a terminal."""
    rows = []
    for side in ("pictures", "reference"):
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
