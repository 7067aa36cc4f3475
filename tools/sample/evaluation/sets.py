"""What a path names: pictures, or statistics of pictures; and the moments of it."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....datasets.errors import DamageError, EncoderError, RecipeError, SourceError
from ....datasets.format.layout import GROUP
from ....datasets.store import LatentStore
from ....precompute.progress.clock import Progress
from .gather import Team
from .moments import COVARIANCE, MEAN, Moments, collect, keep, read_moments, spread
from .networks.extractors import INCEPTION, Network
from .npz import Npz
from .pictures import PICTURES, FolderPictures, NpzPictures, PictureSet, SpreadPictures
from .store_pictures import DecodedPictures, SourcePictures

LOG = logging.getLogger(__name__)
PLACES = ("path", "network", "revision")  # where things lie, in a description; the rest is what they are


@dataclass(frozen=True)
class MeasuredSet:
    """Pictures, statistics of them, or both.

    Args:
      pictures: None: the file holds statistics alone.
      statistics: of a file; None: not computed yet. With pictures too, mean and covariance are of other pictures, as in
        ADM's reference batches: of all of ImageNet, beside 10,000 pictures.
      description: what they are, as plain values.
    """

    pictures: PictureSet | None
    statistics: Moments | None
    description: dict[str, Any]


def open_set(
    path: Path,
    network: Network,
    device: torch.device,
    *,
    source: tuple[str, ...] = (),
    crop_px: int = 0,
    vae: str | None = None,
    most: int = 0,
) -> MeasuredSet:
    """Open a store, a folder of pictures or a .npz file.

    Args:
      source: of a store: its source pictures are read instead of decoding it.
      crop_px: as of ``FolderPictures``.
      vae: as of ``DecodedPictures``.
      most: pictures, spread evenly; 0: all.
    Raises: SourceError, StoreError, EncoderError, DamageError, RecipeError.
    """
    if not path.exists():
        raise SourceError(f"'{path}': there is no such file or folder. Check the path.")
    is_store = (path / GROUP).is_file()
    if source and not is_store:
        raise RecipeError(f"--source: it is of a store, and '{path}' is none. Leave it out.")
    if path.is_file():
        opened = _open_npz(Npz(path), network)
    elif is_store:
        store = LatentStore(path)
        pictures = SourcePictures(store, source) if source else DecodedPictures(store, vae, device)
        opened = MeasuredSet(pictures, None, pictures.description)
    else:
        pictures = FolderPictures(path, crop_px=crop_px)
        opened = MeasuredSet(pictures, None, pictures.description)
    if most and opened.pictures is None:
        raise RecipeError(f"--against-num {most}: '{path}' holds statistics, not pictures. Leave it out.")
    if most and opened.pictures and most < len(opened.pictures):
        fewer = SpreadPictures(opened.pictures, spread(len(opened.pictures), most))
        opened = dataclasses.replace(opened, pictures=fewer, description=fewer.description)
    return opened


def _open_npz(file: Npz, network: Network) -> MeasuredSet:
    """Pictures, kept statistics, or ``mu`` and ``sigma`` of another program, which are of Inception."""
    if described := file.text():
        if not all(isinstance(described.get(what), dict) for what in ("network", "pictures")):
            raise DamageError(f"'{file.path}': it does not say of what its statistics are. Make it again.")
        if lasting(described["network"]) != lasting(network.description):
            raise RecipeError(
                f"'{file.path}': its statistics are of {described.get('network')}, --features is "
                f"{network.description}. Give the same network, or other statistics."
            )
        return MeasuredSet(None, read_moments(file), described["pictures"] | {"statistics": str(file.path)})
    has_moments = MEAN in file and COVARIANCE in file
    pictures = NpzPictures(file) if PICTURES in file else None
    if has_moments and network.description["network"] == INCEPTION:
        description = pictures.description if pictures else {"path": str(file.path)}
        return MeasuredSet(pictures, read_moments(file), description | {"kind": "npz, mu and sigma"})
    if pictures:
        return MeasuredSet(pictures, None, pictures.description)
    got = f"{MEAN} and {COVARIANCE}, which are of Inception" if has_moments else "neither pictures nor statistics"
    raise SourceError(
        f"'{file.path}': it has {got}. Needed {PICTURES} (N, height, width, 3) uint8, or {MEAN} and {COVARIANCE} with "
        "--features inception."
    )


def moments_of(opened: MeasuredSet, network: Network, team: Team, stage: str, progress: Progress) -> Moments | None:
    """Statistics of a set; a collective call.

    Returns: for the first process; None for others.
    Raises: SourceError: a picture cannot be read, or there is only one; DamageError; EncoderError: a feature is not
      finite.
    """
    if opened.pictures is None:
        return opened.statistics
    count = len(opened.pictures)
    if count < 2:
        raise SourceError(f"'{opened.description['path']}': it holds 1 picture. Needed at least 2 for a covariance.")
    batches = team.run(opened.pictures, functools.partial(_features, network), stage, progress)
    if not team.is_first:
        for _ in batches:
            pass
        return None
    found = collect(batches, count)
    if opened.statistics is None:
        return found
    _check_width(opened, opened.statistics, found)
    return dataclasses.replace(opened.statistics, features=found.features)


def kept_moments(
    opened: MeasuredSet, network: Network, team: Team, file: Path | None, progress: Progress
) -> Moments | None:
    """As ``moments_of`` for a reference, read from a file if it is there, else written to it.

    Raises: RecipeError: the file holds other statistics.
    """
    described = {"network": network.description, "pictures": opened.description}
    if file is None:
        return moments_of(opened, network, team, "reference", progress)
    if opened.pictures is None:
        raise RecipeError(f"--keep-statistics '{file}': the reference holds statistics already. Leave it out.")
    if file.exists():
        kept = Npz(file)
        found = kept.text() or {}
        for what in described:
            if lasting(found.get(what) or {}) != lasting(described[what]):
                raise RecipeError(
                    f"--keep-statistics '{file}': it is of {what} {found.get(what)}, this command has "
                    f"{described[what]}. Give another file, or remove this one."
                )
        LOG.info("reference: statistics kept in '%s'", file)
        return read_moments(kept)
    team.wait()  # all have looked before the first writes
    moments = moments_of(opened, network, team, "reference", progress)
    if moments:
        keep(file, moments, described)
    return moments


def lasting(description: dict[str, Any]) -> dict[str, Any]:
    """A description without places."""
    return {key: value for key, value in description.items() if key not in PLACES}


def _features(network: Network, pictures: Sequence[np.ndarray], numbers: np.ndarray) -> np.ndarray:
    found = network.features(pictures)
    if not (finite := np.isfinite(found).all(axis=1)).all():
        raise EncoderError(
            f"--features: network '{network.description['network']}' gives numbers that are not finite for picture "
            f"{numbers[~finite][0]} of the set. Check its weights."
        )
    return found


def _check_width(opened: MeasuredSet, statistics: Moments, found: Moments) -> None:
    if statistics.mean.shape != found.mean.shape:
        raise SourceError(
            f"'{opened.description['path']}': its mu has {len(statistics.mean)} numbers, the network gives "
            f"{len(found.mean)}. Needed statistics of the same network."
        )
