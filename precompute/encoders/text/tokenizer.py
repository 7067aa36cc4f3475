"""Captions to token ids: the tokenizer of a text encoder, with the text that goes before or around each caption."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ....datasets.disk.hashing import sha256_of
from ....datasets.remote.failures import one_line
from ....errors import EncoderError
from ...config import TextSection
from ..model_files import ModelFiles, check_tokenizer_files, hash_files, tokenizer_files
from .families import text_config, whole_number
from .instructions import instruction_text

CAPTION = "{caption}"  # its place in a template
UNLIKE_CAPTIONS = ("a", "7")  # to see where the tokens of a template's beginning end


@contextmanager
def of_table(name: str) -> Iterator[None]:
    """Say which table of a recipe an error of a text encoder is about: its message calls the keys ``text.KEY``.

    Args:
      name: of the text encoder; empty for that of ``[text]``.
    """
    try:
        yield
    except EncoderError as error:
        if not name:
            raise
        raise EncoderError(f"[text.{name}]: {error}") from error


class CaptionTokenizer:
    """The tokenizer of a text encoder: counts tokens for planning, makes ids for encoding.

    Counts are of stored tokens: with an instruction, the very first token, the instruction's last, and the caption's
    own; with a template, all but its first ``drop_prefix_tokens``. ``num_shared`` further tokens are the same for all
    captions, and computed with each.

    Padding is on the right, so that valid tokens come first. Only where it is stored too (``full_length``) is it on
    the recipe's side, or the tokenizer's own, as in the pipelines of diffusers.

    Args:
      section: of the recipe.
    Raises: EncoderError: missing, or its vocabulary does not match the model's.
    """

    def __init__(self, section: TextSection) -> None:
        self.files = ModelFiles(section, "text.model")
        config = text_config(section, self.files.folder)
        self.vocabulary_size = whole_number(config, "vocab_size", self.files.folder)
        folder = self.files.tokenizer_folder(section.tokenizer_subfolder)
        self._tokenizer = load_tokenizer(folder, self.vocabulary_size)
        self._max_tokens, self._full_length = section.max_tokens, section.full_length
        own_side = self._tokenizer.padding_side if section.padding_side == "auto" else section.padding_side
        is_left = section.full_length and own_side == "left"
        self._tokenizer.padding_side = "left" if is_left else "right"
        # The backend includes neither the padding token, which the null caption contains, nor its side.
        backend = json.loads(self._tokenizer.backend_tokenizer.to_str())
        self.sha256 = sha256_of([backend, self._tokenizer.pad_token_id, *(["left"] if is_left else [])])
        self.files_sha256 = hash_files(tokenizer_files(folder))
        self.instruction = instruction_text(section.instruction)
        self._before, _, self._after = (section.template or CAPTION).partition(CAPTION)
        bos = self._tokenizer.bos_token
        self._adds_special = not (bos and self._before.startswith(bos))  # else the template would have two
        self._num_dropped = section.drop_prefix_tokens
        self._check_template(is_left=is_left)
        self.num_shared = self._num_dropped
        if self.instruction:
            self.num_shared = max(0, len(self._tokenizer.encode(self.instruction)) - 2)
        self.num_null = int(self.null_ids()[1].sum()) - self._num_dropped

    def count(self, captions: Sequence[str]) -> list[int]:
        """Number of tokens of each caption with special tokens, before truncation; "" is the null caption.

        Raises: EncoderError: a caption has no token, or one merges the instruction or the template and a caption.
        """
        if not captions:
            return []
        # The backend directly: converting all ids to Python lists takes twice as long as tokenizing.
        core = self._tokenizer.backend_tokenizer
        core.no_truncation()
        core.no_padding()
        found = core.encode_batch_fast(self._prompts(captions), add_special_tokens=self._adds_special)
        counts = [len(encoding) - self.num_shared for encoding in found]
        if min(counts) < 1 and not (self.instruction or self._before):
            raise EncoderError(
                f"text.model: its tokenizer gives no token for caption '{captions[counts.index(min(counts))]}'. Set "
                "text.template, or leave such captions out (empty ones: source.missing_caption=reject)."
            )
        if min(counts) < 1:
            name, end = ("instruction", "End it") if self.instruction else ("template", "End what precedes {caption}")
            raise EncoderError(
                f"text.{name}: it has fewer tokens with caption '{captions[counts.index(min(counts))]}' than "
                f"alone. {end} with a space or a new line."
            )
        return [count if caption else self.num_null for caption, count in zip(captions, counts, strict=True)]

    def ids(self, captions: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids of captions, truncated to max_tokens: of equal length, or padded if all positions are stored.

        Returns: ids and attention mask, both (B, num_shared + L) int64.
        """
        return self._encoded(self._prompts(captions), self._max_tokens + self.num_shared, padded=self._full_length)

    def null_ids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask of the empty caption, padded; without the instruction, with the template.

        Returns: both (1, drop_prefix_tokens + max_tokens) int64.
        Raises: EncoderError: no padding token.
        """
        return self._encoded([self._before + self._after], self._max_tokens + self._num_dropped, padded=True)

    def stored(self, num_tokens: int, *, null: bool = False) -> list[int]:
        """Positions that are stored, of a caption (or of the null caption) with so many ids."""
        if null:
            return list(range(self._num_dropped, num_tokens))
        num_first = 1 if self.instruction else 0  # Sana keeps the very first token
        return [*range(num_first), *range(self.num_shared + num_first, num_tokens)]

    def _prompts(self, captions: Sequence[str]) -> list[str]:
        return [f"{self.instruction}{self._before}{caption}{self._after}" for caption in captions]

    def _encoded(self, prompts: list[str], longest: int, *, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = self._tokenizer(
            prompts,
            truncation=True,
            max_length=longest,
            padding="max_length" if padded else False,
            add_special_tokens=self._adds_special,
        )
        return torch.tensor(encoded["input_ids"]), torch.tensor(encoded["attention_mask"])

    def _check_template(self, *, is_left: bool) -> None:
        """Raise if tokens are dropped that are not of the template's beginning."""
        if not self._num_dropped:
            return
        if is_left:
            raise EncoderError(
                "text.drop_prefix_tokens: with text.full_length padding is on the left, so the first tokens "
                "are padding. Leave one of the two out."
            )
        ids, others = self._tokenizer(self._prompts(UNLIKE_CAPTIONS), add_special_tokens=self._adds_special)[
            "input_ids"
        ]
        num_alike = next((i for i, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), 0)
        if self._num_dropped > num_alike:
            raise EncoderError(
                f"text.drop_prefix_tokens {self._num_dropped}: the caption begins at token {num_alike}, so "
                f"expected at most {num_alike}."
            )


def load_tokenizer(folder: Path, vocabulary_size: int, *, what: str = "text.model") -> Any:
    """The tokenizer of a folder.

    Raises: EncoderError: none, of code of its own, without a padding token, or of another vocabulary.
    """
    from transformers import AutoTokenizer  # takes a second to import

    check_tokenizer_files(folder, what=what)
    try:
        # Explicit: otherwise the library asks on the terminal whether the folder's code may run.
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever the library makes of its files
        raise EncoderError(f"{what} '{folder}': no usable tokenizer: {one_line(error)}") from error
    # A folder with only spiece.model may load as a few hundred tokens that map every word to <unk>.
    if not 0.9 * vocabulary_size <= len(tokenizer) <= vocabulary_size:
        raise EncoderError(
            f"{what} '{folder}': the tokenizer knows {len(tokenizer)} tokens, the encoder "
            f"{vocabulary_size}, so they do not belong together. Put the model's own tokenizer.json there."
        )
    if tokenizer.pad_token_id is None:
        raise EncoderError(
            f"{what} '{folder}': its tokenizer has no padding token, which the null caption needs. Set 'pad_token' "
            "in its tokenizer_config.json, as the model was trained."
        )
    return tokenizer
