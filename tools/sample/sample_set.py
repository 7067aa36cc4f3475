"""``leandit sample --num 50000``: a set of pictures for an evaluation, drawn by any number of processes.

Each picture depends on the seed and its number alone; the process and the batch that draw it change only rounding.
Process r of n draws the missing numbers among r, r + n, r + 2n, ...; processes do not communicate. A process that finds
all pictures packs them for ADM's evaluator (guided-diffusion, evaluations/evaluator.py).
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
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
from ...train.sampling.snapshot import Snapshot
from .captions import Captions
from .sampler import Generator, SampleRequest, open_generator

SET, RESULT = "set.json", "samples.json"
CHOICE = 1  # third key of the draw of a subject; the noise has seed and number only
ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # so that equal pictures give equal files


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
    """Draw the missing pictures of this process; pack the set if it is complete.

    Args:
      out: folder for ``000000.png`` and so on, the same for all processes.
      store, vae, text: as for ``sampler.sample``.
    Returns: what was drawn and how many pictures exist, as plain values.
    Raises: RunError: the folder holds another set; RecipeError, EncoderError, StoreError.
    """
    generator, count = open_generator(run, request, device, vae, text, ranks.world_size), request.total
    subjects = Subjects(generator.snapshot, generator.request, run, store, text, device)
    open_set(out, describe(generator))

    rank_numbers = range(ranks.rank, count, ranks.world_size)
    missing = [number for number in rank_numbers if not picture_path(out, number).is_file()]
    for start in range(0, len(missing), request.batch):
        numbers = missing[start : start + request.batch]
        pictures = generator.draw(subjects.conditioning(numbers), numbers, total=len(missing))
        for number, pixels in zip(numbers, pictures, strict=True):
            write_atomic(picture_path(out, number), png_bytes(pixels))
        progress("sample", len(rank_numbers) - len(missing) + start + len(numbers), len(rank_numbers))

    num_pictures = sum(picture_path(out, number).is_file() for number in range(count))
    packed = pack(out, count, bucket_size(generator.bucket), subjects) if num_pictures == count else None
    drawn = {"drawn": len(missing), "there": num_pictures, "of": count, "npz": packed and str(packed)}
    return generator.summary() | drawn


class Subjects:
    """The label or caption of each picture of a set.

    Requested labels or captions alternate. Otherwise each picture has a class of the run or a caption of the store,
    drawn uniformly from the seed and its number.

    Args:
      request: with class indexes for labels (``sampler.resolve_request``).
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
        self._snapshot, self._request, self._device = snapshot, request, device
        self._captions = Captions(snapshot, run, store, text, device) if snapshot.spec.takes_text else None
        self._texts = [caption.strip() for caption in request.captions]
        self._embeddings = self._captions.embed(self._texts) if self._captions and self._texts else []
        if requested := len(self._texts or request.labels):
            self._choose = lambda number: number % requested
        else:
            choices = self._captions.store.captions.num_rows if self._captions else len(snapshot.state["classes"])
            self._choose = lambda number: keyed_hash(request.seed, number, CHOICE) % choices

    def label(self, number: int) -> int:
        """Class of a picture."""
        chosen = self._choose(number)
        return int(self._request.labels[chosen]) if self._request.labels else chosen

    def labels(self, count: int) -> np.ndarray | None:
        """Classes of all pictures, (N,) int64; None for captions."""
        return None if self._captions else np.array([self.label(number) for number in range(count)], np.int64)

    def name(self, number: int) -> str:
        """The class index or caption of a picture."""
        if not self._captions:
            return str(self.label(number))
        chosen = self._choose(number)
        return self._texts[chosen] if self._texts else self._captions.text(chosen)

    def conditioning(self, numbers: Sequence[int]) -> Conditioning:
        """The conditioning of some pictures."""
        if not self._captions:
            labels = torch.tensor([self.label(number) for number in numbers], device=self._device)
            return self._snapshot.conditioner(labels, {})
        if self._embeddings:
            return self._captions.conditioning([self._embeddings[self._choose(number)] for number in numbers])
        return self._captions.conditioning(self._captions.embed([self.name(number) for number in numbers]))


