"""Captions to embeddings: any T5, and Gemma-2 as Sana uses it.

Batches hold captions of equal length, so no padding is computed or stored. Only the null caption is padded, to full
length, as the trainers do; a record without a caption has its tokens without the padding. Gemma reads an instruction
before each caption: the first token and those from the instruction's last on are kept.

Source: PixArt-alpha (T5); Xie et al. 2024, "SANA", section 3.2 (the last hidden state of a decoder, the instruction).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...datasets.disk.hashing import sha256_of
from ...datasets.errors import EncoderError
from ...datasets.format.schema import EncoderIdentity, TextSpec
from ..config import TextSection
from .instructions import instruction_text
from .model_files import (
    CONFIG,
    LOADING_ERRORS,
    TEXT_WEIGHTS,
    TOKENIZER_FILES,
    arithmetic,
    check_loaded,
    check_tokenizer_files,
    hash_files,
    lasting_config,
    library_majors,
    model_name,
    read_config,
    resolve_model,
    shortened,
    tokenizer_files,
    weight_files,
    weight_names,
)

TEMPLATE = "{caption}"  # captions are stripped of white space at both ends, and otherwise left as they are
INSTRUCTED = "{instruction}{caption}"


@dataclass(frozen=True)
class Family:
    """A kind of text encoder: its model_type and width key in config.json, its class's name, and loading options."""

    model_type: str
    width_key: str
    class_name: str
    options: dict[str, Any]


FAMILIES = {
    "t5": Family("t5", "d_model", "T5EncoderModel", {}),
    # Eager, because torch's fused attention has no soft cap, which this model was trained with.
    "gemma2": Family("gemma2", "hidden_size", "Gemma2Model", {"attn_implementation": "eager"}),
}


@dataclass(frozen=True)
class TokenCount:
    """Tokens that went through an encoder, of which padding, and captions."""

    num_tokens: int = 0
    num_padding: int = 0
    num_captions: int = 0

    def __add__(self, other: TokenCount) -> TokenCount:
        return TokenCount(
            self.num_tokens + other.num_tokens,
            self.num_padding + other.num_padding,
            self.num_captions + other.num_captions,
        )

    def __sub__(self, other: TokenCount) -> TokenCount:
        return TokenCount(
            self.num_tokens - other.num_tokens,
            self.num_padding - other.num_padding,
            self.num_captions - other.num_captions,
        )


