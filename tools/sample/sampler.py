"""``leandit sample``: a snapshot and a VAE decoder make pictures, for class labels or captions.

Captions that are in the store are read from it; with a text encoder at hand, any caption is encoded live.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ...datasets.batches.latents import denormalise
from ...datasets.disk.files import write_atomic
from ...datasets.disk.hashing import canonical_json, read_json
from ...datasets.errors import EncoderError, RecipeError, RunError, StoreError
from ...datasets.format.buckets import bucket_size
from ...datasets.format.schema import UNKNOWN
from ...datasets.store import LatentStore
from ...precompute import config as precompute_config
from ...precompute.config import TextSection
from ...precompute.encoders.text import CaptionEncoder, CaptionTokenizer
from ...precompute.encoders.vae import ImageEncoder
from ...train import config as train_config
from ...train.models.build import patch_of
from ...train.models.conditioning import Conditioning
from ...train.optim.loss_scale import autocast_dtype
from ...train.run.resume import RUN
from ...train.sampling.guided import Solver, draw_latents
from ...train.sampling.schedulers import Sampler, choose_sampler
from ...train.sampling.snapshot import Snapshot, load_snapshot
from ..inspection.contact_sheet import COLUMNS, Cell, draw_sheet, gives_zero_to_one, load_decoder
from .published import load_published
from .subjects import find_labels

BATCH = 64  # pictures drawn at once
DECODED = 16  # pictures decoded at once: a decoder needs more memory for each than the model does
DEFAULT_COUNT = 16
LARGEST_GUIDANCE = 100.0
LARGEST_ROW = 12  # pictures of one label or caption that make a row of the grid


@dataclass(frozen=True)
class SampleRequest:
    """What to draw.

    Args:
      labels: class indexes or names, for a model with classes.
      captions: texts, for a model with captions.
      count: pictures of each label or caption, or of all where neither is given; 0: one, or ``DEFAULT_COUNT``.
      bucket: "HxW" in pixels, or None for the most common one.
      steps, guidance, sampler, interval, guided_channels: as ``Solver`` has them.
      seed: of the noise, and of what is drawn where neither labels nor captions are given.
      precision: of the model's forwards; a device without fast bf16 uses fp32.
      batch: pictures drawn at once.
      recipe, encoders: names or paths of a train and a precompute recipe, for a published checkpoint instead of a run.
      compiled: the model's blocks go through torch.compile.
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
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    batch: int = BATCH
    recipe: str = ""
    encoders: str = ""
    compiled: bool = False

    @property
    def num_subjects(self) -> int:
        """Labels or captions that are asked for."""
        return len(self.labels) + len(self.captions)

    @property
    def total(self) -> int:
        """Pictures in all."""
        return self.num_subjects * max(1, self.count) if self.num_subjects else self.count or DEFAULT_COUNT

    def solver(self, device: torch.device) -> Solver:
        """How the latents are drawn on a device."""
        dtype = autocast_dtype(self.precision, device)
        guidance = self.guidance, self.interval, self.guided_channels
        return Solver(self.sampler, self.steps, *guidance, dtype, tf32=self.precision == "tf32")


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
      store: where captions are looked up; None: the store that the run trained on.
      vae, text: hub id or folder instead of the encoders that the store was made with.
    Returns: what was drawn, as plain values.
    Raises: RunError, EncoderError, StoreError, RecipeError.
    """
    snapshot = open_model(run, request, device, vae, text)
    request = checked(snapshot, request)
    bucket = choose_bucket(snapshot, request)
    sampler = choose_sampler(snapshot.objective, request.sampler, steps=request.steps)
    decoder = load_decoder(snapshot.state["vae"]["model"], vae, device)
    warning = check_decoder(snapshot, decoder)
    names, conditioning = make_conditioning(snapshot, request, run, store, text, device)
    numbers = subject_by_subject(request, len(names))
    pictures = draw_pictures(snapshot, conditioning, decoder, bucket=bucket, request=request, numbers=numbers)
    out.mkdir(parents=True, exist_ok=True)
    cells = [Cell(pixels, name) for pixels, name in zip(pictures, names, strict=True)]
    each = request.count if request.num_subjects and 1 < request.count <= LARGEST_ROW else COLUMNS
    draw_sheet(cells, columns=each).save(out / "grid.png")
    result = {
        "snapshot": snapshot.path.name,
        "step": snapshot.step,
        "bucket": bucket,
        "steps": request.steps,
        "sampler": sampler,
        "guidance": request.guidance,
        "seed": request.seed,
        "samples": names,
        "grid": str(out / "grid.png"),
        "warning": warning,
    }
    write_atomic(out / "samples.json", canonical_json(result))
    return result


def open_model(run: Path, request: SampleRequest, device: torch.device, vae: str | None, text: str | None) -> Snapshot:
    """The newest snapshot of a run, or the published checkpoint that the recipes describe.

    Raises: RecipeError: one recipe without the other; RunError, EncoderError.
    """
    if not (request.recipe or request.encoders):
        return load_snapshot(run, device, compiled=request.compiled)
    if not (request.recipe and request.encoders):
        raise RecipeError(
            "a published checkpoint needs --recipe (of its model, as 'dit-xl-2-256') and --encoders (of its VAE and "
            "text encoder, as 'imagenet-256')."
        )
    recipe, encoders = train_config.load(request.recipe, []), precompute_config.load(request.encoders, [])
    options = {"vae": vae, "text": text, "device": device, "compiled": request.compiled}
    return load_published(str(run), recipe=recipe, encoders=encoders, **options)


def draw_pictures(
    snapshot: Snapshot,
    conditioning: Conditioning,
    decoder: ImageEncoder,
    *,
    bucket: str,
    request: SampleRequest,
    numbers: Sequence[int] | None = None,
) -> np.ndarray:
    """Draw and decode; (B, height_px, width_px, 3) uint8.

    Args:
      numbers: of the pictures, on which their noise depends; None counts them from 0.
    """
    height_px, width_px = bucket_size(bucket)
    size = (height_px // snapshot.latent.downscale, width_px // snapshot.latent.downscale)
    given = conditioning.labels if conditioning.labels is not None else conditioning.captions
    assert given is not None
    numbers = range(len(given)) if numbers is None else numbers
    solver, pictures = request.solver(given.device), []
    for start in range(0, len(given), request.batch):
        rows = slice(start, start + request.batch)
        latents = draw_latents(
            snapshot,
            conditioning.part(rows),
            size=size,
            seed=request.seed,
            solver=solver,
            numbers=numbers[rows],
        )
        raw = denormalise(latents.cpu(), snapshot.latent).numpy()
        for first in range(0, len(raw), DECODED):
            part = raw[first : first + DECODED]
            pictures.append(decoder.decode(part, zero_to_one=gives_zero_to_one(snapshot.latent)))
    return np.concatenate(pictures)


def choose_bucket(snapshot: Snapshot, request: SampleRequest) -> str:
    """The size that is asked for, else the most common one of the store.

    Raises: RecipeError: the latents cannot have it.
    """
    bucket = request.bucket or max(snapshot.state["buckets"], key=lambda name: snapshot.state["buckets"][name])
    check_bucket(snapshot, bucket)
    return bucket


def subject_by_subject(request: SampleRequest, total: int) -> list[int]:
    """Numbers of the pictures of a grid: all of the first label or caption, then all of the next.

    In a set (``sample_set.py``) labels and captions take turns; picture number n is the same here and there.
    """
    step = request.num_subjects or 1
    return [number for first in range(step) for number in range(first, total, step)]


def make_conditioning(
    snapshot: Snapshot, request: SampleRequest, run: Path, store: Path | None, text: str | None, device: torch.device
) -> tuple[list[str], Conditioning]:
    """Conditioning of what was asked for, subject by subject, and a name for each picture.

    Args:
      request: its labels as indexes (``checked``).
    """
    if snapshot.spec.takes_text:
        return caption_conditioning(snapshot, request, run, store, text, device)
    classes = snapshot.class_names
    labels = [int(label) for label in request.labels for _ in range(max(1, request.count))]
    labels = labels or [round(i) for i in np.linspace(0, len(classes) - 1, request.total)]
    names = [f"{label}: {classes.describe(label)}" for label in labels]
    return names, snapshot.conditioner(torch.tensor(labels, device=device), None, None)


def checked(snapshot: Snapshot, request: SampleRequest) -> SampleRequest:
    """The request with class names replaced by their indexes.

    Raises: RecipeError: labels of a model of captions or captions of one of labels, a class that the model does not
      have, guidance that it cannot follow.
    """
    labels = find_labels(snapshot.state, request.labels, request.captions)
    check_guidance(snapshot, request)
    return dataclasses.replace(request, labels=tuple(labels))


def check_guidance(snapshot: Snapshot, request: SampleRequest) -> None:
    """Refuse a guidance that has no meaning for this model.

    Raises: RecipeError.
    """
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


def caption_conditioning(
    snapshot: Snapshot, request: SampleRequest, run: Path, store: Path | None, text: str | None, device: torch.device
) -> tuple[list[str], Conditioning]:
    """Captions from the store, and those it does not have through the text encoder."""
    opened = open_captions(snapshot, run, store)
    captions = [caption.strip() for caption in request.captions]
    if not captions:
        opened = needed_captions(opened, run)
        spread = np.linspace(0, opened.captions.num_rows - 1, min(request.total, opened.captions.num_rows))
        captions = opened.captions["text"].take(spread.round().astype(int)).to_pylist()
    each = max(1, request.count) if request.captions else 1
    rows = embed_captions(snapshot, captions, opened, text, device)
    names = [caption for caption in captions for _ in range(each)]
    return names, padded_captions(snapshot, [row for row in rows for _ in range(each)], device)


def open_captions(snapshot: Snapshot, run: Path, store: Path | None) -> LatentStore | None:
    """The store that captions are looked up in; None where none is named and the run's own is gone.

    Raises: StoreError; RunError: its captions are of another text encoder.
    """
    if store:
        opened = LatentStore(store, allow_incomplete=True)
    else:
        try:
            opened = LatentStore(run / read_json(run / RUN)["store"], allow_incomplete=True)
        except (StoreError, FileNotFoundError):
            return None  # then captions are encoded
    if opened.spec.text_encoder:
        made_with = snapshot.state["text_encoder"]["weights_sha256"]
        if opened.spec.text_encoder.weights_sha256 != made_with:
            raise RunError(
                f"store '{opened.path}': its captions are of another text encoder than the run's. Check --store."
            )
    return opened


def needed_captions(opened: LatentStore | None, run: Path) -> LatentStore:
    """The store to choose captions from.

    Raises: RunError: there is none.
    """
    if opened is None:
        raise RunError(f"run '{run}': its store is not there to choose captions from. Give --caption or --store.")
    return opened


def embed_captions(
    snapshot: Snapshot, captions: Sequence[str], opened: LatentStore | None, text: str | None, device: torch.device
) -> list[torch.Tensor]:
    """Embedding of each caption, (L, D) float32: of the store, else through the text encoder.

    Raises: EncoderError.
    """
    ids = opened.find_captions(list(captions)) if opened else [None] * len(captions)
    live = [caption for caption, i in zip(captions, ids, strict=True) if i is None]
    encoded = dict(zip(live, encode_live(snapshot, live, text, device), strict=True)) if live else {}
    rows = []
    for caption, i in zip(captions, ids, strict=True):
        if i is None:
            rows.append(encoded[caption])
        else:
            assert opened is not None
            rows.append(torch.from_numpy(np.array(opened.caption_embedding(i))))
    return [row.float() for row in rows]


def padded_captions(snapshot: Snapshot, rows: Sequence[torch.Tensor], device: torch.device) -> Conditioning:
    """The conditioning of some embeddings, padded to the longest."""
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)  # (B, L, D)
    return snapshot.conditioner(None, padded, lengths)


def encode_live(snapshot: Snapshot, captions: list[str], text: str | None, device: torch.device) -> list[torch.Tensor]:
    """Encode captions that no store holds, (L, D) float32 each.

    Raises: EncoderError: the encoder is not at hand, or is another one.
    """
    chosen = {"model": text, "subfolder": "", "tokenizer_subfolder": "", "revision": ""} if text else {}
    section = TextSection.model_validate(snapshot.state["text_encoder"]["model"] | chosen)
    try:
        encoder = CaptionEncoder(section, CaptionTokenizer(section), device)
    except EncoderError as error:
        raise EncoderError(
            f"caption '{captions[0]}' is not in the store, and its text encoder is not at hand: {error} "
            "Use a caption of the store, or give --text PATH."
        ) from error
    made_with = snapshot.state["text_encoder"]["weights_sha256"]
    if made_with not in (encoder.identity.weights_sha256, UNKNOWN):
        raise EncoderError(f"text encoder '{section.model}': not the one that the store was made with. Check --text.")
    return [torch.from_numpy(encoder.encode([caption])[0]) for caption in captions]


def check_bucket(snapshot: Snapshot, bucket: str) -> None:
    """Refuse a size that the latents cannot have.

    Raises: RecipeError.
    """
    step = snapshot.latent.downscale * patch_of(snapshot.spec)
    if any(side % step for side in bucket_size(bucket)):
        raise RecipeError(f"--bucket {bucket}: both sides must be multiples of {step} px for this model and VAE.")


def check_decoder(snapshot: Snapshot, decoder: ImageEncoder) -> str | None:
    """Say so when the decoder is not of the VAE that made the store.

    Raises: EncoderError: its latents have another number of channels.
    """
    if decoder.num_channels != snapshot.spec.channels:
        raise EncoderError(
            f"vae '{decoder.identity.model}': its latents have {decoder.num_channels} channels, the model makes "
            f"{snapshot.spec.channels}. Give the store's VAE with --vae."
        )
    if decoder.identity.weights_sha256 != snapshot.state["vae"]["weights_sha256"]:
        return f"decoded by '{decoder.identity.model}', which is not the VAE that the store was made with"
    return None
