"""What each image shows: its class or caption, and the conditioning of a model.

Embeddings of captions are read from a store, or encoded live by its text encoder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from ...datasets.arrays.caption_tokens import CaptionTokens
from ...datasets.batches.captions import padded_captions
from ...datasets.disk.hashing import read_json
from ...datasets.errors import EncoderError, RunError, StoreError
from ...datasets.format.schema import UNKNOWN
from ...datasets.order.shuffle import keyed_hash
from ...datasets.store import LatentStore
from ...precompute.config import TextSection
from ...precompute.encoders.model_files import nothing_fetched
from ...precompute.encoders.text.encoder import CaptionEncoder, EncodedCaption
from ...precompute.encoders.text.tokenizer import CaptionTokenizer
from ...train.models.conditioning import Conditioning
from ...train.sampling.snapshot import Snapshot, text_encoders
from ...train.weights.folders import RUN
from .request import SampleRequest, find_labels

CHOICE = 1  # third key of the draw of a subject; the noise has seed and number only
Embedded = dict[str, EncodedCaption]  # of one caption, by name of the text encoder


def evenly_spread(total: int, count: int) -> np.ndarray:
    """So many of the numbers 0 to total - 1, from the first to the last; (count,) int64, ascending."""
    return np.linspace(0, total - 1, count).round().astype(np.int64)


class Subjects:
    """The class or caption of each image by its number, and its conditioning.

    Requested labels or captions alternate. Without any, a grid has classes of the run or captions of the store that are
    evenly spread over all of them, and a set draws one uniformly for each image, from the seed and its number.

    Args:
      evenly: as for a grid.
    Raises: RecipeError: the model does not take these subjects; RunError: there is no store to choose captions from;
      EncoderError: a caption cannot be encoded.
    """

    def __init__(
        self, snapshot: Snapshot, run: Path, request: SampleRequest, device: torch.device, *, evenly: bool
    ) -> None:
        self._snapshot, self._device, self.total = snapshot, device, request.total
        self.labels = find_labels(snapshot.state, request.labels, request.captions)
        self._texts = [caption.strip() for caption in request.captions]
        self._captions = None
        if snapshot.spec.takes_text:
            self._captions = Captions(snapshot, run, request.store, request.text, device)
        self._embeddings = self._captions.embed(self._texts) if self._captions and self._texts else []
        if requested := len(self._texts or self.labels):
            self._choose = lambda number: number % requested
            return
        choices = self._captions.store.captions.num_rows if self._captions else len(snapshot.state["classes"])
        if evenly:
            self.total = min(self.total, choices) if self._captions else self.total
            self._choose = evenly_spread(choices, self.total).tolist().__getitem__
        else:
            self._choose = lambda number: keyed_hash(request.seed, number, CHOICE) % choices

    def label(self, number: int) -> int | None:
        """Class of an image; None for captions."""
        if self._captions:
            return None
        return self.labels[self._choose(number)] if self.labels else self._choose(number)

    def name(self, number: int) -> str:
        """The class index or caption of an image."""
        if not self._captions:
            return str(self.label(number))
        chosen = self._choose(number)
        return self._texts[chosen] if self._texts else self._captions.text(chosen)

    def conditioning(self, numbers: Sequence[int]) -> Conditioning:
        """The conditioning of some images."""
        if not self._captions:
            labels = torch.tensor([self.label(number) for number in numbers], device=self._device)
            return self._snapshot.conditioner(labels, {})
        if self._embeddings:
            return self._captions.conditioning([self._embeddings[self._choose(number)] for number in numbers])
        return self._captions.conditioning(self._captions.embed([self.name(number) for number in numbers]))


class Captions:
    """Turns captions into the conditioning of a model.

    Args:
      store: with captions; None: the stores of the run, as far as they still exist.
      text: hub id or folder of the text encoder, instead of the one that made the store.
    Raises: StoreError; RunError: the store's captions come from another text encoder; EncoderError: ``text`` is one of
      several.
    """

    def __init__(
        self, snapshot: Snapshot, run: Path, store: Path | None, text: str | None, device: torch.device
    ) -> None:
        self._snapshot, self._run, self._text, self._device = snapshot, run, text, device
        self._encoders = text_encoders(snapshot.state)
        if text and len(self._encoders) > 1:
            raise EncoderError(f"--text '{text}': the model reads {len(self._encoders)} text encoders. Leave it out.")
        self._stores = [LatentStore(store, allow_incomplete=True)] if store else _stores_of(run)
        made_with = {name: encoder["weights_sha256"] for name, encoder in self._encoders.items()}
        for opened in self._stores:
            stored = {encoder.name: encoder.encoder.weights_sha256 for encoder in opened.spec.text_encoders}
            if stored and any(stored.get(name) != weights for name, weights in made_with.items()):
                raise RunError(f"store '{opened.path}': its captions come from another text encoder. Check --store.")

    @property
    def store(self) -> LatentStore:
        """The store to choose captions from: the first of the run.

        Raises: RunError: there is none.
        """
        if not self._stores:
            raise RunError(f"run '{self._run}': its store is gone, so it has no captions. Give --caption or --store.")
        return self._stores[0]

    def text(self, caption_id: int) -> str:
        """A caption of the store."""
        return self.store.captions["text"][caption_id].as_py()

    def embed(self, captions: Sequence[str]) -> list[Embedded]:
        """Embeddings of each caption.

        Raises: EncoderError: a caption is not in the store, and its encoder is missing or another one.
        """
        embedded: dict[str, Embedded] = {}
        for store in reversed(self._stores):
            embedded |= _stored(store, captions, self._encoders)
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
        """The conditioning of some embeddings, padded to the longest."""
        texts = {}
        for name in self._encoders:
            rows = [torch.from_numpy(tokens) for each in embeddings if (tokens := each[name].tokens) is not None]
            pooled = [torch.from_numpy(vector) for each in embeddings if (vector := each[name].pooled) is not None]
            texts[name] = padded_captions(rows, pooled).to(self._device)
        return self._snapshot.conditioner(None, texts)

    def _encode(self, name: str, captions: list[str]) -> list[EncodedCaption]:
        made, what = self._encoders[name], f"text encoder '{name}'" if name else "text encoder"
        other = {"model": self._text, "subfolder": "", "tokenizer_subfolder": "", "revision": ""} if self._text else {}
        section = TextSection.model_validate(made["model"] | other)
        try:
            with contextlib.nullcontext() if self._text else nothing_fetched():
                encoder = CaptionEncoder(section, CaptionTokenizer(section), self._device)
                encoder.load()
        except EncoderError as error:
            raise EncoderError(
                f"caption '{captions[0]}' is not in the store, and its {what} is not available: {error} "
                "Use a caption of the store, or give --text PATH."
            ) from error
        if made["weights_sha256"] not in (encoder.identity.weights_sha256, UNKNOWN):
            raise EncoderError(f"text encoder '{section.model}': not the one that made the store. Check --text.")
        encoded = [encoder.encode([caption]).row(0) for caption in captions]
        encoder.release()
        return encoded


def _stored(store: LatentStore, captions: Sequence[str], encoders: Iterable[str]) -> dict[str, Embedded]:
    """Captions that a store holds, with their embeddings."""
    return {
        caption: {name: _embedding(store.text(name), number) for name in encoders}
        for caption, number in zip(captions, store.find_captions(list(captions)), strict=True)
        if number is not None
    }


def _embedding(text: CaptionTokens, number: int) -> EncodedCaption:
    return EncodedCaption(
        tokens=np.array(text[number], np.float32) if text.spec.has_tokens else None,
        pooled=np.array(text.pooled_vector(number), np.float32) if text.spec.pooled_width else None,
    )


def _stores_of(run: Path) -> list[LatentStore]:
    """The stores of a run; one that is gone is left out, its captions are encoded."""
    if not (run / RUN).is_file():
        return []
    stores = []
    for place in dict.fromkeys(entry["path"] for entry in read_json(run / RUN)["stores"]):
        with contextlib.suppress(StoreError, FileNotFoundError):
            stores.append(LatentStore(run / place, allow_incomplete=True))
    return stores
