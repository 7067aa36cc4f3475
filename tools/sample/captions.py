"""Embeddings of captions: read from a store, or encoded live by its text encoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ...datasets.disk.hashing import read_json
from ...datasets.errors import EncoderError, RunError, StoreError
from ...datasets.format.schema import UNKNOWN
from ...datasets.store import LatentStore
from ...precompute.config import TextSection
from ...precompute.encoders.text import CaptionEncoder, CaptionTokenizer
from ...train.models.conditioning import Conditioning
from ...train.run.resume import RUN
from ...train.sampling.snapshot import Snapshot


class Captions:
    """Turns captions into the conditioning of a model.

    Args:
      store: with captions; None: the store of the run, if it still exists.
      text: hub id or folder of the text encoder, instead of the one that made the store.
    Raises: StoreError; RunError: the store's captions come from another text encoder.
    """

    def __init__(
        self, snapshot: Snapshot, run: Path, store: Path | None, text: str | None, device: torch.device
    ) -> None:
        self._snapshot, self._run, self._text, self._device = snapshot, run, text, device
        self._store = _open_store(snapshot, run, store)

    @property
    def store(self) -> LatentStore:
        """The store of the captions.

        Raises: RunError: there is none.
        """
        if self._store is None:
            raise RunError(f"run '{self._run}': its store is gone, so it has no captions. Give --caption or --store.")
        return self._store

    def text(self, caption_id: int) -> str:
        """A caption of the store."""
        return self.store.captions["text"][caption_id].as_py()

    def embed(self, captions: Sequence[str]) -> list[torch.Tensor]:
        """Embedding of each caption, (L, D) float32.

        Raises: EncoderError: a caption is not in the store, and its encoder is missing or another one.
        """
        ids = self._store.find_captions(list(captions)) if self._store else [None] * len(captions)
        missing = [caption for caption, i in zip(captions, ids, strict=True) if i is None]
        encoded = dict(zip(missing, self._encode(missing), strict=True)) if missing else {}
        return [
            encoded[caption] if i is None else torch.from_numpy(np.array(self.store.caption_embedding(i))).float()
            for caption, i in zip(captions, ids, strict=True)
        ]

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
        except EncoderError as error:
            raise EncoderError(
                f"caption '{captions[0]}' is not in the store, and its text encoder is not available: {error} "
                "Use a caption of the store, or give --text PATH."
            ) from error
        made_with = self._snapshot.state["text_encoder"]["weights_sha256"]
        if made_with not in (encoder.identity.weights_sha256, UNKNOWN):
            raise EncoderError(f"text encoder '{section.model}': not the one that made the store. Check --text.")
        return [torch.from_numpy(encoder.encode([caption])[0]).float() for caption in captions]


def _open_store(snapshot: Snapshot, run: Path, path: Path | None) -> LatentStore | None:
    if path:
        store = LatentStore(path, allow_incomplete=True)
    else:
        try:
            store = LatentStore(run / read_json(run / RUN)["store"], allow_incomplete=True)
        except (StoreError, FileNotFoundError):
            return None  # then captions are encoded
    if store.spec.text_encoder:
        made_with = snapshot.state["text_encoder"]["weights_sha256"]
        if store.spec.text_encoder.weights_sha256 != made_with:
            raise RunError(f"store '{store.path}': its captions come from another text encoder. Check --store.")
    return store
