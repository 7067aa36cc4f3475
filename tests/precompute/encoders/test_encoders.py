"""Encoders: the same numbers as the libraries give directly, and one clear error for each thing that can be wrong."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from making import CPU, drop_files, set_json, smooth_image, write_file
from safetensors.torch import load_file, save_file
from tiny_autoencoders import FAMILIES, save_autoencoder

from leandit.errors import EncoderError, RecipeError
from leandit.precompute.config import TextSection, VaeSection
from leandit.precompute.encoders.model_files import local_folder
from leandit.precompute.encoders.text.encoder import CaptionEncoder, EncodedCaptions
from leandit.precompute.encoders.text.tokenizer import CaptionTokenizer
from leandit.precompute.encoders.vae import ImageEncoder

WEIGHTS = "diffusion_pytorch_model.safetensors"
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Save a random autoencoder of a family."""

    def run(family: str, **config: Any) -> Path:
        return save_autoencoder(tmp_path / family, family, **config)

    return run


@pytest.fixture
def vae(tmp_path: Path) -> Path:
    """A copy of the shipped VAE that a test may break."""
    return copied("shipped:vae", tmp_path / "vae")


@pytest.fixture
def t5(tmp_path: Path) -> Path:
    """A copy of the shipped T5 that a test may break."""
    return copied("shipped:t5", tmp_path / "t5")


def copied(model: str, to: Path) -> Path:
    folder = local_folder(model)
    return Path(shutil.copytree(folder, to))


def image_encoder(model: str | Path, **more: Any) -> tuple[ImageEncoder, VaeSection]:
    section = VaeSection(model=str(model), **more)
    return ImageEncoder(section, CPU), section


def caption_encoder(model: str | Path = "shipped:t5", **more: Any) -> CaptionEncoder:
    section = TextSection(**({"kind": "t5", "model": str(model), "max_tokens": 16, "dtype": "float32"} | more))
    return CaptionEncoder(section, CaptionTokenizer(section), CPU)


def pixels(count: int = 3, side_px: int = 64) -> np.ndarray:
    return np.stack([np.asarray(smooth_image(i, side_px, side_px)) for i in range(count)])


def test_a_posterior_can_be_kept_whole_or_in_part_where_there_is_one(save: Save) -> None:
    moments, folder = ("mean_logvar", "moments", 6), save("kl")
    kinds = {"auto": moments, "moments": moments, "mean": ("mean", "latents", 3), "sample": ("sample", "latents", 3)}
    for keep, wanted in kinds.items():
        encoder, section = image_encoder(folder, keep=keep)
        spec = encoder.latent_spec(section, "float16")
        assert (spec.kind, spec.array, spec.stored_channels, spec.channels) == (*wanted, 3)
    for keep in ("moments", "sample"):
        encoder, section = image_encoder(save("dc"), keep=keep)
        with pytest.raises(RecipeError, match=rf'{keep}.*no posterior.*keep = "auto"'):
            encoder.latent_spec(section, "float16")


