"""Text encoders: Gemma-2 equals Sana's padded computation, the instruction is Sana's, T5 keeps its own dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SanaPipeline
from hypothesis import given
from hypothesis import strategies as st
from making import CPU
from tiny_models import TEXTS, save_gemma2
from transformers import AutoTokenizer, Gemma2Model

from leandit.errors import EncoderError
from leandit.precompute.config import TextSection, load
from leandit.precompute.encoders.text.encoder import CaptionEncoder, TokenCount
from leandit.precompute.encoders.text.instructions import INSTRUCTIONS
from leandit.precompute.encoders.text.tokenizer import CaptionTokenizer
from leandit.precompute.pipeline import Report
from leandit.precompute.run.shards import equal_length_batches

Encode = Callable[..., Report]
MAX_TOKENS = 10


FOLDERS = {"subfolder": "text_encoder", "tokenizer_subfolder": "tokenizer"}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma-2 whose window is smaller than the instruction, so that it matters."""
    folder = tmp_path_factory.mktemp("gemma")
    save_gemma2(folder, sliding_window=64)
    return folder


def loaded(folder: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer", padding_side="right")
    return tokenizer, Gemma2Model.from_pretrained(folder, subfolder="text_encoder").eval()


def encoder_of(folder: Path, **more: Any) -> CaptionEncoder:
    values = {"kind": "gemma2", "model": str(folder), "max_tokens": MAX_TOKENS, "dtype": "float32"} | FOLDERS | more
    section = TextSection(**values)
    return CaptionEncoder(section, CaptionTokenizer(section), CPU)


@torch.no_grad()
def as_sana_pads(folder: Path, texts: list[str], instruction: str) -> list[np.ndarray]:
    """Sana's computation as it is written: all padded to one length, some places selected; the valid ones of each."""
    tokenizer, model = loaded(folder)
    longest = len(tokenizer.encode(instruction)) + MAX_TOKENS - 2 if instruction else MAX_TOKENS
    how = {"padding": "max_length", "max_length": longest, "truncation": True, "return_tensors": "pt"}
    tokens = tokenizer([instruction + text for text in texts], **how)
    selected = [0, *range(-MAX_TOKENS + 1, 0)]
    output = model(tokens.input_ids, tokens.attention_mask).last_hidden_state[:, selected]
    mask = tokens.attention_mask[:, selected].bool()
    return [row[valid].numpy() for row, valid in zip(output, mask, strict=True)]


@pytest.mark.parametrize("name", ["", "sana", "Say it in other words: "])
def test_gemma_equals_the_padded_computation_at_every_valid_place(name: str, gemma: Path) -> None:
    encoder = encoder_of(gemma, instruction=name)
    counts = encoder.tokenizer.count(TEXTS)
    assert min(counts) < MAX_TOKENS < max(counts)  # one is padded, one is cut
    padded = as_sana_pads(gemma, TEXTS, INSTRUCTIONS.get(name, name))
    for text, count, wanted in zip(TEXTS, counts, padded, strict=True):
        found = encoder.encode([text]).tokens[0]
        assert len(found) == len(wanted) == min(count, MAX_TOKENS)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert (encoder.tokenizer.num_shared > 64) == name.startswith("sana")
    spec = encoder.text_spec(TextSection(kind="gemma2", max_tokens=MAX_TOKENS), "float16")
    assert (spec.kind, spec.instruction, spec.width) == ("gemma2", INSTRUCTIONS.get(name, name), 32)
    assert spec.template == ("{instruction}{caption}" if name else "{caption}")


def test_the_empty_caption_has_no_instruction_and_full_length(gemma: Path) -> None:
    encoder = encoder_of(gemma, instruction="sana")
    tokenizer, model = loaded(gemma)
    tokens = tokenizer("", padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt")
    assert tokens.attention_mask.tolist() == [[1] + [0] * (MAX_TOKENS - 1)]
    with torch.no_grad():
        wanted = model(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
    np.testing.assert_allclose(encoder.encode_null().tokens[0], wanted.numpy(), rtol=1e-4, atol=1e-5)
    assert encoder.computed == TokenCount(MAX_TOKENS, MAX_TOKENS - 1, 1)
    # A record without a caption has what of it is not padding.
    assert encoder.tokenizer.count(["", "a cat"])[0] == 1
    np.testing.assert_array_equal(encoder.encode([""]).tokens[0], encoder.encode_null().tokens[0, :1])


def test_the_instructions_are_those_of_sana_and_of_diffusers() -> None:
    lines = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    assert "\n".join(lines) == INSTRUCTIONS["sana-diffusers"]
    assert r"generate an \"Enhanced prompt\" that" in INSTRUCTIONS["sana"]  # with the backslashes of the configuration
    assert INSTRUCTIONS["sana"].replace(r"\"", "'") == INSTRUCTIONS["sana-diffusers"]
    assert INSTRUCTIONS["sana"].endswith("\nUser Prompt: ")
    assert INSTRUCTIONS["sana"].count("\n") == 7
    for name in ("sana-512", "sana-1024"):
        text = load(name, []).text[""]
        assert (text.kind, text.instruction, text.max_tokens) == ("gemma2", "sana", 300)


def test_an_instruction_that_swallows_a_caption_is_refused(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = encoder_of(gemma, instruction="sana")
    monkeypatch.setattr(encoder.tokenizer, "num_shared", 10_000)
    with pytest.raises(EncoderError, match=r"text\.instruction.*End it with a space"):
        encoder.tokenizer.count(["a cat"])


def test_a_t5_in_float16_keeps_its_output_projections_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leandit.precompute.encoders.text.encoder.arithmetic", lambda dtype, device: dtype)  # on a GPU
    section = TextSection(kind="t5", model="shipped:t5", max_tokens=MAX_TOKENS, dtype="float16")
    encoder = CaptionEncoder(section, CaptionTokenizer(section), CPU)
    encoder.load()
    dtypes = {name: tensor.dtype for name, tensor in encoder._model.named_parameters()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {name for name in dtypes if name.endswith(".wo.weight")} != set()
    assert {dtypes[name] for name in dtypes.keys() - kept} == {torch.float16}


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(1, 7))
def test_batches_of_captions_cover_all_and_keep_to_their_size(lengths: list[int], batch_size: int) -> None:
    array = np.sort(np.array(lengths, np.int64))
    batches = equal_length_batches(array, batch_size)
    assert [i for batch in batches for i in batch.tolist()] == list(range(len(array)))
    for batch, following in zip_longest(batches, batches[1:]):
        length = int(array[batch[0]])
        assert (array[batch] == length).all()
        assert 1 <= len(batch) <= batch_size
        if following is not None and array[following[0]] == length:
            assert len(batch) == batch_size