class CaptionTokenizer:
    """The tokenizer of a text encoder: counts tokens for planning, makes ids for encoding.

    Counts are of stored tokens: with an instruction, the very first token, the instruction's last, and the caption's
    own. ``num_shared`` further tokens between the first two are the same for all captions.

    Args:
      section: of the recipe.
    Raises: EncoderError: missing, or its vocabulary does not match the model's.
    """

    def __init__(self, section: TextSection) -> None:
        from transformers import AutoTokenizer  # takes a second to import

        self.model_folder, self.revision = resolve_model(
            section.model, section.subfolder, section.revision, files=(CONFIG,), what="text.model"
        )
        config = read_config(self.model_folder, what="text.model")
        vocabulary_size = config.get("vocab_size", 0)
        if not isinstance(vocabulary_size, int):
            raise EncoderError(f"text.model '{self.model_folder}': config.json has no whole number as 'vocab_size'.")
        self.vocabulary_size = vocabulary_size
        self._max_tokens = section.max_tokens
        tokenizer_folder, _ = resolve_model(
            section.model,
            section.tokenizer_subfolder,
            self.revision or section.revision,
            files=TOKENIZER_FILES,
            what="text.model",
        )
        check_tokenizer_files(tokenizer_folder, what="text.model")
        try:
            # Explicit: otherwise the library asks on the terminal whether the folder's code may run.
            self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
        except Exception as error:  # tokenizers raises plain Exception for a damaged tokenizer.json
            if type(error) is not Exception and not isinstance(error, LOADING_ERRORS):
                raise
            raise EncoderError(f"text.model '{tokenizer_folder}': no usable tokenizer: {shortened(error)}") from error
        # A folder with only spiece.model may load as a few hundred tokens that map every word to <unk>.
        if not 0.9 * self.vocabulary_size <= len(self._tokenizer) <= self.vocabulary_size:
            raise EncoderError(
                f"text.model '{tokenizer_folder}': the tokenizer knows {len(self._tokenizer)} tokens, the encoder "
                f"{self.vocabulary_size}, so they do not belong together. Put the model's own tokenizer.json there."
            )
        # The backend does not include the padding token, which the null caption contains.
        backend = json.loads(self._tokenizer.backend_tokenizer.to_str())
        self.sha256 = sha256_of([backend, self._tokenizer.pad_token_id])
        self.files_sha256 = hash_files(tokenizer_files(tokenizer_folder))
        self._tokenizer.padding_side = "right"  # Gemma's own is left
        self.instruction = instruction_text(section.instruction)
        self.num_shared = max(0, len(self._tokenizer.encode(self.instruction)) - 2) if self.instruction else 0
        self.num_null = int(self.null_ids()[1].sum())

    def count(self, captions: Sequence[str]) -> list[int]:
        """Number of tokens of each caption with special tokens, before truncation; "" is the null caption.

        Raises: EncoderError: a token merges the instruction and a caption.
        """
        if not captions:
            return []
        prompts = [self.instruction + caption for caption in captions]
        # The backend directly: converting all ids to Python lists takes twice as long as tokenizing.
        core = self._tokenizer.backend_tokenizer
        core.no_truncation()
        core.no_padding()
        found = core.encode_batch_fast(prompts, add_special_tokens=True)
        counts = [len(encoding) - self.num_shared for encoding in found]
        if min(counts) < 1:
            raise EncoderError(
                f"text.instruction: it has fewer tokens with caption '{captions[counts.index(min(counts))]}' than "
                "alone. End it with a space or a new line."
            )
        return [count if caption else self.num_null for caption, count in zip(captions, counts, strict=True)]

    def ids(self, captions: Sequence[str]) -> torch.Tensor:
        """Token ids of captions of equal length, truncated to max_tokens; (B, num_shared + L) int64."""
        prompts, longest = [self.instruction + caption for caption in captions], self._max_tokens + self.num_shared
        return torch.tensor(self._tokenizer(prompts, truncation=True, max_length=longest)["input_ids"])

    def null_ids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask of the empty caption, without the instruction, padded to max_tokens.

        Returns: both (1, max_tokens) int64.
        """
        encoded = self._tokenizer("", padding="max_length", truncation=True, max_length=self._max_tokens)
        return torch.tensor([encoded["input_ids"]]), torch.tensor([encoded["attention_mask"]])


class CaptionEncoder:
    """A T5 encoder, or a Gemma-2.

    Args:
      section: of the recipe.
      tokenizer: of the same section.
      device: of the model.
    Raises: EncoderError: missing, without weights, or of another kind.
    """

    def __init__(self, section: TextSection, tokenizer: CaptionTokenizer, device: torch.device) -> None:
        import transformers  # its models take two seconds to import

        config = read_config(tokenizer.model_folder, what="text.model")
        family = FAMILIES[section.kind]
        if config.get("model_type") != family.model_type:
            raise EncoderError(
                f"text.model '{tokenizer.model_folder}': its config.json says '{config.get('model_type')}', needed "
                f"'{family.model_type}'."
            )
        folder, _ = resolve_model(
            section.model,
            section.subfolder,
            tokenizer.revision or section.revision,
            files=(CONFIG, *weight_names(TEXT_WEIGHTS)),
            what="text.model",
        )
        weights = weight_files(folder, TEXT_WEIGHTS, what="text.model")
        dtype = arithmetic(section.dtype, device)
        self._dtype, self._device, self.tokenizer = getattr(torch, dtype), device, tokenizer
        transformers.utils.logging.disable_progress_bar()  # the command shows its own
        try:
            # Loaded in its dtype, not cast after: T5 keeps "wo" in float32 when the rest is float16.
            loaded: Any = getattr(transformers, family.class_name).from_pretrained(
                folder, dtype=self._dtype, use_safetensors=True, output_loading_info=True, **family.options
            )
        except LOADING_ERRORS as error:
            raise EncoderError(
                f"text.model '{folder}': cannot be loaded as a {family.class_name}: {shortened(error)}"
            ) from error
        model, loading = loaded
        check_loaded(loading, f"text.model '{folder}'")
        self._model = model.to(device).eval().requires_grad_(False)
        self.width = int(config[family.width_key])
        self.computed = TokenCount()
        self.identity = EncoderIdentity(
            model=model_name(section, folder),
            revision=tokenizer.revision,
            class_name=family.class_name,
            config=lasting_config(config),
            weights_sha256=hash_files(weights),
            tokenizer_sha256=tokenizer.sha256,
            dtype=dtype,
            libraries=library_majors("torch", "transformers"),
            tokenizer_files_sha256=tokenizer.files_sha256,
        )

    def text_spec(self, section: TextSection, dtype: str) -> TextSpec:
        """The spec of the stored embeddings."""
        return TextSpec(
            kind="gemma2" if section.kind == "gemma2" else "t5",
            width=self.width,
            max_tokens=section.max_tokens,
            dtype=dtype,
            template=INSTRUCTED if self.tokenizer.instruction else TEMPLATE,
            batch_size=section.batch_size,
            batch_tokens=section.batch_tokens,
            instruction=self.tokenizer.instruction,
        )

    def encode(self, captions: Sequence[str]) -> np.ndarray:
        """Encode captions of equal length, without padding; (B, L, D) float32.

        "" has the unpadded tokens of the null caption, whatever the instruction.
        """
        if "" in captions:
            null, written = self.encode_null()[: self.tokenizer.num_null], [text for text in captions if text]
            encoded = iter(self.encode(written) if written else ())
            return np.stack([next(encoded) if text else null for text in captions])
        ids = self.tokenizer.ids(captions)
        kept = [0, *range(self.tokenizer.num_shared + 1, ids.shape[1])]
        return self._checked(ids, torch.ones_like(ids), kept)

    def encode_null(self) -> np.ndarray:
        """Encode the empty caption at full length, padded as the trainers do; (max_tokens, D) float32."""
        ids, mask = self.tokenizer.null_ids()
        return self._checked(ids, mask, list(range(ids.shape[1])))[0]

    def _checked(self, ids: torch.Tensor, mask: torch.Tensor, kept: list[int]) -> np.ndarray:
        embeddings = self._forward(ids, mask, kept)
        done, padding = self.computed, int((mask == 0).sum())
        self.computed = TokenCount(
            done.num_tokens + ids.numel(), done.num_padding + padding, done.num_captions + len(ids)
        )
        if not np.isfinite(embeddings).all():
            raise EncoderError(
                f"text.model: {self.identity.class_name} in {self.identity.dtype} gave NaN or infinity. "
                'Use text.dtype = "bfloat16" or "float32".'
            )
        return embeddings

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, kept: list[int]) -> np.ndarray:
        """(B, kept, D) float32 of the kept positions."""
        output = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device))
        return output.last_hidden_state[:, kept].float().cpu().numpy()
