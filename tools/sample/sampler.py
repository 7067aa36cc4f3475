"""``leandit sample``: pictures from a snapshot and a VAE decoder, for class labels or captions."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ...datasets.batches.latents import denormalise
from ...datasets.disk.files import write_atomic
from ...datasets.disk.hashing import canonical_json
from ...datasets.errors import RecipeError, RunError
from ...datasets.format.buckets import bucket_size
from ...precompute import config as precompute_config
from ...train import config as train_config
from ...train.models.build import most_tokens_a_side, patch_of
from ...train.models.conditioning import Conditioning
from ...train.optim.loss_scale import autocast_dtype
from ...train.sampling.euler_maruyama import Diffusion, LastStep
from ...train.sampling.guided import Solver, draw_latents
from ...train.sampling.schedulers import Sampler, choose_sampler
from ...train.sampling.snapshot import Snapshot, Weights, load_snapshot
from ..inspection.decoder import LatentDecoder
from ..inspection.grid import COLUMNS, Cell, draw_sheet
from .captions import Captions
from .published import load_published
from .subjects import find_labels

LOG = logging.getLogger(__name__)
BATCH = 64  # pictures drawn at once
DECODED = 16  # pictures decoded at once: for each, a decoder needs more memory than the model
DEFAULT_COUNT = 16
LARGEST_GUIDANCE = 100.0
MANY_FORWARDS = 1000  # compiling takes about a minute, and saves about a third; a rule, not measured on a GPU
LARGEST_ROW = 12  # pictures of one label or caption in a row of the grid


@dataclass(frozen=True)
class SampleRequest:
    """What to draw.

    Args:
      labels: class indexes or names, for a model with classes.
      captions: texts, for a model with captions.
      count: pictures of each label or caption, or in all without either; 0: one, or ``DEFAULT_COUNT``.
      bucket: "HxW" in pixels; None: the most common one.
      steps, guidance, sampler, interval, guided_channels, shift, diffusion, last_step: as in ``Solver``.
      seed: of the noise, and of the choice of subjects without labels and captions.
      precision: of the model's forwards; a device without fast bf16 uses fp32.
      batch: pictures drawn at once.
      recipe, encoders: names or paths of a train and a precompute recipe, for a published checkpoint instead of a run.
      compiled: torch.compile the model's blocks; None: where it pays (``compiles``).
      base: where the weights lie that the adapters of a run were trained on; empty: where they were.
      weights: of the run, averaged or raw.
    """

    labels: Sequence[int | str] = ()
    captions: Sequence[str] = ()
    count: int = 0
    bucket: str | None = None
    steps: int = 50
    guidance: float = 4.0
    seed: int = 0
    sampler: Sampler = "auto"
    interval: tuple[float, float] = (0.0, 1.0)
    guided_channels: int = 0
    shift: float | None = None
    diffusion: Diffusion = "sigma"
    last_step: LastStep = "mean"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    batch: int = BATCH
    recipe: str = ""
    encoders: str = ""
    compiled: bool | None = None
    base: str = ""
    weights: Weights = "averaged"

    @property
    def num_subjects(self) -> int:
        """Number of labels or captions."""
        return len(self.labels) + len(self.captions)

    @property
    def total(self) -> int:
        """Number of pictures."""
        return self.num_subjects * max(1, self.count) if self.num_subjects else self.count or DEFAULT_COUNT

    def compiles(self, device: torch.device, processes: int = 1) -> bool:
        """Whether the blocks are compiled: as asked, else on a GPU that makes many forwards.

        Args:
          processes: that share the pictures.
        """
        if self.compiled is not None:
            return self.compiled
        forwards = self.steps * math.ceil(self.total / (self.batch * processes))
        return device.type == "cuda" and forwards >= MANY_FORWARDS

    def solver(self, device: torch.device) -> Solver:
        """The solver for a device."""
        return Solver(
            sampler=self.sampler,
            steps=self.steps,
            guidance=self.guidance,
            interval=self.interval,
            guided_channels=self.guided_channels,
            shift=self.shift,
            diffusion=self.diffusion,
            last_step=self.last_step,
            autocast=autocast_dtype(self.precision, device),
            tf32=self.precision == "tf32",
        )


@dataclass(frozen=True)
class Generator:
    """A model, a decoder and a checked request.

    Args:
      request: with class indexes for labels.
      warning: for the user, if the average is young, or the decoder is not the VAE that made the store.
    """

    snapshot: Snapshot
    request: SampleRequest
    decoder: LatentDecoder
    bucket: str
    sampler: str
    warning: str | None

    def draw(self, conditioning: Conditioning, numbers: Sequence[int], total: int = 0) -> np.ndarray:
        """As ``draw_pictures``."""
        how = {"bucket": self.bucket, "request": self.request, "total": total}
        return draw_pictures(self.snapshot, conditioning, self.decoder, **how, numbers=numbers)

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


def open_generator(
    run: Path, request: SampleRequest, device: torch.device, vae: str | None, text: str | None, processes: int = 1
) -> Generator:
    """Load the newest snapshot of a run or a published checkpoint, load its decoder, and check the request.

    Args:
      processes: that share the pictures.
    Raises: RunError, EncoderError; RecipeError: the model cannot draw the request.
    """
    request = dataclasses.replace(request, compiled=request.compiles(device, processes))
    LOG.info("draws with %s", "compiled blocks" if request.compiled else "nothing compiled")
    snapshot = _load_model(run, request, device, vae, text)
    request = resolve_request(snapshot, request)
    bucket = choose_bucket(snapshot, request)
    sampler = choose_sampler(snapshot.objective, request.sampler, steps=request.steps)
    if sampler != "sde" and (request.diffusion, request.last_step) != ("sigma", "mean"):
        raise RecipeError("--diffusion, --last-step: they are of --sampler sde. Give it, or leave them out.")
    if snapshot.objective.kind != "flow" and request.shift is not None:
        raise RecipeError(f"--shift {request.shift:g}: it is of flow matching; the run has 'ddpm'. Leave it out.")
    decoder = decoder_of(snapshot, vae, device)
    other = f"decoded by '{decoder.identity.model}', which is not the VAE that the store was made with"
    warnings = [warning for warning in (snapshot.warning, None if decoder.is_own else other) if warning]
    return Generator(snapshot, request, decoder, bucket, sampler, "; ".join(warnings) or None)


def decoder_of(snapshot: Snapshot, vae: str | None, device: torch.device) -> LatentDecoder:
    """The decoder of what a snapshot draws.

    Args:
      vae: hub id or folder of another VAE for the same latents; None: that of the store.
    Raises: EncoderError.
    """
    where = f"snapshot '{snapshot.path}'"
    return LatentDecoder(snapshot.state["vae"], snapshot.latent, vae, device, where=where)


def sample(
    run: Path,
    request: SampleRequest,
    *,
    out: Path,
    device: torch.device,
    store: Path | None,
    vae: str | None,
    text: str | None,
) -> dict:
    """Draw pictures and write ``grid.png`` and ``samples.json``.

    Args:
      run: a run, or with ``request.recipe`` a published checkpoint.
      store: with captions; None: the store that the run trained on.
      vae, text: hub id or folder instead of the encoders that made the store.
    Returns: what was drawn, as plain values.
    Raises: RunError, EncoderError, StoreError, RecipeError.
    """
    generator = open_generator(run, request, device, vae, text)
    names, conditioning = make_conditioning(generator.snapshot, generator.request, run, store, text, device)
    pictures = generator.draw(conditioning, subject_by_subject(request, len(names)))
    out.mkdir(parents=True, exist_ok=True)
    cells = [Cell(pixels, name) for pixels, name in zip(pictures, names, strict=True)]
    columns = request.count if request.num_subjects and 1 < request.count <= LARGEST_ROW else COLUMNS
    draw_sheet(cells, columns=columns).save(out / "grid.png")
    files = {"samples": names, "grid": str(out / "grid.png")}
    result = generator.summary() | {"steps": request.steps, "seed": request.seed} | files
    write_atomic(out / "samples.json", canonical_json(result))
    return result


def _load_model(run: Path, request: SampleRequest, device: torch.device, vae: str | None, text: str | None) -> Snapshot:
    if not (request.recipe or request.encoders):
        how = {"compiled": bool(request.compiled), "frozen": request.base, "weights": request.weights}
        return load_snapshot(run, device, **how)
    if request.weights == "raw":
        raise RecipeError("--weights raw: only a run has them. Leave it out for a published checkpoint.")
    if not (request.recipe and request.encoders):
        raise RecipeError(
            "a published checkpoint needs --recipe (of its model, as 'dit-xl-2-256') and --encoders (of its VAE and "
            "text encoder, as 'imagenet-256')."
        )
    recipe, encoders = train_config.load(request.recipe, []), precompute_config.load(request.encoders, [])
    options = {"vae": vae, "text": text, "device": device, "compiled": bool(request.compiled)}
    return load_published(str(run), recipe=recipe, encoders=encoders, **options)


def draw_pictures(
    snapshot: Snapshot,
    conditioning: Conditioning,
    decoder: LatentDecoder,
    *,
    bucket: str,
    request: SampleRequest,
    numbers: Sequence[int] | None = None,
    total: int = 0,
) -> np.ndarray:
    """Draw and decode; (B, height_px, width_px, 3) uint8.

    Args:
      total: pictures that this process draws, in this call and others; 0: these alone.
      numbers: of the pictures; each number and the seed give the noise. None: 0, 1, 2, ...
    Raises: RunError: latents are not finite.
    """
    height_px, width_px = bucket_size(bucket)
    size = (height_px // snapshot.latent.downscale, width_px // snapshot.latent.downscale)
    subjects = conditioning.labels if conditioning.labels is not None else conditioning.captions
    assert subjects is not None
    numbers = range(len(subjects)) if numbers is None else numbers
    solver, pictures = request.solver(subjects.device), []
    for start in range(0, len(subjects), request.batch):
        rows = list(range(start, min(start + request.batch, len(subjects))))
        # Compiled blocks would be compiled again for a last batch with fewer pictures.
        missing = min(request.batch, total or len(subjects)) - len(rows) if request.compiled else 0
        filled = rows + rows[-1:] * missing
        given, noise = conditioning.part(torch.tensor(filled)), [numbers[row] for row in filled]
        how = {"size": size, "solver": solver, "seed": request.seed, "numbers": noise}
        latents = draw_latents(snapshot, given, **how)[: len(rows)]
        finite = latents.flatten(1).isfinite().all(1).tolist()
        if not all(finite):  # which would become black pictures, and numbers about them
            number = numbers[rows[finite.index(False)]]
            raise RunError(
                f"snapshot '{snapshot.path}': the latents of picture {number} are not finite. Use an earlier "
                "snapshot, or --precision fp32."
            )
        raw = denormalise(latents.cpu(), snapshot.latent).numpy()
        for first in range(0, len(raw), DECODED):
            pictures.append(decoder.decode(raw[first : first + DECODED]))
    return np.concatenate(pictures)


def subject_by_subject(request: SampleRequest, total: int) -> list[int]:
    """Numbers of the pictures of a grid: all of the first label or caption, then all of the next.

    In a set (``sample_set.py``) labels and captions alternate; picture number n is the same in both.
    """
    step = request.num_subjects or 1
    return [number for first in range(step) for number in range(first, total, step)]


def make_conditioning(
    snapshot: Snapshot, request: SampleRequest, run: Path, store: Path | None, text: str | None, device: torch.device
) -> tuple[list[str], Conditioning]:
    """A name for each picture, subject by subject, and the conditioning.

    Args:
      request: with class indexes for labels (``resolve_request``).
    """
    if snapshot.spec.takes_text:
        return _caption_conditioning(request, Captions(snapshot, run, store, text, device))
    classes = snapshot.class_names
    labels = [int(label) for label in request.labels for _ in range(max(1, request.count))]
    labels = labels or [round(i) for i in np.linspace(0, len(classes) - 1, request.total)]
    names = [f"{label}: {classes.describe(label)}" for label in labels]
    return names, snapshot.conditioner(torch.tensor(labels, device=device), {})


def _caption_conditioning(request: SampleRequest, captions: Captions) -> tuple[list[str], Conditioning]:
    """The requested captions, else captions spread evenly over the store."""
    texts, count = [caption.strip() for caption in request.captions], max(1, request.count)
    if not texts:
        num_captions, count = captions.store.captions.num_rows, 1
        spread = np.linspace(0, num_captions - 1, min(request.total, num_captions)).round().astype(int)
        texts = [captions.text(i) for i in spread.tolist()]
    embeddings = [embedding for embedding in captions.embed(texts) for _ in range(count)]
    return [text for text in texts for _ in range(count)], captions.conditioning(embeddings)


# ------------------------------------------------------------------------------------------------------------- checks


def resolve_request(snapshot: Snapshot, request: SampleRequest) -> SampleRequest:
    """The request with class names replaced by their indexes.

    Raises: RecipeError: labels for a model of captions or captions for a model of labels, an unknown class, guidance
      that the model cannot follow.
    """
    labels = find_labels(snapshot.state, request.labels, request.captions)
    guidance, channels = request.guidance, snapshot.spec.channels
    if not 0 <= guidance <= LARGEST_GUIDANCE:
        raise RecipeError(f"--guidance {guidance:g}: needed a number from 0 to {LARGEST_GUIDANCE:g}; 1 is none.")
    if request.guided_channels > channels:
        raise RecipeError(f"--guidance-channels {request.guided_channels}: the latents have {channels} channels.")
    if guidance != 1 and snapshot.state.get("drop") == 0:
        raise RecipeError(
            f"--guidance {guidance:g}: the model was trained with conditioning.drop = 0, so it has not learned the "
            "null condition that guidance needs. Use --guidance 1."
        )
    return dataclasses.replace(request, labels=tuple(labels))


def choose_bucket(snapshot: Snapshot, request: SampleRequest) -> str:
    """The requested bucket, else the most common one of the store.

    Raises: RecipeError: its sides do not fit the model and the VAE.
    """
    bucket = request.bucket or max(snapshot.state["buckets"], key=lambda name: snapshot.state["buckets"][name])
    step = snapshot.latent.downscale * patch_of(snapshot.spec)
    if any(side % step for side in bucket_size(bucket)):
        raise RecipeError(f"--bucket {bucket}: both sides must be multiples of {step} px for this model and VAE.")
    most = most_tokens_a_side(snapshot.spec)
    if most and max(bucket_size(bucket)) > most * step:
        raise RecipeError(f"--bucket {bucket}: the model's table of positions ends at {most * step} px.")
    return bucket
