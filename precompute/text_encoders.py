"""Captions to embeddings: any T5. Batches hold captions of equal length, so no padding is computed, and none stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, T5EncoderModel
from transformers.utils import logging as transformers_logging

from ..datasets.errors import EncoderError
from ..datasets.hashing import sha256_of
from ..datasets.schema import EncoderIdentity, TextSpec
from .config import TextSection
from .model_files import (
    LOADING_ERRORS,
    arithmetic,
    check_loaded,
    check_tokenizer_files,
    hash_files,
    lasting_config,
    library_majors,
    model_name,
    read_config,
    resolve_model,
    weight_files,
)

TEMPLATE = "{caption}"  # captions are stripped of white space at both ends, and otherwise left as they are


class CaptionTokenizer:
    """The tokenizer of a T5: counts tokens when planning, makes ids when encoding.

    Args:
      section: of the recipe.
    Raises: EncoderError: missing, or a vocabulary that cannot be the model's.
    """

    def __init__(self, section: TextSection) -> None:
        self.model_folder, self.revision = resolve_model(
            section.model, section.subfolder, section.revision, what="text.model"
        )
        config = read_config(self.model_folder, what="text.model")
        vocabulary_size = config.get("vocab_size", 0)
        if not isinstance(vocabulary_size, int):
            raise EncoderError(f"text.model '{self.model_folder}': config.json has no whole number as 'vocab_size'.")
        self.vocabulary_size = vocabulary_size
        self._max_tokens = section.max_tokens
        tokenizer_folder, _ = resolve_model(
            section.model, section.tokenizer_subfolder, section.revision, what="text.model"
        )
        check_tokenizer_files(tokenizer_folder, what="text.model")
        try:
            # Said, because without it a library asks on the terminal whether code of the folder may run.
            self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
        except Exception as error:  # of a damaged tokenizer.json, its library raises just this class
            if type(error) is not Exception and not isinstance(error, LOADING_ERRORS):
                raise
            raise EncoderError(f"text.model '{tokenizer_folder}': no usable tokenizer: {error}") from error
        # A folder with only spiece.model can load as some hundred tokens that turn every word into <unk>.
        if not 0.9 * self.vocabulary_size <= len(self._tokenizer) <= self.vocabulary_size:
            raise EncoderError(
                f"text.model '{tokenizer_folder}': the tokenizer knows {len(self._tokenizer)} tokens, the encoder "
                f"{self.vocabulary_size}, so they do not belong together. Put the model's own tokenizer.json there."
            )
        self.sha256 = sha256_of(json.loads(self._tokenizer.backend_tokenizer.to_str()))

    def count(self, captions: Sequence[str]) -> list[int]:
        """Number of tokens of each caption, the end mark included, before any cut."""
        if not captions:
            return []
        return [len(ids) for ids in self._tokenizer(list(captions), truncation=False, verbose=False)["input_ids"]]

    def ids(self, captions: Sequence[str]) -> torch.Tensor:
        """Token ids of captions of equal length, cut at max_tokens; (B, L) int64."""
        encoded = self._tokenizer(list(captions), truncation=True, max_length=self._max_tokens)["input_ids"]
        return torch.tensor(encoded)

    def null_ids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask of the empty caption, padded to max_tokens; both (1, max_tokens) int64."""
        encoded = self._tokenizer("", padding="max_length", truncation=True, max_length=self._max_tokens)
        return torch.tensor([encoded["input_ids"]]), torch.tensor([encoded["attention_mask"]])


class CaptionEncoder:
    """A T5 encoder.

    Args:
      section: of the recipe.
      tokenizer: of the same section.
      device: where it runs.
    Raises: EncoderError: missing, without weights, or no T5.
    """

    def __init__(self, section: TextSection, tokenizer: CaptionTokenizer, device: torch.device) -> None:
        folder = tokenizer.model_folder
        config = read_config(folder, what="text.model")
        if config.get("model_type") != "t5":
            raise EncoderError(
                f"text.model '{folder}': its config.json says '{config.get('model_type')}', needed 't5'."
            )
        weights = weight_files(folder, "model", what="text.model")
        dtype = arithmetic(section.dtype, device)
        self._dtype, self._device, self.tokenizer = getattr(torch, dtype), device, tokenizer
        transformers_logging.disable_progress_bar()  # of the weights being read; the command shows its own
        try:
            # Loaded in its dtype, not cast after: T5 keeps "wo" in float32 when the rest is float16.
            loaded: Any = T5EncoderModel.from_pretrained(
                folder, dtype=self._dtype, use_safetensors=True, output_loading_info=True
            )
        except LOADING_ERRORS as error:
            raise EncoderError(f"text.model '{folder}': cannot be loaded as a T5 encoder: {error}") from error
        model, loading = loaded
        check_loaded(loading, f"text.model '{folder}'")
        self._model = model.to(device).eval().requires_grad_(False)
        self.width = int(config["d_model"])
        self.identity = EncoderIdentity(
            model=model_name(section, folder),
            revision=tokenizer.revision,
            class_name="T5EncoderModel",
            config=lasting_config(config),
            weights_sha256=hash_files(weights),
            tokenizer_sha256=tokenizer.sha256,
            dtype=dtype,
            libraries=library_majors("torch", "transformers"),
        )

    def text_spec(self, section: TextSection, dtype: str) -> TextSpec:
        """What the store will hold."""
        return TextSpec(
            kind="t5",
            width=self.width,
            max_tokens=section.max_tokens,
            dtype=dtype,
            template=TEMPLATE,
            batch_size=section.batch_size,
        )

    def encode(self, captions: Sequence[str]) -> np.ndarray:
        """Encode captions of equal length, with no padding at all; (B, L, D) float32."""
        ids = self.tokenizer.ids(captions)
        return self._checked(ids, torch.ones_like(ids))

    def encode_null(self) -> np.ndarray:
        """Encode the empty caption at full length, as the trainers pad it; (max_tokens, D) float32."""
        return self._checked(*self.tokenizer.null_ids())[0]

    def _checked(self, ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
        embeddings = self._forward(ids, mask)
        if not np.isfinite(embeddings).all():
            raise EncoderError(
                f"text.model: {self.identity.class_name} in {self.identity.dtype} gave NaN or infinity. "
                'Use text.dtype = "bfloat16" or "float32".'
            )
        return embeddings

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
        output = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device))
        return output.last_hidden_state.float().cpu().numpy()
