"""Images from a snapshot and a VAE decoder, for class labels or captions: one loop for grids, sets and the demo."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...datasets.batches.latents import denormalise, normalise
from ...datasets.format.buckets import bucket_name, bucket_size
from ...errors import RecipeError, RecordRejected, RunError, SourceError
from ...precompute.config import MAX_CROP_SHARE
from ...precompute.images.bucket_tables import MAX_RATIO, assign_bucket
from ...precompute.images.decoders import Decoders
from ...train.models.build import most_tokens_a_side, patch_of
from ...train.optim.precision import autocast_dtype
from ...train.sampling.guided import Solver, draw_latents, guidance_scale
from ...train.sampling.schedulers import choose_sampler
from ...train.sampling.snapshot import Snapshot, load_snapshot
from ...train.weights.folders import knows_null
from ..inspection.images import LatentDecoder
from .published import load_published
from .request import SampleRequest
from .subjects import Subjects

LOG = logging.getLogger(__name__)
DECODED = 16  # images decoded at once: for each, a decoder needs more memory than the model
LARGEST_GUIDANCE = 100.0
MANY_FORWARDS = 1000  # compiling takes about a minute, and saves about a third; a rule, not measured on a GPU


def open_sampler(
    run: Path, request: SampleRequest, device: torch.device, *, processes: int = 1, evenly: bool = False
) -> ImageSampler:
    """Load the newest snapshot of a run or a published checkpoint, and check the request.

    Args:
      processes: that share the images.
      evenly: spread classes or captions over all, see ``Subjects``.
    Raises: RunError, EncoderError; RecipeError: the model cannot draw the request.
    """
    compiled = compiles(request, device, processes)
    LOG.info("draws with %s", "compiled blocks" if compiled else "nothing compiled")
    if request.is_published:
        snapshot = load_published(run, request, device, compiled=compiled)
    else:
        snapshot = load_snapshot(run, device, compiled=compiled, frozen=request.base, weights=request.weights)
    return ImageSampler(snapshot, run, request, device, evenly=evenly, compiled=compiled)


def compiles(request: SampleRequest, device: torch.device, processes: int = 1) -> bool:
    """Whether the blocks are compiled: as requested, else on a GPU that makes many forwards."""
    if request.compiled is not None:
        return request.compiled
    forwards = request.steps * math.ceil(request.total / (request.batch * processes))
    return device.type == "cuda" and forwards >= MANY_FORWARDS


class ImageSampler:
    """A model, its decoder, and a checked request.

    Args:
      run: folder of the model, for captions.
      evenly: spread classes or captions over all, see ``Subjects``.
      compiled: the blocks of the model are, so all batches are filled to one size.
    Raises: RunError, EncoderError; RecipeError: the model cannot draw the request.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        run: Path,
        request: SampleRequest,
        device: torch.device,
        *,
        evenly: bool = False,
        compiled: bool = False,
    ) -> None:
        self.snapshot, self.request, self._compiled = snapshot, request, compiled
        self.sampler = choose_sampler(snapshot.objective, request.sampler, steps=request.steps)
        self.guidance = guidance_scale(snapshot.spec, request.guidance)
        check_request(snapshot, request, self.sampler)
        self.bucket = choose_bucket(snapshot, request.bucket)
        self.solver = Solver(
            sampler=request.sampler,
            steps=request.steps,
            guidance=self.guidance,
            interval=request.interval,
            guided_channels=request.guided_channels,
            shift=request.shift,
            diffusion=request.diffusion,
            last_step=request.last_step,
            autocast=autocast_dtype(request.precision, device),
            tf32=request.precision == "tf32",
        )
        where = f"snapshot '{snapshot.path}'"
        self.decoder = LatentDecoder(snapshot.state["vae"], snapshot.latent, request.vae, device, where=where)
        own_image, self._warnings = None, [self.snapshot.warning]
        if not self.decoder.is_own:
            other = self.decoder.identity.model
            what = "encoded and decoded" if request.image else "decoded"
            self._warnings.append(f"{what} by '{other}', which is not the VAE that the store was made with")
        if request.image:
            buckets = [self.bucket] if request.bucket else list(snapshot.state["buckets"])
            pixels, self.bucket, cropped = read_own_image(request.image, buckets)
            self._warnings.append(cropped)
            own_image = normalise(torch.from_numpy(self.decoder.encode(pixels[None])), snapshot.latent)
        self.shift = self._choose_shift()
        self.decoder.check_size(*bucket_size(self.bucket))  # before images are drawn
        self.subjects = Subjects(snapshot, run, request, device, evenly=evenly, bucket=self.bucket, own_image=own_image)

    def summary(self) -> dict[str, Any]:
        """The settings of the images, as plain values.

        It has a warning of a young average, another VAE than that of the store, an image that loses much to its crop,
        a caption that is cut off.
        """
        return {
            "snapshot": self.snapshot.path.name,
            "step": self.snapshot.step,
            "weights": self.snapshot.weights,
            "bucket": self.bucket,
            "sampler": self.sampler,
            "guidance": self.guidance,
            "shift": self.shift,
            "warning": "; ".join(filter(None, [*self._warnings, *self.subjects.warnings])) or None,
        }

    def _choose_shift(self) -> float | None:
        """The shift of the times of a flow for the bucket; None for "ddpm", which has none."""
        if self.snapshot.objective.kind != "flow":
            return None
        height_px, width_px = bucket_size(self.bucket)
        step = self.snapshot.latent.downscale * patch_of(self.snapshot.spec)
        tokens = (height_px // step) * (width_px // step)
        return round(self.snapshot.shift_of(self.solver).at(tokens, self.solver.steps), 4)

    def draw(self, numbers: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Draw images, each by its number and the seed: the number, and (height_px, width_px, 3) uint8.

        Raises: RunError: latents are not finite.
        """
        snapshot, most = self.snapshot, self.request.batch
        height_px, width_px = bucket_size(self.bucket)
        size = (height_px // snapshot.latent.downscale, width_px // snapshot.latent.downscale)
        for start in range(0, len(numbers), most):
            batch = list(numbers[start : start + most])
            # Compiled blocks would be compiled again for a last batch with fewer images.
            filled = batch + batch[-1:] * (min(most, len(numbers)) - len(batch) if self._compiled else 0)
            how = {"size": size, "solver": self.solver, "seed": self.request.seed, "numbers": filled}
            latents = draw_latents(snapshot, self.subjects.conditioning(filled), **how)[: len(batch)]
            finite = latents.flatten(1).isfinite().all(1).tolist()
            if not all(finite):  # which would become black images, and numbers about them
                raise RunError(
                    f"snapshot '{snapshot.path}': the latents of image {batch[finite.index(False)]} are not finite. "
                    "Use an earlier snapshot, or --precision fp32."
                )
            yield from zip(batch, self._decode(latents), strict=True)

    def originals(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """The images that the model edits, as it sees them, by number: (height_px, width_px, 3) uint8."""
        return self._decode(self.subjects.references(numbers))

    def _decode(self, latents: torch.Tensor) -> Iterator[np.ndarray]:
        return decode_in_parts(self.decoder.decode, denormalise(latents.cpu(), self.snapshot.latent).numpy())


def decode_in_parts(
    decode: Callable[[np.ndarray], np.ndarray], rows: np.ndarray, most: int = DECODED
) -> Iterator[np.ndarray]:
    """Decode some rows at a time; images of (height_px, width_px, 3) uint8."""
    for start in range(0, len(rows), most):
        yield from decode(rows[start : start + most])


def read_own_image(path: Path, buckets: Sequence[str]) -> tuple[np.ndarray, str, str]:
    """Decode an image of the user in a process of its own, and crop it at its center to the bucket of nearest shape.

    Returns: (height_px, width_px, 3) uint8; the bucket; a warning if the crop cuts off much, else "".
    Raises: SourceError: it cannot be read, or is too long for several buckets, as in a precompute.
    """
    sizes = list(map(bucket_size, buckets))
    try:
        place = path, 0, path.stat().st_size
        with Decoders(1) as decoders:
            size = decoders.size(*place)
            assert size, "a file has all bytes"
            bucket = assign_bucket(*size, tuple((height / width, height, width) for height, width in sizes))
            if bucket is None:
                raise SourceError(
                    f"--image '{path}': {size[0]}x{size[1]} px, expected a longer side of at most {MAX_RATIO:g} times "
                    "the shorter. Crop it, or choose a shape with --bucket."
                )
            pixels = decoders.decode(*place, bucket=bucket, crop="bucket").pixels
    except (OSError, RecordRejected) as error:
        raise SourceError(f"--image '{path}': it cannot be read ({error}). Expected an image file.") from error
    name, ratio = bucket_name(*bucket), size[0] * bucket[1] / (size[1] * bucket[0])
    lost = 1 - min(ratio, 1 / ratio)
    if lost <= MAX_CROP_SHARE:
        return pixels, name, ""
    return pixels, name, f"--image loses {lost:.0%} of its area to the crop from {size[0]}x{size[1]} to {name} px"


def check_request(snapshot: Snapshot, request: SampleRequest, sampler: str) -> None:
    """Raise RecipeError for guidance or an image that the model does not take, or an option of another sampler."""
    guidance = guidance_scale(snapshot.spec, request.guidance)
    channels = snapshot.spec.channels
    if not 0 <= guidance <= LARGEST_GUIDANCE:
        raise RecipeError(f"--guidance {guidance:g}: expected a number from 0 to {LARGEST_GUIDANCE:g}; 1 means none.")
    if request.guided_channels > channels:
        raise RecipeError(f"--guided-channels {request.guided_channels}: the latents have {channels} channels.")
    if guidance != 1 and not knows_null(snapshot.state):
        raise RecipeError(
            f"--guidance {guidance:g}: the model was trained with conditioning.drop = 0, so it has not learned the "
            "null condition that guidance needs. Use --guidance 1."
        )
    if guidance != 1 and snapshot.spec.takes_text and snapshot.conditioner.null_caption is None:
        raise RecipeError(
            f"--guidance {guidance:g}: snapshot '{snapshot.path}' has no null caption, because its store does not say "
            "how many tokens it has. Train on a store of this release, or use --guidance 1."
        )
    if request.image and not snapshot.spec.reference:
        raise RecipeError(f"--image: model '{snapshot.spec.name}' edits no image. Leave it out.")
    if request.image and not request.captions:
        raise RecipeError("--image: expected a caption that says what to change. Pass --caption.")
    if sampler != "sde" and (request.diffusion, request.last_step) != ("sigma", "mean"):
        raise RecipeError("--diffusion, --last-step: only --sampler sde has them. Give it, or leave them out.")
    if snapshot.objective.kind != "flow" and request.shift is not None:
        raise RecipeError(f"--shift {request.shift:g}: only flow matching has one; the run has 'ddpm'. Leave it out.")


def choose_bucket(snapshot: Snapshot, requested: str | None) -> str:
    """The requested bucket, else the most common one of the store.

    Raises: RecipeError: its sides do not fit the model and the VAE.
    """
    bucket = requested or max(snapshot.state["buckets"], key=lambda name: snapshot.state["buckets"][name])
    step = snapshot.latent.downscale * patch_of(snapshot.spec)
    if any(side % step for side in bucket_size(bucket)):
        raise RecipeError(f"--bucket {bucket}: both sides must be multiples of {step} px for this model and VAE.")
    most = most_tokens_a_side(snapshot.spec)
    if most and max(bucket_size(bucket)) > most * step:
        raise RecipeError(f"--bucket {bucket}: the model's table of positions ends at {most * step} px.")
    return bucket
