"""``leandit sample --num 50000``: a set of pictures for an evaluation, drawn by any number of processes.

Each picture depends on the seed and its number alone, so who draws it, and beside which others, changes nothing but
rounding. Process r of n draws the numbers r, r + n, r + 2n, ... that are not there yet; no process talks to another.
Who finds all pictures there packs them as the evaluator of ADM reads them (guided-diffusion, evaluations/evaluator.py).
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from PIL import Image

from ...datasets.disk.files import write_atomic
from ...datasets.disk.hashing import canonical_json, read_json
from ...datasets.disk.strays import sweep_strays
from ...datasets.errors import DamageError, RunError
from ...datasets.format.buckets import bucket_size
from ...datasets.order.shuffle import keyed_hash
from ...precompute.progress.clock import Progress
from ...train.models.conditioning import Conditioning
from ...train.parallel.ranks import ALONE, Ranks
from ...train.sampling.schedulers import choose_sampler
from ...train.sampling.snapshot import Snapshot
from ..inspection.contact_sheet import load_decoder
from .sampler import (
    SampleRequest,
    check_decoder,
    checked,
    choose_bucket,
    draw_pictures,
    embed_captions,
    needed_captions,
    open_captions,
    open_model,
    padded_captions,
)

SET, RESULT = "set.json", "samples.json"
CHOICE = 1  # beside the seed and a number: what is drawn, where the noise has the seed and the number alone
ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # so that the same pictures are the same file


def sample_set(
    run: Path,
    request: SampleRequest,
    *,
    out: Path,
    device: torch.device,
    store: Path | None,
    vae: str | None,
    text: str | None,
    ranks: Ranks = ALONE,
    progress: Progress,
) -> dict:
    """Draw the pictures of this process that are not there yet; pack all where they are complete.

    Args:
      out: folder for ``000000.png`` and so on, the same for all processes.
      store, vae, text: as for ``sampler.sample``.
      ranks: which process this is, of how many.
    Returns: what was drawn and what is there, as plain values.
    Raises: RunError: the folder holds another set; RecipeError, EncoderError, StoreError.
    """
    snapshot = open_model(run, request, device, vae, text)
    request, count = checked(snapshot, request), request.total
    bucket = choose_bucket(snapshot, request)
    sampler = choose_sampler(snapshot.objective, request.sampler, steps=request.steps)
    decoder = load_decoder(snapshot.state["vae"]["model"], vae, device)
    warning = check_decoder(snapshot, decoder)
    subjects = Subjects(snapshot, request, run, store, text, device)
    take_up(out, describe(snapshot, request, bucket, sampler, decoder.identity.weights_sha256))

    mine = range(ranks.rank, count, ranks.world_size)
    missing = [number for number in mine if not picture_path(out, number).is_file()]
    for start in range(0, len(missing), request.batch):
        numbers = missing[start : start + request.batch]
        given = subjects.conditioning(numbers)
        pictures = draw_pictures(snapshot, given, decoder, bucket=bucket, request=request, numbers=numbers)
        for number, pixels in zip(numbers, pictures, strict=True):
            write_atomic(picture_path(out, number), png_of(pixels))
        progress("sample", len(mine) - len(missing) + start + len(numbers), len(mine))

    num_there = sum(picture_path(out, number).is_file() for number in range(count))
    packed = None
    if num_there == count:
        packed = pack(out, count, bucket_size(bucket), subjects.labels)
        names = [subjects.name(number) for number in range(count)]
        write_atomic(out / RESULT, canonical_json(read_json(out / SET) | {"npz": packed.name, "samples": names}))
    return {
        "snapshot": snapshot.path.name,
        "step": snapshot.step,
        "bucket": bucket,
        "guidance": request.guidance,
        "sampler": sampler,
        "drawn": len(missing),
        "there": num_there,
        "of": count,
        "npz": packed and str(packed),
        "warning": warning,
    }


class Subjects:
    """What each picture of a set shows: a label or a caption.

    Those that are asked for take turns; else each picture has one of the run's classes, or of the store's captions,
    drawn uniformly from the seed and its number.

    Args:
      request: its labels as indexes (``sampler.checked``).
    Raises: RunError: there is no store to choose captions from; EncoderError: a caption cannot be encoded.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        request: SampleRequest,
        run: Path,
        store: Path | None,
        text: str | None,
        device: torch.device,
    ) -> None:
        self._snapshot, self._request, self._device, self._text = snapshot, request, device, text
        self._takes_text = snapshot.spec.takes_text
        self._opened = open_captions(snapshot, run, store) if self._takes_text else None
        self._captions = [caption.strip() for caption in request.captions]
        self._embedded: list[torch.Tensor] = []
        if self._captions:
            self._embedded = embed_captions(snapshot, self._captions, self._opened, text, device)
        elif self._takes_text:
            self._opened = needed_captions(self._opened, run)

    def _choice(self, number: int) -> int:
        """Which of those that there are."""
        given = self._captions or self._request.labels
        if given:
            return number % len(given)
        if self._takes_text:
            assert self._opened is not None
            return keyed_hash(self._request.seed, number, CHOICE) % self._opened.captions.num_rows
        return keyed_hash(self._request.seed, number, CHOICE) % len(self._snapshot.state["classes"])

    def label(self, number: int) -> int:
        """Class of a picture."""
        chosen = self._choice(number)
        return int(self._request.labels[chosen]) if self._request.labels else chosen

    def labels(self, count: int) -> np.ndarray | None:
        """Classes of all pictures, (N,) int64; None where they have captions."""
        return None if self._takes_text else np.array([self.label(number) for number in range(count)], np.int64)

    def name(self, number: int) -> str:
        """The class or caption of a picture, in words."""
        if not self._takes_text:
            return str(self.label(number))
        chosen = self._choice(number)
        if self._captions:
            return self._captions[chosen]
        assert self._opened is not None
        return self._opened.captions["text"][chosen].as_py()

    def conditioning(self, numbers: Sequence[int]) -> Conditioning:
        """The conditioning of some pictures."""
        if not self._takes_text:
            labels = torch.tensor([self.label(number) for number in numbers], device=self._device)
            return self._snapshot.conditioner(labels, None, None)
        if self._embedded:
            rows = [self._embedded[self._choice(number)] for number in numbers]
        else:
            names = [self.name(number) for number in numbers]
            rows = embed_captions(self._snapshot, names, self._opened, self._text, self._device)
        return padded_captions(self._snapshot, rows, self._device)


