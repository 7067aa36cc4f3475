"""An encoder that gives NaN, infinity or always the same is named with its dtype, before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from faults import break_word
from making import Leandit, caption_recipe, encode, make_caption_folder, make_class_folder
from safetensors.torch import load_file, save_file
from tiny_autoencoders import save_autoencoder

from leandit.errors import EncoderError
from leandit.precompute.encoders import vae as encoders_module
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.precompute.encoders.vision.features import FeatureEncoder

WEIGHTS = "diffusion_pytorch_model.safetensors"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def good_vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_autoencoder(tmp_path_factory.mktemp("vae") / "vae", "kl")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_class_folder(tmp_path_factory.mktemp("source") / "train", classes=2, per_class=6)


def vae_with(good: Path, folder: Path, change: Callable[[Tensors], Any]) -> Path:
    shutil.copytree(good, folder)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def multiply(factor: float, *names: str) -> Callable[[Tensors], None]:
    """Multiply the weights whose names begin so."""

    def change(tensors: Tensors) -> None:
        for name in tensors:
            if name.startswith(names):
                tensors[name] = tensors[name] * factor

    return change


DAMAGES: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "NaN": (multiply(float("nan"), "encoder.conv_in"), "it gives NaN or infinity for a black image and for one of"),
    "overflow": (multiply(1e38, "encoder.conv_in.weight"), "it gives NaN or infinity for a black image and for one of"),
    "zeros": (multiply(0, "encoder."), "it gives the same for a black image and for one of colored blocks"),
}


@pytest.mark.parametrize("min_psnr", [0, 15])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_vae_that_cannot_encode_is_named_and_not_the_images(
    damage: str, min_psnr: int, good_vae: Path, source: Path, tmp_path: Path, leandit: Leandit
) -> None:
    change, words = DAMAGES[damage]
    vae, store = vae_with(good_vae, tmp_path / "vae", change), tmp_path / "store"
    settings = [f"vae.model={vae}", "images.resolution=64", f"vae.min_psnr={min_psnr}"]
    sets = [word for setting in settings for word in ("--set", setting)]
    ended = leandit("precompute", "imagenet-256", "--source", source, "--store", store, "--device", "cpu", *sets)
    assert ended.code == 3
    assert f"vae.model '{vae}', vae.dtype = \"float32\": {words}" in " ".join(ended.err.split())
    assert "Nothing was written." in ended.err
    assert "reject" not in ended.err
    assert not store.exists() or not list(store.rglob("*.json"))


def test_a_dtype_that_overflows_is_named_with_one_that_does_not(
    good_vae: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A norm follows, so that the latents themselves are small: the case of SDXL's VAE in float16.
    vae = vae_with(good_vae, tmp_path / "vae", multiply(1e6, "encoder.conv_in"))
    recipe = caption_recipe(f"vae.model={vae}", "vae.dtype=float16", "text.kind=none")
    monkeypatch.setattr(encoders_module, "arithmetic", lambda *_: "float16")
    with pytest.raises(
        EncoderError, match=r'vae\.dtype = "float16".* NaN .*In float32 it does not: set vae\.dtype = "f'
    ):
        encode(recipe, source, tmp_path / "store")
    monkeypatch.undo()
    assert encode(caption_recipe(f"vae.model={vae}", "text.kind=none"), source, tmp_path / "store").manifest


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (lambda moments: moments * np.nan, "it gives NaN or infinity for all 8 images of the source that were tried"),
        (lambda moments: moments * 0 + 1, "it gives the same for all 8 images of the source that were tried"),
        (lambda moments: moments * 0 + 1e6 * np.abs(moments) + 1e6, 'which store.dtype = "float16" cannot hold'),
    ],
)
def test_images_of_the_source_are_tried_too(
    encoded: Callable[[np.ndarray], np.ndarray],
    words: str,
    good_vae: Path,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = ImageEncoder.encode

    def encode_images(self: ImageEncoder, pixels: np.ndarray) -> np.ndarray:
        moments = forward(self, pixels)
        is_probe = pixels.shape[1] != 32
        return moments if is_probe else encoded(moments)

    monkeypatch.setattr(ImageEncoder, "encode", encode_images)
    settings = (f"vae.model={good_vae}", "vae.min_psnr=1", 'images.buckets=["32x32"]', "text.kind=none")
    with pytest.raises(EncoderError) as caught:
        encode(caption_recipe(*settings), source, tmp_path / "store")
    assert words in str(caught.value)
    assert f"vae.model '{good_vae}'" in str(caught.value)
    assert not list((tmp_path / "store").rglob("plan.json"))


@pytest.mark.parametrize(("factor", "words"), [(float("nan"), "NaN or infinity"), (0.0, "the same")])
def test_a_vision_model_that_cannot_encode_is_named(
    factor: float, words: str, good_vae: Path, source: Path, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= factor
    folder = tmp_path / "clip"
    model.save_pretrained(folder)
    transformers.CLIPImageProcessor().save_pretrained(folder)
    settings = (f"vae.model={good_vae}", f"features.teacher.model={folder}", "text.kind=none")
    with pytest.raises(EncoderError) as caught:
        encode(caption_recipe(*settings), source, tmp_path / "store")
    assert f"features.teacher.model '{folder}', features.teacher.encoder_dtype = \"float32\"" in str(caught.value)
    assert words in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_a_dtype_of_features_that_cannot_hold_them_is_named_with_one_that_can(
    good_vae: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    folder = tmp_path / "clip"
    config = transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=8)
    transformers.CLIPVisionModel(config).save_pretrained(folder)
    transformers.CLIPImageProcessor().save_pretrained(folder)
    forward = FeatureEncoder.encode
    monkeypatch.setattr(FeatureEncoder, "encode", lambda self, pixels: [x * 1e6 + 1e6 for x in forward(self, pixels)])
    settings = [f"vae.model={good_vae}", f"features.teacher.model={folder}", "text.kind=none"]
    with pytest.raises(
        EncoderError,
        match=r'which features\.teacher\.dtype = "float16" cannot hold\..*Set features\.teacher\.dtype = "int8"',
    ):
        encode(caption_recipe(*settings, "vae.min_psnr=1"), source, tmp_path / "store")
    recipe = caption_recipe(*settings, "features.teacher.dtype=int8")
    report = encode(recipe, source, tmp_path / "store")
    assert report.num_encoded == 12


def test_a_text_encoder_that_gives_nan_for_all_is_named_and_no_caption_is_blamed(tmp_path: Path) -> None:
    setting = break_word(tmp_path / "t5", "")
    captions = make_caption_folder(tmp_path / "captions", count=4)
    folder = setting.removeprefix("text.model=")
    with pytest.raises(
        EncoderError, match=rf"text\.model '{folder}', text\.dtype = \"float32\": .*weights are damaged"
    ):
        encode(caption_recipe(setting), captions, tmp_path / "store")
