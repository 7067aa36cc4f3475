"""Embeddings of captions: read from a store, or encoded live by its text encoder."""

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
from ...datasets.store import LatentStore
from ...precompute.config import TextSection
from ...precompute.encoders.model_files import nothing_fetched
from ...precompute.encoders.text.encoder import CaptionEncoder, EncodedCaption
from ...precompute.encoders.text.tokenizer import CaptionTokenizer
from ...train.models.conditioning import Conditioning
from ...train.run.resume import RUN
from ...train.sampling.snapshot import Snapshot, text_encoders

Embedded = dict[str, EncodedCaption]  # of one caption, by name of the text encoder


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
        self._stores = _open_stores(snapshot, run, store)

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
        found: dict[str, Embedded] = {}
        for store in reversed(self._stores):
            found |= _stored(store, captions, self._encoders)
        if missing := [caption for caption in captions if caption not in found]:
            found |= zip(missing, self._encode(missing), strict=True)
        return [found[caption] for caption in captions]

    def conditioning(self, embeddings: Sequence[Embedded]) -> Conditioning:
        """The conditioning of some embeddings, padded to the longest."""
        texts = {}
        for name in self._encoders:
            rows = [tokens for each in embeddings if (tokens := each[name].tokens) is not None]
            pooled = [vector for each in embeddings if (vector := each[name].pooled) is not None]
            texts[name] = padded_captions(list(map(torch.from_numpy, rows)), list(map(torch.from_numpy, pooled)))
        return self._snapshot.conditioner(None, {name: text.to(self._device) for name, text in texts.items()})

    def _encode(self, captions: list[str]) -> list[Embedded]:
        """Each encoder in turn, so that one is in memory."""
        by_encoder = {name: self._encode_by(name, captions) for name in self._encoders}
        return [{name: rows[i] for name, rows in by_encoder.items()} for i in range(len(captions))]

    def _encode_by(self, name: str, captions: list[str]) -> list[EncodedCaption]:
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


def _open_stores(snapshot: Snapshot, run: Path, path: Path | None) -> list[LatentStore]:
    """The store at a path, else those of the run; one that is gone is left out, its captions are encoded."""
    if path:
        stores = [LatentStore(path, allow_incomplete=True)]
    else:
        paths = (
            dict.fromkeys(entry["path"] for entry in read_json(run / RUN)["stores"]) if (run / RUN).is_file() else ()
        )
        stores = []
        for place in paths:
            with contextlib.suppress(StoreError, FileNotFoundError):
                stores.append(LatentStore(run / place, allow_incomplete=True))
    made_with = {name: encoder["weights_sha256"] for name, encoder in text_encoders(snapshot.state).items()}
    for store in stores:
        there = {one.name: one.encoder.weights_sha256 for one in store.spec.text_encoders}
        if there and any(there.get(name) != weights for name, weights in made_with.items()):
            raise RunError(f"store '{store.path}': its captions come from another text encoder. Check --store.")
    return stores
