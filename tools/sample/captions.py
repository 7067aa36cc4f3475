"""Embeddings of captions: read from a store, or encoded live by its text encoder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from ...datasets.disk.hashing import read_json
from ...datasets.errors import EncoderError, RunError, StoreError
from ...datasets.format.schema import UNKNOWN
from ...datasets.store import LatentStore
from ...precompute.config import TextSection
from ...precompute.encoders.text.encoder import CaptionEncoder
from ...precompute.encoders.text.tokenizer import CaptionTokenizer
from ...train.models.conditioning import Conditioning
from ...train.run.resume import RUN
from ...train.sampling.snapshot import Snapshot


class Captions:
    """Turns captions into the conditioning of a model.

    Args:
      store: with captions; None: the stores of the run, as far as they still exist.
      text: hub id or folder of the text encoder, instead of the one that made the store.
    Raises: StoreError; RunError: the store's captions come from another text encoder.
    """

    def __init__(
        self, snapshot: Snapshot, run: Path, store: Path | None, text: str | None, device: torch.device
    ) -> None:
        self._snapshot, self._run, self._text, self._device = snapshot, run, text, device
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

    def embed(self, captions: Sequence[str]) -> list[torch.Tensor]:
        """Embedding of each caption, (L, D) float32.

        Raises: EncoderError: a caption is not in the store, and its encoder is missing or another one.
        """
        found = {text: embedding for store in reversed(self._stores) for text, embedding in _stored(store, captions)}
        if missing := [caption for caption in captions if caption not in found]:
            found |= zip(missing, self._encode(missing), strict=True)
        return [found[caption] for caption in captions]

    def conditioning(self, embeddings: Sequence[torch.Tensor]) -> Conditioning:
        """The conditioning of some embeddings, padded to the longest."""
        lengths = torch.tensor([len(embedding) for embedding in embeddings])
        padded = torch.nn.utils.rnn.pad_sequence(list(embeddings), batch_first=True).to(self._device)  # (B, L, D)
        return self._snapshot.conditioner(None, padded, lengths)

    def _encode(self, captions: list[str]) -> list[torch.Tensor]:
        other = {"model": self._text, "subfolder": "", "tokenizer_subfolder": "", "revision": ""} if self._text else {}
        section = TextSection.model_validate(self._snapshot.state["text_encoder"]["model"] | other)
        try:
            encoder = CaptionEncoder(section, CaptionTokenizer(section), self._device)
            encoder.load()
        except EncoderError as error:
            raise EncoderError(
                f"caption '{captions[0]}' is not in the store, and its text encoder is not available: {error} "
                "Use a caption of the store, or give --text PATH."
            ) from error
        made_with = self._snapshot.state["text_encoder"]["weights_sha256"]
        if made_with not in (encoder.identity.weights_sha256, UNKNOWN):
            raise EncoderError(f"text encoder '{section.model}': not the one that made the store. Check --text.")
        return [torch.from_numpy(encoder.encode([caption]).token_rows()[0]).float() for caption in captions]


def _stored(store: LatentStore, captions: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Captions that a store holds, with their embeddings."""
    for caption, number in zip(captions, store.find_captions(list(captions)), strict=True):
        if number is not None:
            yield caption, torch.from_numpy(np.array(store.caption_embedding(number))).float()


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
    made_with = (snapshot.state["text_encoder"] or {}).get("weights_sha256")
    for store in stores:
        if store.spec.text_encoder and store.spec.text_encoder.weights_sha256 != made_with:
            raise RunError(f"store '{store.path}': its captions come from another text encoder. Check --store.")
    return stores
