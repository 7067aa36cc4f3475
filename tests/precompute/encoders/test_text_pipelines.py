"""Every kind of text encoder gives what ``encode_prompt`` of the pipelines of diffusers gives that use it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from making import CPU
from tiny_models import TEXTS, save_clip, save_gemma2, save_mistral3, save_qwen3, save_qwen_vl, save_t5

from leandit.errors import EncoderError, RecipeError
from leandit.precompute.config import TextSection, load
from leandit.precompute.encoders.text.encoder import CaptionEncoder, EncodedCaptions
from leandit.precompute.encoders.text.tokenizer import CaptionTokenizer

LENGTH = 24  # cuts the longest text in most pipelines
QWEN_IMAGE = diffusers.QwenImagePipeline(None, None, None, None, None).prompt_template_encode.replace("{}", "{caption}")
Z_IMAGE = "<|im_start|>user\n{caption}<|im_end|>\n<|im_start|>assistant\n"
KLEIN = Z_IMAGE + "<think>\n\n</think>\n\n"
FLUX2 = f"<s>[SYSTEM_PROMPT]{SYSTEM_MESSAGE}[/SYSTEM_PROMPT][INST]{{caption}}[/INST]"
LUMINA = f"{diffusers.Lumina2Pipeline(*[None] * 5).system_prompt} <Prompt Start> {{caption}}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, saved once."""
    makers: dict[str, Callable[[Path], None]] = {
        "t5": save_t5,
        "umt5": partial(save_t5, kind="umt5"),
        "clip": partial(save_clip, projected=True),
        "open_clip": partial(save_clip, projected=True, pad="!", seed=9),
        "plain_clip": partial(save_clip, projected=False),
        "qwen3": save_qwen3,
        "qwen_vl": save_qwen_vl,
        "mistral_left": partial(save_mistral3, padding_side="left"),
        "mistral_right": partial(save_mistral3, padding_side="right"),
        "gemma2": save_gemma2,
    }

    @cache
    def get(name: str) -> Path:
        makers[name](folder := tmp_path_factory.mktemp(name))
        return folder

    return get


def section_of(folder: Path, kind: str, **more: Any) -> TextSection:
    places = {"subfolder": "text_encoder", "tokenizer_subfolder": "tokenizer", "dtype": "float32"}
    return TextSection(**({"kind": kind, "model": str(folder), "max_tokens": LENGTH} | places | more))


def encoder_of(folder: Path, kind: str, **more: Any) -> CaptionEncoder:
    section = section_of(folder, kind, **more)
    return CaptionEncoder(section, CaptionTokenizer(section), CPU)


def parts(folder: Path, model_class: Any, **options: Any) -> tuple[Any, Any]:
    """The model and tokenizer as a pipeline loads them."""
    model = model_class.from_pretrained(folder / "text_encoder", **options).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")


def close(found: np.ndarray | None, wanted: torch.Tensor) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=1e-5)


def encoded(encoder: CaptionEncoder, texts: list[str]) -> EncodedCaptions:
    """Of an empty text alone, the null caption."""
    return encoder.encode(texts) if any(texts) else encoder.encode_null()


def each_is_close(encoder: CaptionEncoder, wanted: list[torch.Tensor]) -> None:
    """Each text alone, without padding, and its count; the null caption is the last one wanted."""
    for text, count, tokens in zip(TEXTS, encoder.tokenizer.count(TEXTS), wanted, strict=False):
        assert len(tokens) == min(count, LENGTH)
        close(encoder.encode([text]).tokens[0], tokens)
    null = encoder.encode_null().tokens
    assert null.shape == (1, LENGTH, encoder.width)
    close(null[0, : len(wanted[-1])], wanted[-1])
    assert encoder.tokenizer.count([""]) == [len(wanted[-1])]
    mixed = encoder.encode(["", ""]).tokens
    np.testing.assert_array_equal(mixed, np.repeat(null[:, : len(wanted[-1])], 2, axis=0))


