"""Captions to embeddings: T5 and UMT5, CLIP, Gemma-2 as Sana uses it, and any language model.

Batches hold captions of equal length, so no padding is computed or stored. Only the null caption is padded, to full
length, as the trainers do; a record without a caption has its tokens without the padding. A model that reads its
encoder's padding gets it with ``full_length``. Each kind equals the ``encode_prompt`` of diffusers' pipelines.

Source: PixArt-alpha (T5); Xie et al. 2024, "SANA", section 3.2 (the last hidden state of a decoder, the instruction);
Podell et al. 2023, "SDXL" (CLIP's last hidden state but one, and its pooled vector).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ....datasets.format.schema import TextSpec
from ....datasets.revisions.commits import nonfinite_caption
from ....errors import EncoderError
from ...config import TextSection
from ..model_files import arithmetic, read_config, weights_in
from ..pretrained import Pretrained, load_transformer
from .families import FAMILIES, PROJECTED, check_request, class_name, language_config, text_config, whole_number
from .tokenizer import CaptionTokenizer

LOG = logging.getLogger(__name__)
TEMPLATE = "{caption}"  # captions are stripped of white space at both ends, and otherwise left as they are
INSTRUCTED = "{instruction}{caption}"
EMBEDDING = "embed_tokens.weight"  # ends the name of a language model's first weight
# torch's fused attention has no soft cap, which Gemma-2 was trained with.
EAGER = {"attn_implementation": "eager"}


class TokenCount(NamedTuple):
    """Tokens that went through an encoder, of which padding, and captions."""

    num_tokens: int = 0
    num_padding: int = 0
    num_captions: int = 0

    @classmethod
    def total(cls, counts: Iterable[TokenCount]) -> TokenCount:
        """The sum of some."""
        return cls(*map(sum, zip(*counts, strict=True)))


class EncodedCaptions(NamedTuple):
    """Embeddings of captions, or of one without the dimension B; None for what ``text.output`` leaves out."""

    tokens: np.ndarray | None  # (B, L, D) float32
    pooled: np.ndarray | None  # (B, P) float32

    def row(self, i: int) -> EncodedCaptions:
        """One of the captions."""
        return EncodedCaptions(*(None if rows is None else rows[i] for rows in self))

    @property
    def is_finite(self) -> np.ndarray:
        """(B,) bool: all numbers of a caption are finite."""
        finite = [np.isfinite(rows).reshape(len(rows), -1).all(axis=1) for rows in self if rows is not None]
        return np.logical_and.reduce(finite)


class CaptionEncoder(Pretrained):
    """A text encoder. Its weights are loaded at the first encode, and dropped by ``release``.

    Args:
      section: of the recipe.
      tokenizer: of the same section.
      device: of the model.
    Attributes:
      width: D of the token embeddings.
      pooled_width: P of the pooled embeddings, 0 if there are none.
    Raises: EncoderError: missing, without weights, or of another kind.
    """

    def __init__(self, section: TextSection, tokenizer: CaptionTokenizer, device: torch.device) -> None:
        files = tokenizer.files
        config = text_config(section, files.folder)
        self._class_name = class_name(section, config, files.folder)
        check_request(section, config, files.folder)
        self._folder, self._weights = files.folder, files.weights
        family, dtype = FAMILIES[section.kind], arithmetic(section.dtype, device)
        where = f"text.model '{files.folder}'"
        super().__init__(getattr(torch, dtype), device, self._loaded, where=where, dtype_key="text.dtype")
        self._section = section
        self._layers = [] if section.output == "pooled" else section.layers or list(family.layers)
        self._is_masked = family.masked and not section.attend_padding
        self._is_capped = bool(config.get("attn_logit_softcapping"))
        self.tokenizer, self.computed = tokenizer, TokenCount()
        self.width = whole_number(config, family.width_key, self._folder) * max(1, len(self._layers))
        pooled_key = "projection_dim" if self._class_name == PROJECTED else family.width_key
        self.pooled_width = whole_number(config, pooled_key, self._folder) if section.output != "tokens" else 0
        hashes: dict[str, Any] = {
            "tokenizer_sha256": tokenizer.sha256,
            "tokenizer_files_sha256": tokenizer.files_sha256,
        }
        self.identity = files.identity(self._class_name, dtype, "transformers", **hashes)

    def text_spec(self, section: TextSection, dtype: str) -> TextSpec:
        """The spec of the stored embeddings."""
        assert section.kind != "none"
        return TextSpec(
            kind=section.kind,
            width=self.width,
            max_tokens=section.max_tokens,
            dtype=dtype,
            template=INSTRUCTED if self.tokenizer.instruction else section.template or TEMPLATE,
            batch_size=section.batch_size,
            instruction=self.tokenizer.instruction,
            output=section.output,
            full_length=section.full_length,
            attend_padding=section.attend_padding,
            layers=section.layers,
            drop_prefix_tokens=section.drop_prefix_tokens,
            pooled_width=self.pooled_width,
            null_tokens=max(1, self.tokenizer.num_null),  # without a template its first padding stands for it
        )

    def encode(self, captions: Sequence[str], *, must_be_finite: bool = True) -> EncodedCaptions:
        """Encode captions of equal length, without padding; with ``full_length`` of any lengths, with it.

        "" has the tokens of the null caption, whatever the instruction: without padding, or all.

        A caption that gives NaN or infinity is encoded again alone, in float32.

        Args:
          must_be_finite: else a caption that gives NaN or infinity in float32 too is returned so.
        Raises: EncoderError: the model cannot be loaded, or gives NaN or infinity in float32 too.
        """
        if "" in captions:
            return self._with_null(captions, must_be_finite)
        ids, mask = self.tokenizer.ids(captions)
        encoded = self._in_float32_where_not_finite(ids, mask, self.tokenizer.stored(ids.shape[1]), captions)
        if must_be_finite:
            self._check_finite(encoded, captions)
        return encoded

    def encode_null(self) -> EncodedCaptions:
        """Encode the empty caption at full length, padded as the trainers do; B = 1, L = max_tokens.

        Raises: as ``encode``.
        """
        ids, mask = self.tokenizer.null_ids()
        stored = self.tokenizer.stored(ids.shape[1], null=True)
        encoded = self._in_float32_where_not_finite(ids, mask, stored, [""])
        self._check_finite(encoded, [""])
        return encoded

    def load(self) -> None:
        """Load the weights, if they are not.

        Raises: EncoderError: they are damaged, or of another model.
        """
        if self._model is None:
            self._model = self._on_device(self._loaded(self._dtype))

    def release(self) -> None:
        """Drop the weights, so that another model fits; the next encode loads them again."""
        self._model = self._exact = None
        gc.collect()  # modules refer to each other
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _with_null(self, captions: Sequence[str], must_be_finite: bool) -> EncodedCaptions:
        """Encode captions of which some are empty."""
        null, written = self.encode_null(), [text for text in captions if text]
        num_null = self._section.max_tokens if self._section.full_length else self.tokenizer.num_null
        null = EncodedCaptions(None if null.tokens is None else null.tokens[:, :num_null], null.pooled)
        encoded = self.encode(written, must_be_finite=must_be_finite) if written else null
        places = np.cumsum([text != "" for text in captions]) - 1

        def merged(nulls: np.ndarray | None, rows: np.ndarray | None) -> np.ndarray | None:
            if nulls is None or rows is None:
                return None
            return np.stack([rows[i] if text else nulls[0] for i, text in zip(places, captions, strict=True)])

        return EncodedCaptions(merged(null.tokens, encoded.tokens), merged(null.pooled, encoded.pooled))

    def _in_float32_where_not_finite(
        self, ids: torch.Tensor, mask: torch.Tensor, stored: list[int], captions: Sequence[str]
    ) -> EncodedCaptions:
        """Embeddings of token ids (B, L); those that are not finite are computed again in float32."""
        encoded = self._forward(ids, mask, stored)
        count = TokenCount(ids.numel(), int((mask == 0).sum()), len(ids))
        self.computed = TokenCount.total([self.computed, count])
        for i in np.flatnonzero(~encoded.is_finite).tolist() if self._dtype != torch.float32 else ():
            LOG.warning(
                "caption %r: NaN or infinity in %s, encoded again in float32, which is slow; "
                'text.dtype = "bfloat16" or "float32" may avoid it',
                captions[i][:80],
                self.identity.dtype,
            )
            with self.in_float32(makes_room=True):
                again = self._forward(ids[i : i + 1], mask[i : i + 1], stored)
            for rows, row in zip(encoded, again.row(0), strict=True):
                if rows is not None:
                    rows[i] = row
        return encoded

    def _check_finite(self, encoded: EncodedCaptions, captions: Sequence[str]) -> None:
        for i in np.flatnonzero(~encoded.is_finite).tolist():
            raise EncoderError(
                f"{self.label}: {nonfinite_caption(captions[i], self._class_name)}. Its weights are damaged: fetch or "
                "save the model again, or use another."
            )

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, stored: list[int]) -> EncodedCaptions:
        """Embeddings of the stored positions."""
        self.load()
        options: dict[str, Any] = {"attention_mask": mask.to(self._device)} if self._is_masked else {}
        if self._layers:
            options["output_hidden_states"] = self._layers  # only those are held in memory
        if self._section.kind in ("gemma2", "causal_lm"):
            options["use_cache"] = False
        output = self._model(input_ids=ids.to(self._device), **options)
        tokens = pooled = None
        if self._section.output != "pooled":
            states = [output.hidden_states[i] for i in self._layers] or [output.last_hidden_state]
            tokens = torch.cat([state[:, stored] for state in states], dim=-1).float().cpu().numpy()
        if self._section.output != "tokens":
            vector = output.text_embeds if self._class_name == PROJECTED else output.pooler_output
            pooled = vector.float().cpu().numpy()
        return EncodedCaptions(tokens, pooled)

    def _loaded(self, dtype: torch.dtype) -> Any:
        options: dict[str, Any] = EAGER if self._is_capped else {}
        if self._section.kind == "causal_lm":
            options = options | self._language_model_alone()
        where = self._where
        # Loaded in its dtype, not cast after: T5 keeps "wo" in float32 when the rest is float16.
        model = load_transformer(self._class_name, self._folder, dtype, where, **options)
        attention, name = getattr(model.config, "_attn_implementation", "its own"), str(dtype).removeprefix("torch.")
        message = "%s (%s) computes in %s on %s, attention %s"
        LOG.info(message, where, self._class_name, name, self._device, attention)
        return model

    def _language_model_alone(self) -> dict[str, Any]:
        """Loading options that leave out the vision tower of a model that also reads images."""
        names = weights_in(self._weights)
        prefixes = {name.removesuffix(EMBEDDING) for name in names if name.endswith(f".{EMBEDDING}")}
        config = language_config(self._folder)
        if config.model_type == read_config(self._folder, what="text.model").get("model_type") or not prefixes:
            return {"config": config}
        if len(prefixes) > 1:
            raise EncoderError(
                f"text.model '{self._folder}': its weights hold several '{EMBEDDING}', so it is unclear which belongs "
                "to the language model. Save the language model alone."
            )
        return {"config": config, "key_mapping": {f"^{prefixes.pop()}".replace(".", r"\."): ""}}
