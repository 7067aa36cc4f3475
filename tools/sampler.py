"""``leandit sample``: a snapshot and a VAE decoder make pictures, for class labels or captions.

Captions that are in the store are read from it; with a text encoder at hand, any caption is encoded live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ..datasets.buckets import bucket_size
from ..datasets.errors import EncoderError, RecipeError, RunError, StoreError
from ..datasets.files import write_atomic
from ..datasets.hashing import canonical_json, read_json
from ..datasets.latents import denormalise
from ..datasets.schema import UNKNOWN
from ..datasets.store import LatentStore
from ..precompute.config import TextSection
from ..precompute.encoders import ImageEncoder
from ..precompute.text_encoders import CaptionEncoder, CaptionTokenizer
from ..train.conditioning import Conditioning
from ..train.models import patch_of
from ..train.precision import autocast_dtype
from ..train.sample import Sampler, Snapshot, Solver, choose_sampler, draw_latents, load_snapshot
from ..train.state import RUN
from .sheet import draw_sheet, gives_zero_to_one, load_decoder

BATCH = 64  # pictures drawn at once
DECODED = 16  # pictures decoded at once: a decoder needs more memory for each than the model does
DEFAULT_COUNT = 16


@dataclass(frozen=True)
class Request:
    """What to draw.

    Args:
      labels: class indexes, for a model with classes.
      captions: texts, for a model with captions.
      count: of pictures where neither is given.
      bucket: "HxW" in pixels, or None for the most common one.
      steps, guidance, sampler, interval, guided_channels: as ``Solver`` has them.
      seed: of the noise, and of what is drawn where neither labels nor captions are given.
      precision: of the model's forwards; a device without fast bf16 uses fp32.
      batch: pictures drawn at once.
    """

    labels: Sequence[int] = ()
    captions: Sequence[str] = ()
    count: int = DEFAULT_COUNT
    bucket: str | None = None
    steps: int = 50
    guidance: float = 4.0
    seed: int = 0
    sampler: Sampler = "auto"
    interval: tuple[float, float] = (0.0, 1.0)
    guided_channels: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    batch: int = BATCH

    def solver(self, device: torch.device) -> Solver:
        """How the latents are drawn on a device."""
        dtype = autocast_dtype(self.precision, device)
        return Solver(self.sampler, self.steps, self.guidance, self.interval, self.guided_channels, dtype)


def sample(
    run: Path,
    request: Request,
    *,
    out: Path,
    device: torch.device,
    store: Path | None,
    vae: str | None,
    text: str | None,
) -> dict:
    """Draw pictures and write ``grid.png`` and ``samples.json``.

    Args:
      store: where captions are looked up; None: the store that the run trained on.
      vae, text: hub id or folder instead of the encoders that the store was made with.
    Returns: what was drawn, as plain values.
    Raises: RunError, EncoderError, StoreError, RecipeError.
    """
    snapshot = load_snapshot(run, device)
    bucket = choose_bucket(snapshot, request)
    sampler = choose_sampler(snapshot.objective, request.sampler, steps=request.steps)
    decoder = load_decoder(snapshot.state["vae"]["model"], vae, device)
    warning = check_decoder(snapshot, decoder)
    names, conditioning = make_conditioning(snapshot, request, run, store, text, device)
    pictures = draw_pictures(snapshot, conditioning, decoder, bucket=bucket, request=request)
    out.mkdir(parents=True, exist_ok=True)
    draw_sheet(list(pictures), names).save(out / "grid.png")
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


def draw_pictures(
    snapshot: Snapshot,
    conditioning: Conditioning,
    decoder: ImageEncoder,
    *,
    bucket: str,
    request: Request,
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


def choose_bucket(snapshot: Snapshot, request: Request) -> str:
    """The size that is asked for, else the most common one of the store.

    Raises: RecipeError: the latents cannot have it.
    """
    bucket = request.bucket or max(snapshot.state["buckets"], key=lambda name: snapshot.state["buckets"][name])
    check_bucket(snapshot, bucket)
    return bucket


def make_conditioning(
    snapshot: Snapshot, request: Request, run: Path, store: Path | None, text: str | None, device: torch.device
) -> tuple[list[str], Conditioning]:
    """Conditioning of what was asked for, and a name for each picture."""
    check_labels(snapshot, request)
    if snapshot.spec.takes_text:
        return caption_conditioning(snapshot, request, run, store, text, device)
    classes = snapshot.state["classes"]
    labels = list(request.labels) or [round(i) for i in np.linspace(0, len(classes) - 1, request.count)]
    names = [f"{label}: {classes[label]}" if label < len(classes) else str(label) for label in labels]
    return names, snapshot.conditioner(torch.tensor(labels, device=device), None, None)


def check_labels(snapshot: Snapshot, request: Request) -> None:
    """Refuse labels of a model of captions, captions of one of labels, and labels that it has not.

    Raises: RecipeError.
    """
    name = snapshot.spec.name
    if snapshot.spec.takes_text and request.labels:
        raise RecipeError(f"--label: model '{name}' takes captions. Use --caption.")
    if not snapshot.spec.takes_text and request.captions:
        raise RecipeError(f"--caption: model '{name}' takes class labels. Use --label.")
    if wrong := [label for label in request.labels if not 0 <= label < snapshot.spec.num_classes]:
        raise RecipeError(f"--label {wrong[0]}: the model has classes 0 to {snapshot.spec.num_classes - 1}.")


def caption_conditioning(
    snapshot: Snapshot, request: Request, run: Path, store: Path | None, text: str | None, device: torch.device
) -> tuple[list[str], Conditioning]:
    """Captions from the store, and those it does not have through the text encoder."""
    opened = open_captions(snapshot, run, store)
    captions = [caption.strip() for caption in request.captions]
    if not captions:
        opened = needed_captions(opened, run)
        spread = np.linspace(0, opened.captions.num_rows - 1, min(request.count, opened.captions.num_rows))
        captions = opened.captions["text"].take(spread.round().astype(int)).to_pylist()
    return captions, padded_captions(snapshot, embed_captions(snapshot, captions, opened, text, device), device)


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