@torch.no_grad()
def test_the_encoders_of_stable_diffusion_3_equal_its_pipeline(saved: Callable[[str], Path]) -> None:
    clips = [parts(saved(name), transformers.CLIPTextModelWithProjection) for name in ("clip", "open_clip")]
    t5 = parts(saved("t5"), transformers.T5EncoderModel)
    pipeline: Any = diffusers.StableDiffusion3Pipeline(None, None, None, *clips[0], *clips[1], *t5)
    for texts in (TEXTS, [""]):
        wanted, _, pooled, _ = pipeline.encode_prompt(
            texts, None, None, device=CPU, do_classifier_free_guidance=False, max_sequence_length=LENGTH
        )
        found = []
        for name in ("clip", "open_clip"):
            encoder = encoder_of(saved(name), "clip", output="both", full_length=True, max_tokens=77)
            found.append(encoded(encoder, texts))
        close(np.concatenate([one.tokens for one in found], axis=-1), wanted[:, :77, :64])
        close(np.concatenate([one.pooled for one in found if one.pooled is not None], axis=-1), pooled)
        encoder = encoder_of(saved("t5"), "t5", full_length=True, attend_padding=True)
        close(encoded(encoder, texts).tokens, wanted[:, 77:])


@torch.no_grad()
def test_the_encoders_of_stable_diffusion_xl_equal_its_pipeline_also_without_padding(
    saved: Callable[[str], Path],
) -> None:
    clips = (
        parts(saved("plain_clip"), transformers.CLIPTextModel),
        parts(saved("open_clip"), transformers.CLIPTextModelWithProjection),
    )
    pipeline: Any = diffusers.StableDiffusionXLPipeline(
        None, clips[0][0], clips[1][0], clips[0][1], clips[1][1], None, None
    )
    wanted, _, pooled, _ = pipeline.encode_prompt(TEXTS, device=CPU, do_classifier_free_guidance=False)
    for name, width in (("plain_clip", slice(0, 32)), ("open_clip", slice(32, 64))):
        full = encoder_of(saved(name), "clip", full_length=True, max_tokens=77)
        close(full.encode(TEXTS).tokens, wanted[..., width])
        short = encoder_of(saved(name), "clip", max_tokens=77)
        for row, text, count in zip(wanted, TEXTS, short.tokenizer.count(TEXTS), strict=True):
            close(short.encode([text]).tokens[0], row[:count, width])
    for options in ({"output": "both", "full_length": True}, {"output": "pooled", "full_length": True}):
        encoder = encoder_of(saved("open_clip"), "clip", max_tokens=77, **options)
        close(encoder.encode(TEXTS).pooled, pooled)
    encoder = encoder_of(saved("open_clip"), "clip", max_tokens=77, output="pooled")
    for row, text in zip(pooled, TEXTS, strict=True):
        vector = encoder.encode([text])
        assert vector.tokens is None
        close(vector.pooled, row[None])
    assert (encoder.pooled_width, encoder.width) == (24, 32)
    np.testing.assert_array_equal(encoder.encode(["", ""]).pooled, np.repeat(encoder.encode_null().pooled, 2, axis=0))


@torch.no_grad()
def test_the_encoders_of_flux_1_equal_its_pipeline(saved: Callable[[str], Path]) -> None:
    clip, t5 = parts(saved("plain_clip"), transformers.CLIPTextModel), parts(saved("t5"), transformers.T5EncoderModel)
    pipeline: Any = diffusers.FluxPipeline(None, None, *clip, *t5, None)
    wanted, pooled, _ = pipeline.encode_prompt(TEXTS, device=CPU, max_sequence_length=LENGTH)
    encoder = encoder_of(saved("t5"), "t5", full_length=True, attend_padding=True)
    close(encoder.encode(TEXTS).tokens, wanted)
    masked = encoder_of(saved("t5"), "t5", full_length=True).encode(TEXTS).tokens
    assert np.abs(masked - wanted.numpy())[1].max() > 1e-3  # padding that is attended to matters
    encoder = encoder_of(saved("plain_clip"), "clip", max_tokens=77, output="pooled", full_length=True)
    close(encoder.encode(TEXTS).pooled, pooled)
    assert (encoder.pooled_width, encoder.identity.class_name) == (32, "CLIPTextModel")


@torch.no_grad()
def test_umt5_equals_the_pipeline_of_wan(saved: Callable[[str], Path]) -> None:
    model, tokenizer = parts(saved("umt5"), transformers.UMT5EncoderModel)
    pipeline: Any = diffusers.WanPipeline(tokenizer, model, None, None)
    texts = [*TEXTS, ""]
    wanted, _ = pipeline.encode_prompt(texts, do_classifier_free_guidance=False, max_sequence_length=LENGTH, device=CPU)
    encoder = encoder_of(saved("umt5"), "umt5")
    counts = encoder.tokenizer.count(texts)
    each_is_close(encoder, [row[:count] for row, count in zip(wanted, counts, strict=True)])