def describe(snapshot: Snapshot, request: SampleRequest, bucket: str, sampler: str, decoder: str) -> dict[str, Any]:
    """What makes the pictures of a set what they are, but for their number."""
    return {
        "snapshot": snapshot.path.name,
        "weights_xxh3_128": snapshot.weights_hash,
        "decoder_sha256": decoder,
        "bucket": bucket,
        "sampler": sampler,
        "steps": request.steps,
        "guidance": request.guidance,
        "interval": list(request.interval),
        "guided_channels": request.guided_channels,
        "precision": request.precision,
        "seed": request.seed,
        "labels": list(request.labels),
        "captions": list(request.captions),
    }


def take_up(out: Path, wanted: dict[str, Any]) -> None:
    """Begin a set, or go on with one that is the same.

    Raises: RunError: the folder holds another set, or something else; DamageError.
    """
    if not (out / SET).is_file():
        if out.is_dir() and any(path.suffix in (".png", ".npz") for path in out.iterdir()):
            raise RunError(f"folder '{out}': it has pictures that are no set of leandit. Give another --out.")
        write_atomic(out / SET, canonical_json(wanted))
    sweep_strays(out)
    found = read_json(out / SET)
    if not isinstance(found, dict):
        raise DamageError(f"folder '{out}': '{SET}' is not what was written. Give another --out.")
    for key, value in wanted.items():
        if found.get(key) != value:
            raise RunError(
                f"folder '{out}': its pictures were drawn with {key} {found.get(key)!r}, this command has {value!r}. "
                "Give another --out."
            )


def picture_path(out: Path, number: int) -> Path:
    """Where a picture of a set lies."""
    return out / f"{number:06d}.png"


def png_of(pixels: np.ndarray) -> bytes:
    """(height, width, 3) uint8 as PNG."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def read_picture(path: Path, size: tuple[int, int]) -> np.ndarray:
    """(height, width, 3) uint8 of a picture of a set.

    Raises: DamageError: it is none, or of another size.
    """
    try:
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise DamageError(f"picture '{path}': it cannot be read ({error}). Remove it, and sample again.") from error
    if pixels.shape != (*size, 3):
        raise DamageError(f"picture '{path}': it is {pixels.shape}, needed {(*size, 3)}. Remove it, and sample again.")
    return pixels


# --------------------------------------------------------------------------------------------------------------- pack


def pack(out: Path, count: int, size: tuple[int, int], labels: Callable[[int], np.ndarray | None]) -> Path:
    """Write ``samples_NxHxWx3.npz``: ``arr_0`` (N, H, W, 3) uint8 and, of classes, ``arr_1`` (N,) int64.

    One picture is in memory at a time. What is there already stays.
    """
    path = out / f"samples_{count}x{size[0]}x{size[1]}x3.npz"
    if not path.is_file():
        pictures = (read_picture(picture_path(out, number), size) for number in range(count))
        write_atomic(path, npz_parts(pictures, (count, *size, 3), labels(count)))
    return path


def npz_parts(pictures: Iterator[np.ndarray], shape: tuple[int, ...], labels: np.ndarray | None) -> Iterator[bytes]:
    """The bytes of an .npz, a picture at a time; not compressed."""
    sink = Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        with archive.open(zipfile.ZipInfo("arr_0.npy", ZIP_TIME), "w", force_zip64=True) as member:
            npy.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for pixels in pictures:
                member.write(pixels.tobytes())
                yield sink.taken()
        if labels is not None:
            content = io.BytesIO()
            npy.write_array(content, labels, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo("arr_1.npy", ZIP_TIME), content.getvalue())
    yield sink.taken()


class Sink(io.RawIOBase):
    """Takes what is written, until it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def taken(self) -> bytes:
        """What was written since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