def describe(generator: Generator) -> dict[str, Any]:
    """Everything that determines the pictures of a set."""
    request = generator.request
    more: dict[str, Any] = {} if request.shift is None else {"shift": request.shift}
    if generator.sampler == "sde":
        more |= {"diffusion": request.diffusion, "last_step": request.last_step}
    return more | {
        "snapshot": generator.snapshot.path.name,
        "weights_xxh3_128": generator.snapshot.weights_hash,
        "decoder_sha256": generator.decoder.identity.weights_sha256,
        "bucket": generator.bucket,
        "sampler": generator.sampler,
        "steps": request.steps,
        "guidance": request.guidance,
        "interval": list(request.interval),
        "guided_channels": request.guided_channels,
        "precision": request.precision,
        "seed": request.seed,
        "labels": list(request.labels),
        "captions": list(request.captions),
    }


def open_set(out: Path, description: dict[str, Any]) -> None:
    """Start a set, or resume one with the same description.

    Raises: RunError: the folder holds another set, or other pictures; DamageError.
    """
    if not (out / SET).is_file():
        if out.is_dir() and any(path.suffix in (".png", ".npz") for path in out.iterdir()):
            raise RunError(f"folder '{out}': its pictures are not a set of leandit. Give another --out.")
        write_atomic(out / SET, canonical_json(description))
    sweep_strays(out)
    existing = read_json(out / SET)
    if not isinstance(existing, dict):
        raise DamageError(f"folder '{out}': '{SET}' is damaged. Give another --out.")
    for key in existing | description:
        before, now = existing.get(key), description.get(key)
        if before != now:
            raise RunError(
                f"folder '{out}': its pictures were drawn with {key} {before!r}, this command has {now!r}. Give "
                "another --out."
            )


def picture_path(out: Path, number: int) -> Path:
    """Path of a picture of a set."""
    return out / f"{number:06d}.png"


def png_bytes(pixels: np.ndarray) -> bytes:
    """(height, width, 3) uint8 as PNG."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def read_picture(path: Path, size: tuple[int, int]) -> np.ndarray:
    """Pixels of a picture of a set, (height, width, 3) uint8.

    Raises: DamageError: it cannot be read, or has another size.
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


def pack(out: Path, count: int, size: tuple[int, int], subjects: Subjects) -> Path:
    """Write ``samples.json`` and, unless it exists, ``samples_NxHxWx3.npz``.

    The .npz holds ``arr_0`` (N, H, W, 3) uint8 and, for classes, ``arr_1`` (N,) int64. One picture is in memory at a
    time.
    """
    path = out / f"samples_{count}x{size[0]}x{size[1]}x3.npz"
    if not path.is_file():
        pictures = (read_picture(picture_path(out, number), size) for number in range(count))
        write_atomic(path, npz_parts(pictures, (count, *size, 3), subjects.labels(count)))
    names = [subjects.name(number) for number in range(count)]
    write_atomic(out / RESULT, canonical_json(read_json(out / SET) | {"npz": path.name, "samples": names}))
    return path


def npz_parts(pictures: Iterator[np.ndarray], shape: tuple[int, ...], labels: np.ndarray | None) -> Iterator[bytes]:
    """The bytes of an uncompressed .npz, a picture at a time."""
    buffer = ByteBuffer()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        with archive.open(zipfile.ZipInfo("arr_0.npy", ZIP_TIME), "w", force_zip64=True) as member:
            npy.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for pixels in pictures:
                member.write(pixels.tobytes())
                yield buffer.take()
        if labels is not None:
            content = io.BytesIO()
            npy.write_array(content, labels, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo("arr_1.npy", ZIP_TIME), content.getvalue())
    yield buffer.take()


class ByteBuffer(io.RawIOBase):
    """Collects written bytes until they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def take(self) -> bytes:
        """The bytes written since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
