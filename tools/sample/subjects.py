"""What each image shows: its class or caption, and the conditioning of a model.

Embeddings of captions are read from a store, or encoded live by its text encoder.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...datasets.batches.captions import Captions as PackedCaptions
from ...datasets.batches.captions import caption_of, captions_of
from ...datasets.format.schema import UNKNOWN
from ...datasets.order.shuffle import keyed_hash
from ...datasets.order.slices import spread
from ...datasets.revisions.catalog import read_manifest, sealed_revisions
from ...datasets.revisions.local import encoder_section, vae_of
from ...datasets.store import LatentStore
from ...errors import EncoderError, LeanditError, RunError
from ...precompute.config import TextSection
from ...precompute.encoders.model_files import nothing_fetched
from ...precompute.encoders.text.encoder import CaptionEncoder
from ...precompute.encoders.text.instructions import instruction_text
from ...precompute.encoders.text.tokenizer import CAPTION, CaptionTokenizer
from ...recipe import parse_stored
from ...train.models.conditioning import Conditioning
from ...train.run.evaluation.grids import EditRecords
from ...train.run.manifest import StoreRead, read_run_manifest, reopen_store, store_place
from ...train.sampling.snapshot import Snapshot, text_encoders
from ...train.weights.folders import RUN
from .request import SampleRequest, find_labels

SHOWN_CHARS = 60  # of a caption, in a warning
CHOICE = 1  # third key of the draw of a subject; the noise has seed and number only
# Keys of a text section that say where an encoder lies and how fast it computes, not what it makes of a caption.
UNCOMPARED = frozenset({"model", "subfolder", "tokenizer_subfolder", "revision", "dtype", "batch_size"})
Embedded = dict[str, PackedCaptions]  # one caption, by name of the text encoder


class Subjects:
    """The class index or caption of each image by its number, and its conditioning.

    Requested labels or captions alternate. Without any, a grid has classes of the run or captions of the store that are
    evenly spread over all of them, and a set draws one uniformly for each image, from the seed and its number.

    A model that edits gets records of the store in the same way, each with its own caption, or the requested ones.

    Args:
      evenly: as for a grid.
      bucket: of the records to edit.
      own_image: (1, C, H, W) latents of an image to edit instead, as the model sees them; None: there is none.
    Raises: RecipeError: the model does not take these subjects; RunError: no store to choose captions or
      images to edit from, or one of another VAE; EncoderError: a caption cannot be encoded.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        run: Path,
        request: SampleRequest,
        device: torch.device,
        *,
        evenly: bool,
        bucket: str,
        own_image: torch.Tensor | None = None,
    ) -> None:
        self._snapshot, self._device, self.total = snapshot, device, request.total
        self._seed, self._evenly, self._own_image = request.seed, evenly, own_image
        self.labels = find_labels(snapshot.state, request.labels, request.captions)
        texts = [caption.strip() for caption in request.captions]
        requested: list[int | str] = [*(self.labels or texts)]
        takes_text = snapshot.spec.takes_text
        self._captions = Captions(snapshot, run, request.store, request.text, device) if takes_text else None
        self._embedded = self._captions.embed(texts) if self._captions and texts else []
        self.warnings = self._captions.warnings if self._captions else []
        self._image = request.image
        self._records = self._open_records(bucket)
        if requested:
            self._choices, self._chosen = requested, np.resize(np.arange(len(requested)), self.total)
        elif not self._records:
            classes = range(len(snapshot.state["classes"] or ()))
            self._choices = self._captions.store.captions["text"] if self._captions else classes
            self.total = min(self.total, len(self._choices)) if self._captions and evenly else self.total
            self._chosen = self._spread(len(self._choices), self.total)
        if self._records:  # each with all requested captions, or with its own
            each = len(requested) or 1
            self.total = min(self.total, len(self._records)) if evenly and not requested else self.total
            self._edited = np.repeat(self._spread(len(self._records), -(-self.total // each)), each)

    def __getitem__(self, number: int) -> int | str:
        """The class index or caption of an image."""
        if self._records and not self._embedded:
            (caption,) = self._records.caption_ids(self._edited[[number]])
            return self._records.store.captions["text"][caption].as_py()
        choice = self._choices[int(self._chosen[number])]
        return choice if isinstance(choice, int | str) else choice.as_py()

    def conditioning(self, numbers: Sequence[int]) -> Conditioning:
        """The conditioning of some images."""
        if not self._captions:
            labels = torch.tensor([self[number] for number in numbers], device=self._device)
            return self._snapshot.conditioner(labels, {})
        if self._embedded:
            given = self._captions.conditioning([self._embedded[place] for place in self._chosen[list(numbers)]])
        else:
            given = self._captions.conditioning(self._captions.embed([str(self[number]) for number in numbers]))
        if self._snapshot.spec.reference:
            given = given._replace(reference=self.references(numbers).to(self._device))
        return given

    def references(self, numbers: Sequence[int]) -> torch.Tensor:
        """The images that some images edit, (B, C, H, W) float32 latents as the model sees them."""
        if self._own_image is not None:
            return self._own_image.expand(len(numbers), -1, -1, -1)
        assert self._records, "a model that edits has one or the other"
        return self._records.latents(self._edited[list(numbers)])

    def edits(self) -> dict[str, str]:
        """What identifies the images that are edited; nothing for a model that edits none."""
        if self._image:
            return {"image_sha256": hashlib.sha256(self._image.read_bytes()).hexdigest()}
        if not self._records:
            return {}
        store = self._records.store
        return {"edits_of": store.root_hash or store.spec.fingerprint}

    def _open_records(self, bucket: str) -> EditRecords | None:
        """Images to edit, of the first store that has some in the bucket; None: the model edits none of a store."""
        name = self._snapshot.spec.reference
        if not name or self._image:
            return None
        assert self._captions, "a model that edits takes captions"
        vae = self._snapshot.state["vae"]["weights_sha256"]
        for store in self._captions.stores:
            if bucket in store.buckets and name in store.companions:
                if vae_of(store.spec, store.path)["weights_sha256"] != vae:
                    raise RunError(f"store '{store.path}': its latents come from another VAE. Check --store.")
                return EditRecords(store, name, bucket, self._snapshot.latent)
        raise RunError(
            f"store '{self._captions.store.path}': no images '{name}' to edit of {bucket} px. Use another --bucket or "
            "--store, or give an image with --image and --caption."
        )

    def _spread(self, num_choices: int, count: int) -> np.ndarray:
        """A choice for each of ``count`` numbers: spread evenly, again and again if too few, or drawn by the seed."""
        if self._evenly:
            return np.resize(spread(num_choices, count), count)
        return np.array([keyed_hash(self._seed, number, CHOICE) % num_choices for number in range(count)])


class Captions:
    """Turns captions into the conditioning of a model.

    Args:
      store: with captions; None: the stores of the run. Captions of one that cannot be opened are encoded, and
        ``warnings`` names it.
      text: hub id or folder of the text encoder, instead of the one that made the store.
    Raises: StoreError; RunError: the store's captions come from another text encoder; EncoderError: ``text`` is one of
      several.
    """

    def __init__(
        self, snapshot: Snapshot, run: Path, store: Path | None, text: str | None, device: torch.device
    ) -> None:
        self._snapshot, self._run, self._text, self._device = snapshot, run, text, device
        self.warnings: list[str] = []  # on captions that were encoded now
        self._encoders = text_encoders(snapshot.state)
        self._most_tokens = max((made["model"].get("max_tokens", 0) for made in self._encoders.values()), default=0)
        if text and len(self._encoders) > 1:
            raise EncoderError(f"--text '{text}': the model reads {len(self._encoders)} text encoders. Leave it out.")
        if store:
            self.stores = [LatentStore(store, allow_incomplete=True)]
            self._missing: list[str] = []
        else:
            self.stores, self._missing = _stores_of(run)
        self.warnings += self._missing
        for opened in self.stores:
            if problem := self._difference(opened):
                advice = "Check --store." if store else "Pass the store of the run with --store."
                raise RunError(f"store '{opened.path}': its captions {problem}. {advice}")

    def _difference(self, store: LatentStore) -> str:
        """How the captions of a store differ from those that the model was trained on; empty: they do not."""
        stored = {one.name: one.encoder.weights_sha256 for one in store.spec.text_encoders}
        for name, made in self._encoders.items() if stored else ():
            if stored.get(name) != made["weights_sha256"]:
                return "come from another text encoder"
            role = f"text.{name}" if name else "text"
            ours, theirs = map(_settings, (encoder_section(store.spec, role, store.path), made["model"]))
            for key in sorted(ours.keys() & theirs.keys()):
                if ours[key] != theirs[key]:
                    return f"were encoded with {role}.{key} {ours[key]!r}, those of the model with {theirs[key]!r}"
        return ""

    @property
    def store(self) -> LatentStore:
        """The store to choose captions from: the first of the run.

        Raises: RunError: there is none.
        """
        if not self.stores:
            image = " and --image" if self._snapshot.spec.reference else ""
            reasons = "".join(f"\n  {problem}" for problem in self._missing)
            raise RunError(
                f"run '{self._run}': its store is missing, or another one, so there are no captions to choose from"
                f"{' or images to edit' if image else ''}. Pass --store, or --caption{image}.{reasons}"
            )
        return self.stores[0]

    def embed(self, captions: Sequence[str]) -> list[Embedded]:
        """Embeddings of each caption: of the first store that has it, else encoded now.

        Raises: EncoderError: a caption is not in a store, and its encoder is missing or another one.
        """
        embedded: dict[str, Embedded] = {}
        for store in reversed(self.stores):
            for caption, row in zip(captions, store.find_captions(list(captions)), strict=True):
                if row is not None:
                    embedded[caption] = {name: captions_of(store.text(name), [row]) for name in self._encoders}
        if missing := [caption for caption in captions if caption not in embedded]:
            embedded |= zip(missing, self.embed_live(missing), strict=True)
        return [embedded[caption] for caption in captions]

    def embed_live(self, captions: list[str]) -> list[Embedded]:
        """Encode captions, by one encoder after the other, so that one is in memory.

        Raises: EncoderError: an encoder is missing, or another one.
        """
        by_encoder = {name: self._encode(name, captions) for name in self._encoders}
        return [{name: rows[number] for name, rows in by_encoder.items()} for number in range(len(captions))]

    def conditioning(self, embeddings: Sequence[Embedded]) -> Conditioning:
        """The conditioning of some embeddings."""
        texts = {
            name: PackedCaptions.joined([each[name] for each in embeddings]).to(self._device) for name in self._encoders
        }
        return self._snapshot.conditioner(None, texts)

    def _encode(self, name: str, captions: list[str]) -> list[PackedCaptions]:
        made, what = self._encoders[name], f"text encoder '{name}'" if name else "text encoder"
        other = {"model": self._text, "subfolder": "", "tokenizer_subfolder": "", "revision": ""} if self._text else {}
        section, _ = parse_stored(f"snapshot '{self._snapshot.path}', {what}", TextSection, made["model"] | other)
        try:
            with contextlib.nullcontext() if self._text else nothing_fetched():
                tokenizer = CaptionTokenizer(section)
                encoder = CaptionEncoder(section, tokenizer, self._device)
                encoder.load()
        except EncoderError as error:
            raise EncoderError(
                f"caption '{captions[0]}' is not in the store, and its {what} is not available: {error} "
                "Use a caption of the store, or pass --text PATH."
            ) from error
        if made["weights_sha256"] not in (encoder.identity.weights_sha256, UNKNOWN):
            raise EncoderError(f"text encoder '{section.model}': not the one that made the store. Check --text.")
        for caption, count in zip(captions, tokenizer.count(captions), strict=True):
            if count > section.max_tokens == self._most_tokens:
                short = caption if len(caption) <= SHOWN_CHARS else f"{caption[:SHOWN_CHARS]}..."
                self.warnings.append(
                    f"caption '{short}' has {count} tokens, the model reads {section.max_tokens}: the rest is cut off"
                )
        encoded = [caption_of(*encoder.encode([caption]).row(0)) for caption in captions]
        encoder.release()
        return encoded


def _settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """What a text section makes of a caption, with texts as they are encoded."""
    values = {**TextSection().model_dump(), **section}
    values |= {"instruction": instruction_text(values["instruction"]), "template": values["template"] or CAPTION}
    if values["padding_side"] == "auto":
        del values["padding_side"]  # that of the tokenizer
    return {key: value for key, value in values.items() if key not in UNCOMPARED}


def _stores_of(run: Path) -> tuple[list[LatentStore], list[str]]:
    """The stores of a run, and a sentence on each that cannot be opened, or is another one now."""
    stores: dict[StoreRead, LatentStore] = {}
    problems: list[str] = []
    manifest = read_run_manifest(run) if (run / RUN).is_file() else None
    if manifest is None:
        return [], []
    for read in dict.fromkeys(manifest.stores):
        try:
            store = reopen_store(run, manifest, read)
            revisions = sealed_revisions(store.path) if read.root_hash else []  # none is left of a compacted store
            is_other = (
                read.revision in revisions and read_manifest(store.path, read.revision).root_hash != read.root_hash
            )
        except (LeanditError, OSError) as error:
            problems.append(f"a store of run '{run}' cannot be opened: {error}")
            continue
        if is_other:
            place = store_place(run, read)
            problems.append(f"store '{place}' is not the one that run '{run}' was trained on: its root hash is another")
        else:
            stores[read] = store
    return list(stores.values()), problems
