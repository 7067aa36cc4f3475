"""Text encoders of random weights with the architectures and tokenizers of published pipelines, saved as on the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import interpolate

TEXTS = ["a red circle", "a cat", "two cats sleep on a big red sofa near the window of a house by the sea", "a dog"]
WORDS = [*TEXTS, "describe the image by its color, shape, size: system user assistant reasons about", "an AI that sees"]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.25,  # so that layers and tokens differ
}
T5_SIZES: dict[str, Any] = {"d_model": 96, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
MISTRAL_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
# What the published templates write for a text without tools, images or an earlier answer.
QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MISTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content[0].text }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{{ message.content[0].text }}[/INST]{% endif %}{% endfor %}"
)


def save_t5(folder: Path, *, kind: str = "t5") -> None:
    """A T5 or UMT5 encoder and its tokenizer, in ``text_encoder`` and ``tokenizer`` of a folder."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    trainer: Any = trainers.UnigramTrainer(  # pyright: ignore
        vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"
    )
    core.train_from_iterator(WORDS, trainer)
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(1)
    config, model_class = (
        (transformers.T5Config, transformers.T5EncoderModel)
        if kind == "t5"
        else (transformers.UMT5Config, transformers.UMT5EncoderModel)
    )
    sizes = T5_SIZES | {"feed_forward_proj": "gated-gelu", "initializer_factor": 1.5}
    model_class(config(vocab_size=len(tokenizer), **sizes)).eval().save_pretrained(folder / "text_encoder")


def save_clip(folder: Path, *, projected: bool, pad: str = "<|endoftext|>", seed: int = 0) -> None:
    """A CLIP text model; its tokenizer has a vocab.json and merges.txt alone, as most published ones."""
    core = Tokenizer(models.BPE(unk_token="<|endoftext|>", end_of_word_suffix="</w>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, end_of_word_suffix="</w>")  # pyright: ignore
    core.train_from_iterator(WORDS, trainer)
    written = json.loads(core.to_str())["model"]
    words = sorted({"!"} | written["vocab"].keys(), key=lambda word: (word != "!", word))
    vocabulary = {word: i for i, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    merges = [" ".join(pair) for pair in written["merges"]]
    place = folder / "tokenizer"
    place.mkdir(parents=True)
    (place / "vocab.json").write_text(json.dumps(vocabulary))
    (place / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    special = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    named = special | {"pad_token": pad, "tokenizer_class": "CLIPTokenizer", "model_max_length": 77}
    (place / "tokenizer_config.json").write_text(json.dumps(named))
    torch.manual_seed(seed)
    config = transformers.CLIPTextConfig(
        vocab_size=len(vocabulary),
        projection_dim=24,
        max_position_embeddings=77,
        initializer_factor=4.0,
        bos_token_id=len(vocabulary) - 2,
        eos_token_id=len(vocabulary) - 1,
        **{key: value for key, value in SIZES.items() if key != "initializer_range"},
    )
    model = transformers.CLIPTextModelWithProjection(config) if projected else transformers.CLIPTextModel(config)
    model.eval().save_pretrained(folder / "text_encoder")


def save_qwen3(folder: Path) -> None:
    """A Qwen3 and its tokenizer with a chat template."""
    tokenizer = _byte_level(QWEN_SPECIAL, pad_token="<|endoftext|>", chat_template=QWEN_CHAT)
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(2)
    config = transformers.Qwen3Config(vocab_size=len(tokenizer) + 8, **SIZES, **HEADS)
    transformers.Qwen3ForCausalLM(config).eval().save_pretrained(folder / "text_encoder")


def save_qwen_vl(folder: Path) -> None:
    """A Qwen2.5-VL with a vision tower."""
    tokenizer = _byte_level(QWEN_SPECIAL, pad_token="<|endoftext|>", chat_template=QWEN_CHAT)
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(3)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = SIZES | {"num_key_value_heads": 2, "vocab_size": len(tokenizer) + 8, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16, "num_heads": 2}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    transformers.Qwen2_5_VLForConditionalGeneration(config).eval().save_pretrained(folder / "text_encoder")


def save_mistral3(folder: Path, *, padding_side: str) -> None:
    """A Mistral-Small-3.1 with a vision tower; its tokenizer begins each text with <s>."""
    tokenizer = _byte_level(
        MISTRAL_SPECIAL, pad_token="<pad>", bos_token="<s>", chat_template=MISTRAL_CHAT, padding_side=padding_side
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(4)
    text = {"model_type": "mistral", "vocab_size": len(tokenizer), **SIZES, **HEADS}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision)
    transformers.Mistral3ForConditionalGeneration(config).eval().save_pretrained(folder / "text_encoder")


def save_gemma2(folder: Path, *, sliding_window: int = 4096) -> None:
    """A Gemma-2 whose tokenizer pads on the left, as published."""
    tokenizer = _byte_level(["<pad>", "<eos>", "<bos>", "<unk>"], pad_token="<pad>", bos_token="<bos>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(5)
    more = {"attn_logit_softcapping": 1.0, "sliding_window": sliding_window}
    config = transformers.Gemma2Config(vocab_size=len(tokenizer), **more, **SIZES, **HEADS)
    transformers.Gemma2ForCausalLM(config).eval().save_pretrained(folder / "text_encoder")


def _byte_level(special: list[str], **options: Any) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(  # pyright: ignore
        vocab_size=500,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(WORDS, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **options)


def make_dinov2(folder: Path, *, width: int = 8, deviation: float = 0.02) -> Path:
    """A random DINOv2 of two blocks with patches of 14 px; with larger weights, images differ more."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    config = transformers.Dinov2Config(**sizes, initializer_range=deviation)
    model = transformers.Dinov2Model(config)
    with torch.no_grad():
        model.embeddings.position_embeddings.normal_()
    model.save_pretrained(folder, safe_serialization=True)
    preprocessor = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


CLIP_TEXTS = ["a red circle", "a cat"]
SIDE_PX = 32


class TinyClip:
    """A CLIP in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model = transformers.CLIPModel.from_pretrained(folder).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def score(self, pixels: np.ndarray, caption: str) -> float:
        """100 * max(cosine, 0) of a square image (height, width, 3) uint8 and its caption, without padding."""
        batch = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float()
        batch = interpolate(batch, (SIDE_PX, SIDE_PX), mode="bicubic", antialias=True).clamp(0, 255) / 127.5 - 1
        with torch.no_grad():
            output = self._model(pixel_values=batch, **self._tokenizer([caption], return_tensors="pt"))
        return 100 * max(0.0, float((output.image_embeds * output.text_embeds).sum()))


def make_clip(folder: Path) -> TinyClip:
    """A random CLIP for images of 32 px."""
    save_clip(folder / "parts", projected=True)
    for path in (folder / "parts/tokenizer").iterdir():
        shutil.copy(path, folder / path.name)
    text = json.loads((folder / "parts/text_encoder/config.json").read_text())
    vision = {key: value for key, value in SIZES.items() if key != "initializer_range"}
    vision |= {"image_size": SIDE_PX, "patch_size": 16, "initializer_factor": 4.0, "projection_dim": 24}
    torch.manual_seed(0)
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
    ).eval()
    model.save_pretrained(folder)
    said = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "crop_size": SIDE_PX}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    shutil.rmtree(folder / "parts")
    return TinyClip(folder)