def test_encoding_in_float32_leaves_the_arithmetic_as_it_was(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leandit.precompute.encoders.vae.arithmetic", lambda dtype, device: dtype)  # as on a GPU
    folder = save("kl")
    low, _ = image_encoder(folder, dtype="bfloat16")
    high, _ = image_encoder(folder)
    before = low.encode(pixels())
    assert not np.array_equal(before, high.encode(pixels()))
    one_by_one = np.concatenate([high.encode(pixels()[i : i + 1]) for i in range(3)])
    for _ in range(2):
        with low.in_float32():
            again = np.concatenate([low.encode(pixels()[i : i + 1]) for i in range(3)])
        assert again.dtype == np.float32
        assert np.array_equal(again, one_by_one)  # with the weights of the file, not those rounded to bfloat16
    assert np.array_equal(low.encode(pixels()), before)


@pytest.mark.parametrize(("family", "tile_px"), [("kl", 48), ("dc", 64)])
def test_tiles_give_nearly_what_the_whole_image_gives(family: str, tile_px: int, save: Save) -> None:
    folder = save(family)
    whole, _ = image_encoder(folder)
    tiled, section = image_encoder(folder, tile_px=tile_px)
    assert tiled.latent_spec(section, "float16").tile_px == tile_px
    small = pixels(2, tile_px)
    np.testing.assert_array_equal(tiled.encode(small), whole.encode(small))  # what fits a tile is not cut
    batch = np.random.default_rng(0).integers(0, 256, (2, 96, 128, 3), np.uint8)  # everywhere alike, as norms need it
    found, wanted = tiled.encode(batch), whole.encode(batch)
    assert found.shape == wanted.shape
    assert not np.array_equal(found, wanted)

    def likeness(other: np.ndarray) -> float:
        return float(np.corrcoef(found.ravel(), other.ravel())[0, 1])

    # A norm over a tile is not that over the image, and a tile has borders: they are near each other, not equal.
    assert likeness(wanted) > 0.95
    assert likeness(np.roll(wanted, 1, 3)) < 0.9  # a place further they are not
    np.testing.assert_array_equal(found, tiled.encode(batch))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def only_bin(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "diffusion_pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def wrong_shape(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    save_file(weights | {"encoder.conv_in.weight": torch.zeros(4, 3, 3, 3)}, folder / WEIGHTS)


config_with = partial(set_json, "config.json")
UNUSABLE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("vae", drop_files(WEIGHTS), r"no weights 'diffusion_pytorch_model.*found: config.json"),
    ("vae", only_bin, r"no weights.*diffusion_pytorch_model\.bin.*[Oo]nly safetensors"),
    ("vae", lambda folder: cut(folder / WEIGHTS), "cannot be loaded: 1000 bytes.*Fetch it again"),
    ("vae", wrong_shape, "cannot be loaded"),
    ("vae", config_with(_class_name="UNet2DModel"), r"says 'UNet2DModel', expected AutoencoderKL, "),
    ("vae", config_with(in_channels=4), r"encodes 4 channels, expected 3"),
    ("vae", config_with(scaling_factor=None), r"no 'scaling_factor'"),
    ("vae", config_with(scaling_factor=0), r"not above 0"),
    ("vae", config_with(scaling_factor="1"), r"expected one number, or one for each"),
    ("vae", config_with(latents_std=[1.0, 2.0], latents_mean=[0.0, 0.0]), r"one for each of 4 channels"),
    ("vae", config_with(latents_std=None), r"one of 'latents_mean' and 'latents_std'"),
    ("vae", config_with(shift_factor=0.1), r"'latents_mean' and 'shift_factor', expected one"),
    ("vae", config_with(use_quant_conv=False), r"hold 'quant_conv\.bias', which its config\.json has no place for"),
    ("t5", drop_files("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    ("t5", lambda folder: write_file(folder / "tokenizer.json", "{" + ", " * 5000), "tokenizer"),
    (
        *("t5", set_json("tokenizer_config.json", tokenizer_class="BertTokenizer")),
        "asks for the tokenizer 'BertTokenizer'.*expected that of a T5",
    ),
    ("t5", config_with(model_type="bert"), r"says 'bert', expected 't5'"),
    ("t5", config_with(vocab_size=32128), r"tokenizer knows 2\d tokens, the encoder 32128.*do not belong together"),
]


@pytest.mark.parametrize(("which", "spoil", "words"), UNUSABLE)
def test_an_unusable_encoder_is_one_clear_error(
    which: str, spoil: Callable[[Path], Any], words: str, vae: Path, t5: Path
) -> None:
    spoil(vae if which == "vae" else t5)
    with pytest.raises(EncoderError, match=rf"{'vae' if which == 'vae' else 'text'}.*({words})") as caught:
        image_encoder(vae) if which == "vae" else caption_encoder(t5).load()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700


SUPPORTED = {model_class.__name__ for model_class, *_ in FAMILIES.values()}
OTHER_AUTOENCODERS = sorted(
    name for name in dir(diffusers) if re.search("Autoencoder|VAE$|VQModel", name) and name not in SUPPORTED
)


def test_every_other_autoencoder_of_diffusers_is_refused_by_name_before_its_weights_are_read(vae: Path) -> None:
    assert {"AutoencoderKLHunyuanVideo", "AutoencoderKLCogVideoX", "AsymmetricAutoencoderKL"} <= {*OTHER_AUTOENCODERS}
    (vae / WEIGHTS).unlink()
    for name in OTHER_AUTOENCODERS:
        config_with(_class_name=name)(vae)
        with pytest.raises(EncoderError, match=rf"says '{name}', expected AutoencoderKL.*normalize their latents"):
            image_encoder(vae)


def test_a_scale_that_the_config_leaves_out_is_taken_from_the_class_only_where_it_is_right(save: Save) -> None:
    four = save("kl", latent_channels=4)  # as the first Stable Diffusion's, whose config says nothing
    config_with(scaling_factor=...)(four)
    encoder, section = image_encoder(four)
    assert encoder.latent_spec(section, "float16").scale == [0.18215] * 4
    for family, config in (("kl", {"latent_channels": 16}), ("dc", {})):
        folder = save(family, **config)
        config_with(scaling_factor=...)(folder)
        with pytest.raises(EncoderError, match=r"no 'scaling_factor'\. Add the one"):
            image_encoder(folder)


def test_a_named_subfolder_counts_before_the_folder_if_both_hold_a_model(save: Save) -> None:
    vae = save("kl", latent_channels=4)
    shutil.copytree(vae, vae / "other")
    config_with(scaling_factor=0.5)(vae / "other")
    scales = {}
    for subfolder in ("", "other", "missing"):  # a recipe for a pipeline also takes the folder of the VAE alone
        encoder, section = image_encoder(vae, subfolder=subfolder)
        scales[subfolder] = encoder.latent_spec(section, "float16").scale[0]
    assert scales["other"] == 0.5
    assert scales[""] == scales["missing"] != 0.5


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gone/away/vae.ckpt", "a single file, expected a folder with config.json. Load it with the library"),
        ("taesd3_encoder.pth", "half of a TAESD, in its publisher's layout. Use the hub id, or a folder"),
        (
            "t5-small",
            "there is no such folder as 't5-small', and on the hub a name has its owner, such as OWNER/t5-small",
        ),
    ],
)
def test_names_that_are_no_folder_are_told_apart_in_a_line(
    model: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taesd3_encoder.pth").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EncoderError) as caught:
        image_encoder(model)
    assert str(caught.value).startswith(f"vae.model '{model}': ")
    assert words in str(caught.value)


@pytest.mark.parametrize("load", [image_encoder, caption_encoder])
def test_a_hub_id_without_network_is_an_error_with_advice(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("Cannot reach the hub: offline mode is enabled.")

    monkeypatch.setattr("leandit.precompute.encoders.model_files.snapshot_download", offline)
    with pytest.raises(EncoderError, match=r"some/model.*offline.*hf auth login.*--set (vae|text)\.model=PATH"):
        load("some/model")


def test_the_revision_of_a_hub_model_is_recorded(vae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "0123abcd"
    vae.rename(snapshot)
    asked: list[Any] = []

    def download(model: str, *, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        asked.append((model, revision))
        return str(snapshot)

    monkeypatch.setattr("leandit.precompute.encoders.model_files.snapshot_download", download)
    encoder, _ = image_encoder("some/model", revision="main")
    assert asked == [("some/model", "main"), ("some/model", "0123abcd")]  # weights of the config's own commit
    assert (encoder.identity.model, encoder.identity.revision) == ("some/model", "0123abcd")


DECOYS = """model_index.json README.md transformer/config.json transformer/diffusion_pytorch_model.safetensors
tokenizer_2/tokenizer.json unet/diffusion_pytorch_model.fp16.safetensors sd3_medium.safetensors ae.safetensors
vae/diffusion_pytorch_model.fp16.safetensors vae/diffusion_pytorch_model.bin vae/diffusion_flax_model.msgpack
vae/onnx/config.json vae/onnx/diffusion_pytorch_model.safetensors vae_1_0/diffusion_pytorch_model.safetensors
text_encoder/model.fp16.safetensors text_encoder/model.safetensors.index.fp16.json text_encoder/pytorch_model.bin
text_encoder/model.fp16-00001-of-00002.safetensors text_encoder/onnx/model.safetensors text_encoder/openvino_model.xml
tokenizer/onnx/tokenizer.json tokenizer/vocab.json.bak"""  # of published repositories, as they name them


def test_of_a_pipeline_only_what_is_loaded_is_fetched_and_of_a_refused_model_its_config(
    vae: Path, t5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers.T5EncoderModel.from_pretrained(t5)
    (t5 / "model.safetensors").unlink()
    model.save_pretrained(t5, max_shard_size="200KB")
    names = {path.name for path in t5.iterdir()}
    parts = sorted(name for name in names if name.startswith("model-"))
    assert len(parts) > 1
    tokenizer = names - {*parts, "config.json", "model.safetensors.index.json", "generation_config.json"}
    places = {"vae/": vae, "text_encoder/": t5, "tokenizer/": t5}
    listing = dict.fromkeys(DECOYS.split(), vae / "config.json")
    listing |= {f"{place}{path.name}": path for place, folder in places.items() for path in folder.iterdir()}
    fetched: set[str] = set()

    def download(model: str, *, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        for name in filter_repo_objects(list(listing), allow_patterns=allow_patterns):  # the hub's own filter
            write_file(tmp_path / "snapshots/0123abcd" / name, listing[name].read_bytes())
            fetched.add(name)
        return str(tmp_path / "snapshots/0123abcd")

    monkeypatch.setattr("leandit.precompute.encoders.model_files.snapshot_download", download)
    image_encoder("some/pipeline", subfolder="vae")
    assert fetched == {"vae/config.json", f"vae/{WEIGHTS}"}
    fetched.clear()
    encoder = caption_encoder("some/pipeline", subfolder="text_encoder", tokenizer_subfolder="tokenizer")
    wanted = {f"text_encoder/{name}" for name in (*parts, "config.json", "model.safetensors.index.json")}
    assert fetched == wanted | {f"tokenizer/{name}" for name in (*tokenizer, "config.json")}
    assert np.array_equal(encoder.encode(["a circle"]).tokens, caption_encoder().encode(["a circle"]).tokens)
    fetched.clear()
    config_with(_class_name="AutoencoderKLMochi")(vae)
    with pytest.raises(EncoderError, match="AutoencoderKLMochi"):
        image_encoder("some/pipeline", subfolder="vae")
    assert fetched == {"vae/config.json"}


CAPTIONS = ["a red circle", "a tiny blue square above a big green triangle", "a circle"]


def shipped_t5() -> tuple[Any, Any]:
    folder = local_folder("shipped:t5")
    return transformers.AutoTokenizer.from_pretrained(folder), transformers.T5EncoderModel.from_pretrained(folder)


def test_tokens_are_counted_as_the_tokenizer_counts_them() -> None:
    tokenizer, _ = shipped_t5()
    texts = [*CAPTIONS, "unknown wörds 123", "a " * 40]
    encoder = caption_encoder()
    assert encoder.tokenizer.count(texts) == [len(tokenizer(text)["input_ids"]) for text in texts]
    assert encoder.tokenizer.count([]) == []
    encoder.encode(["a " * 40])  # a cut must not stay switched on
    assert encoder.tokenizer.count(["a " * 40])[0] > 16
    ids, _ = encoder.tokenizer.ids(["a " * 40])
    assert ids.shape == (1, 16)
    assert ids[0, -1] == tokenizer.eos_token_id  # of what is cut, too


@pytest.mark.parametrize("heals", [True, False], ids=["heals in float32", "never heals"])
def test_a_caption_that_is_not_finite_is_encoded_again_in_float32(heals: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leandit.precompute.encoders.text.encoder.arithmetic", lambda dtype, device: dtype)  # as a GPU
    low, high, forward = caption_encoder(dtype="bfloat16"), caption_encoder(), CaptionEncoder._forward
    captions = ["a red circle", "a red square", "a tiny circle"]
    exact = high.encode(["a red square"]).tokens[0]
    plain = low.encode(captions).tokens

    def failing(self: CaptionEncoder, ids: torch.Tensor, mask: torch.Tensor, stored: list[int]) -> EncodedCaptions:
        encoded = forward(self, ids, mask, stored)
        if len(ids) == 3:
            encoded.tokens[1, 0, 0] = np.nan
        elif not heals:
            encoded.tokens[0, 0, 0] = np.inf
        return encoded

    monkeypatch.setattr(CaptionEncoder, "_forward", failing)
    if not heals:
        with pytest.raises(EncoderError, match=r"float32 produced NaN or infinity for the caption 'a red square'"):
            low.encode(captions)
        assert low.encode(captions, must_be_finite=False).is_finite.tolist() == [True, False, True]
        return
    found = low.encode(captions).tokens
    assert np.array_equal(found[1], exact)  # with the weights of the file, not those rounded to bfloat16
    assert not np.array_equal(found[1], plain[1])
    assert np.array_equal(found[[0, 2]], plain[[0, 2]])
    monkeypatch.undo()
    assert np.array_equal(low.encode(captions).tokens, plain)