@torch.no_grad()
def test_a_language_model_with_a_dropped_template_equals_the_pipeline_of_qwen_image(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = parts(saved("qwen_vl"), transformers.Qwen2_5_VLForConditionalGeneration)
    pipeline: Any = diffusers.QwenImagePipeline(None, None, model, tokenizer, None)
    dropped = len(tokenizer(QWEN_IMAGE.partition("{caption}")[0])["input_ids"])
    pipeline.prompt_template_encode_start_idx = dropped  # of this tokenizer
    texts = [*TEXTS, ""]
    wanted, mask = pipeline.encode_prompt(texts, device=CPU, max_sequence_length=LENGTH)
    encoder = encoder_of(saved("qwen_vl"), "causal_lm", template=QWEN_IMAGE, drop_prefix_tokens=dropped)
    each_is_close(encoder, [row[valid.bool()] for row, valid in zip(wanted, mask, strict=True)])
    assert encoder.identity.class_name == "Qwen2_5_VLTextModel"
    assert not any("visual" in name for name, _ in encoder._model.named_parameters())  # the vision tower is left out
    assert encoder.tokenizer.num_shared == dropped
    with pytest.raises(EncoderError, match=rf"drop_prefix_tokens {dropped + 1}: the caption begins at token {dropped}"):
        encoder_of(saved("qwen_vl"), "causal_lm", template=QWEN_IMAGE, drop_prefix_tokens=dropped + 1)


@torch.no_grad()
def test_a_chat_template_in_words_equals_the_pipeline_of_z_image(saved: Callable[[str], Path]) -> None:
    model, tokenizer = parts(saved("qwen3"), transformers.Qwen3ForCausalLM)
    pipeline: Any = diffusers.ZImagePipeline(None, None, model, tokenizer, None)
    wanted, negative = pipeline.encode_prompt(list(TEXTS), device=CPU, max_sequence_length=LENGTH)
    encoder = encoder_of(saved("qwen3"), "causal_lm", template=Z_IMAGE, layers=[-2])
    each_is_close(encoder, [*wanted, negative[0]])
    asked = [{"role": "user", "content": TEXTS[0]}]
    chat = tokenizer.apply_chat_template(asked, add_generation_prompt=True, enable_thinking=True, return_dict=False)
    assert encoder.tokenizer.ids(TEXTS[:1])[0][0].tolist() == chat


KLEIN_MODEL = (diffusers.Flux2KleinPipeline, transformers.Qwen3ForCausalLM)
FLUX2_MODEL = (diffusers.Flux2Pipeline, transformers.Mistral3ForConditionalGeneration)


@pytest.mark.parametrize(
    ("name", "classes", "template", "layers", "length"),
    [
        ("qwen3", KLEIN_MODEL, KLEIN, [1, 2, 3], LENGTH),
        *((f"mistral_{side}", FLUX2_MODEL, FLUX2, [1, 2, 4], 130) for side in ("left", "right")),
    ],
)
@torch.no_grad()
def test_several_layers_at_full_length_equal_the_pipelines_of_flux_2(
    name: str, classes: Any, template: str, layers: list[int], length: int, saved: Callable[[str], Path]
) -> None:
    """Padding is on the tokenizer's own side."""
    model, tokenizer = parts(saved(name), classes[1])
    pipeline = classes[0](None, None, model, tokenizer, None)
    options = {"template": template, "layers": layers, "full_length": True, "max_tokens": length}
    encoder = encoder_of(saved(name), "causal_lm", **options)
    for texts in (TEXTS, [""]):
        how = {"device": CPU, "max_sequence_length": length, "text_encoder_out_layers": tuple(layers)}
        close(encoded(encoder, texts).tokens, pipeline.encode_prompt(texts, **how)[0])
    assert encoder.width == 3 * 32
    assert encoder.identity.class_name in ("Qwen3Model", "MistralModel")
    ids, mask = encoder.tokenizer.ids(TEXTS)
    if tokenizer.bos_token_id is not None:
        assert (ids[mask.bool()] == tokenizer.bos_token_id).sum() == len(TEXTS)  # one each
        assert not mask[0, 0 if name == "mistral_left" else -1]


@torch.no_grad()
def test_a_system_prompt_before_the_caption_equals_the_pipeline_of_lumina_2(saved: Callable[[str], Path]) -> None:
    # It has a soft cap.
    model, tokenizer = parts(saved("gemma2"), transformers.Gemma2Model, attn_implementation="eager")
    pipeline: Any = diffusers.Lumina2Pipeline(None, None, None, model, tokenizer)
    length = 120
    wanted, mask, _, _ = pipeline.encode_prompt(TEXTS, False, device=CPU, max_sequence_length=length)
    encoder = encoder_of(saved("gemma2"), "causal_lm", template=LUMINA, layers=[-2], max_tokens=length)
    for text, row, valid in zip(TEXTS, wanted, mask, strict=True):
        close(encoder.encode([text]).tokens[0], row[valid.bool()])


def test_padding_sides_are_in_the_identity(saved: Callable[[str], Path]) -> None:
    sections = [
        section_of(saved(f"mistral_{side}"), "causal_lm", full_length=full_length)
        for side in ("left", "right")
        for full_length in (True, False)
    ]
    left, left_unpadded, right, right_unpadded = [CaptionTokenizer(section).sha256 for section in sections]
    assert left != right
    assert left_unpadded == right == right_unpadded  # padding is on the right where it is not stored
    section = section_of(saved("mistral_right"), "causal_lm", full_length=True, padding_side="left")
    assert CaptionTokenizer(section).sha256 == left
    with pytest.raises(EncoderError, match=r"drop_prefix_tokens: with text\.full_length padding is on the left"):
        encoder_of(
            saved("mistral_left"), "causal_lm", full_length=True, template="Draw: {caption}", drop_prefix_tokens=1
        )


CONFIG, TOKENIZER = "text_encoder/config.json", "tokenizer/tokenizer_config.json"
REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...], str]] = [
    ("clip", {"kind": "clip", "max_tokens": 300}, (), r"max_tokens 300: CLIP .* at most 77"),
    ("clip", {"kind": "clip", "max_tokens": 77, "layers": [5]}, (), r"layers 5: .* has 4 layers, expected .* -5 to 4"),
    ("gemma2", {"kind": "t5"}, (), "says 'gemma2', expected 't5'"),
    ("t5", {"kind": "causal_lm"}, (), "says 't5', expected a decoder-only language model"),
    (
        *("clip", {"kind": "clip", "max_tokens": 77}, (CONFIG, "CLIPTextModelWithProjection", "CLIPModel")),
        r"\['CLIPModel'\], expected one of CLIPTextModel, CLIPTextModelWithProjection",
    ),
    ("qwen3", {"kind": "causal_lm"}, (TOKENIZER, '"pad_token"', '"other_token"'), "has no padding token"),
]


