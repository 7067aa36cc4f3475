"""``leandit sample``: images from a snapshot and a VAE decoder, for class labels or captions."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...datasets.batches.latents import denormalise
from ...datasets.disk.files import write_atomic
from ...datasets.disk.hashing import canonical_json
from ...datasets.errors import RecipeError, RunError
from ...datasets.format.buckets import bucket_size
from ...train.models.build import most_tokens_a_side, patch_of
from ...train.optim.loss_scale import autocast_dtype
from ...train.sampling.guided import Solver, draw_latents
from ...train.sampling.schedulers import choose_sampler
from ...train.sampling.snapshot import Snapshot, load_snapshot
from ..inspection.pictures import COLUMNS, Cell, LatentDecoder, draw_sheet
from .published import load_published
from .request import SampleRequest
from .subjects import Subjects

LOG = logging.getLogger(__name__)
DECODED = 16  # images decoded at once: for each, a decoder needs more memory than the model
LARGEST_GUIDANCE = 100.0
MANY_FORWARDS = 1000  # compiling takes about a minute, and saves about a third; a rule, not measured on a GPU
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
    subjects, subject_count = sampler.subjects, request.num_subjects or 1
    numbers = sorted(range(subjects.total), key=lambda number: number % subject_count)
    classes = sampler.snapshot.class_names
    labels = [subjects.label(number) for number in numbers]
    names = [
        subjects.name(number) if label is None else f"{label}: {classes.describe(label)}"
        for number, label in zip(numbers, labels, strict=True)
    ]
    cells = [Cell(pixels, name) for (_, pixels), name in zip(sampler.draw(numbers), names, strict=True)]
    of_each = request.count or 1
    columns = of_each if request.num_subjects and 1 < of_each <= LARGEST_ROW else COLUMNS
    out.mkdir(parents=True, exist_ok=True)
    draw_sheet(cells, columns=columns).save(out / "grid.png")
    files = {"samples": names, "grid": str(out / "grid.png")}
    result = sampler.summary() | {"steps": request.steps, "seed": request.seed} | files
    write_atomic(out / "samples.json", canonical_json(result))
    return result


def open_sampler(
    run: Path, request: SampleRequest, device: torch.device, *, processes: int = 1, evenly: bool = False
) -> ImageSampler:
    """Load the newest snapshot of a run or a published checkpoint, and check the request.

    Args:
      processes: that share the images.
      evenly: as of ``Subjects``.
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
      evenly: as of ``Subjects``.
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
        check_guidance(snapshot, request)
        self.snapshot, self.request, self._compiled = snapshot, request, compiled
        self.bucket = choose_bucket(snapshot, request.bucket)
        self.sampler = choose_sampler(snapshot.objective, request.sampler, steps=request.steps)
        if self.sampler != "sde" and (request.diffusion, request.last_step) != ("sigma", "mean"):
            raise RecipeError("--diffusion, --last-step: only --sampler sde has them. Give it, or leave them out.")
        if snapshot.objective.kind != "flow" and request.shift is not None:
            raise RecipeError(
                f"--shift {request.shift:g}: only flow matching has one; the run has 'ddpm'. Leave it out."
            )
        self.solver = Solver(
            sampler=request.sampler,
            steps=request.steps,
            guidance=request.guidance,
            interval=request.interval,
            guided_channels=request.guided_channels,
            shift=request.shift,
            diffusion=request.diffusion,
            last_step=request.last_step,
            autocast=autocast_dtype(request.precision, device),
            tf32=request.precision == "tf32",
        )
        self.subjects = Subjects(snapshot, run, request, device, evenly=evenly)
        where = f"snapshot '{snapshot.path}'"
        self.decoder = LatentDecoder(snapshot.state["vae"], snapshot.latent, request.vae, device, where=where)

    @property
    def warning(self) -> str | None:
        """For the user, if the average is young, or the decoder is not the VAE that made the store."""
        other = f"decoded by '{self.decoder.identity.model}', which is not the VAE that the store was made with"
        return "; ".join(filter(None, (self.snapshot.warning, None if self.decoder.is_own else other))) or None

    def summary(self) -> dict[str, Any]:
        """What it draws with, as plain values."""
        return {
            "snapshot": self.snapshot.path.name,
            "step": self.snapshot.step,
            "weights": self.snapshot.weights,
            "bucket": self.bucket,
            "sampler": self.sampler,
            "guidance": self.request.guidance,
            "warning": self.warning,
        }

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
            raw = denormalise(latents.cpu(), snapshot.latent).numpy()
            yield from zip(batch, decode_in_parts(self.decoder.decode, raw), strict=True)


def decode_in_parts(
    decode: Callable[[np.ndarray], np.ndarray], rows: np.ndarray, most: int = DECODED
) -> Iterator[np.ndarray]:
    """Decode some rows at a time; images of (height_px, width_px, 3) uint8."""
    for start in range(0, len(rows), most):
        yield from decode(rows[start : start + most])


# ------------------------------------------------------------------------------------------------------------- checks


def check_guidance(snapshot: Snapshot, request: SampleRequest) -> None:
    """Raise RecipeError for guidance that the model cannot follow."""
    guidance, channels = request.guidance, snapshot.spec.channels
    if not 0 <= guidance <= LARGEST_GUIDANCE:
        raise RecipeError(f"--guidance {guidance:g}: expected a number from 0 to {LARGEST_GUIDANCE:g}; 1 is none.")
    if request.guided_channels > channels:
        raise RecipeError(f"--guidance-channels {request.guided_channels}: the latents have {channels} channels.")
    if guidance != 1 and snapshot.state.get("drop") == 0:
        raise RecipeError(
            f"--guidance {guidance:g}: the model was trained with conditioning.drop = 0, so it has not learned the "
            "null condition that guidance needs. Use --guidance 1."
        )


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