@pytest.mark.parametrize(("name", "options", "change", "words"), REFUSED)
def test_what_an_encoder_cannot_give_is_one_clear_error(
    name: str, options: dict[str, Any], change: tuple[str, ...], words: str, saved: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved(name), tmp_path / name))
    if change:
        path, before, after = change
        (folder / path).write_text((folder / path).read_text().replace(before, after))
    with pytest.raises(EncoderError, match=words):
        encoder_of(folder, **options)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["output=both", "kind=clip"], r'"both" needs full_length = true, so that a shard holds both'),
        (["output=pooled"], "only kind .clip. has a pooled vector"),
        (["output=pooled", "kind=clip", "layers=[1]"], "leave out layers"),
        (["padding_side=left"], "padding_side needs full_length = true"),
        (["attend_padding=true", "full_length=true", "kind=clip"], "attend_padding .* kind t5, umt5 or causal_lm"),
        (["template=a {caption}"], "a template is for a language model"),
        (["kind=causal_lm", "template=a photo"], r"template needs \{caption\} exactly once"),
        (["instruction=sana"], "instruction is for a language model"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load("pixart-256", [f"text.{override}" for override in overrides])


def test_a_caption_without_any_token_is_refused_with_what_to_do(saved: Callable[[str], Path]) -> None:
    with pytest.raises(EncoderError, match=r"no token for caption ''.*text\.template.*missing_caption=reject"):
        encoder_of(saved("qwen3"), "causal_lm").tokenizer.count(["a cat", ""])
