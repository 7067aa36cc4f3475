"""A single file of weights in its original layout: the same numbers as the folder, and one clear error otherwise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import CPU, NO_CHECK, label_recipe, make_class_folder, no_progress, picture
from safetensors.torch import load_file, save_file
from tiny_autoencoders import save_autoencoder

from leandit.datasets.errors import EncoderError
from leandit.datasets.store import LatentStore
from leandit.precompute.config import VaeSection
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.precompute.pipeline import precompute
from leandit.precompute.unchanged import Unchanged, unchanged
from leandit.tools.inspection.images import LatentDecoder

WEIGHTS = "diffusion_pytorch_model.safetensors"
BLOCKS = 2  # of the tiny AutoencoderKL
ORIGINAL = {
    r"mid_block\.resnets\.(\d)": lambda m: f"mid.block_{int(m[1]) + 1}",
    r"mid_block\.attentions\.0\.group_norm": lambda m: "mid.attn_1.norm",
    r"mid_block\.attentions\.0\.to_([qkv])": lambda m: f"mid.attn_1.{m[1]}",
    r"mid_block\.attentions\.0\.to_out\.0": lambda m: "mid.attn_1.proj_out",
    r"down_blocks\.(\d)\.resnets": lambda m: f"down.{m[1]}.block",
    r"down_blocks\.(\d)\.downsamplers\.0": lambda m: f"down.{m[1]}.downsample",
    r"up_blocks\.(\d)\.resnets": lambda m: f"up.{BLOCKS - 1 - int(m[1])}.block",
    r"up_blocks\.(\d)\.upsamplers\.0": lambda m: f"up.{BLOCKS - 1 - int(m[1])}.upsample",
    "conv_shortcut": lambda m: "nin_shortcut",
    "conv_norm_out": lambda m: "norm_out",
}


def original_layout(weights: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """Weights of diffusers under the names, and in the shapes, of CompVis."""
    renamed = {}
    for name, tensor in weights.items():
        for pattern, replacement in ORIGINAL.items():
            name = re.sub(pattern, replacement, name)
        is_attention = ".attn_1." in name and name.endswith("weight") and tensor.ndim == 2
        renamed[prefix + name] = tensor[:, :, None, None].contiguous() if is_attention else tensor
    return renamed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_autoencoder(tmp_path / "vae", "kl", latent_channels=4, scaling_factor=0.5, mid_block_add_attention=True)


@pytest.fixture
def file(folder: Path, tmp_path: Path) -> Path:
    save_file(original_layout(load_file(folder / WEIGHTS)), tmp_path / "ae.safetensors")
    return tmp_path / "ae.safetensors"


def load(file: Path, config: Path | str = "", **more: Any) -> ImageEncoder:
    return ImageEncoder(VaeSection(model=str(file), config=str(config), **more), CPU)


def pixels() -> np.ndarray:
    return np.stack([np.asarray(picture(i, 64, 64)) for i in range(2)])


@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "vae."])
def test_a_file_in_the_original_layout_encodes_as_the_folder(prefix: str, folder: Path, tmp_path: Path) -> None:
    others = {"model.diffusion_model.out.2.weight": torch.zeros(3)} if prefix else {}  # of a whole checkpoint
    save_file(original_layout(load_file(folder / WEIGHTS), prefix) | others, tmp_path / "one.safetensors")
    one, whole = load(tmp_path / "one.safetensors", folder), load(folder)
    assert np.array_equal(one.encode(pixels()), whole.encode(pixels()))
    latents = whole.encode(pixels())[:, :4]
    assert np.array_equal(one.decode(latents), whole.decode(latents))
    assert one.latent_spec(VaeSection(), "float16") == whole.latent_spec(VaeSection(), "float16")
    assert (one.identity.class_name, one.identity.config) == (whole.identity.class_name, whole.identity.config)


def test_the_identity_is_of_the_content_not_of_the_name(file: Path, folder: Path) -> None:
    before = load(file, folder).identity
    assert (before.model, before.revision) == (str(file), None)
    moved = file.rename(file.with_name("other.safetensors"))
    assert load(moved, folder).identity.weights_sha256 == before.weights_sha256
    weights = load_file(moved)
    weights["encoder.conv_in.bias"][0] += 1e-3
    save_file(weights, moved)
    assert load(moved, folder).identity.weights_sha256 != before.weights_sha256


def test_without_a_config_the_error_asks_for_one(file: Path) -> None:
    with pytest.raises(EncoderError, match=r"a single file, needed vae\.config as well: a folder or hub id with the"):
        load(file)


def test_a_weight_that_the_file_lacks_is_an_error_and_not_random(file: Path, folder: Path) -> None:
    save_file({k: v for k, v in load_file(file).items() if k != "encoder.conv_in.bias"}, file)
    with pytest.raises(EncoderError, match=r"1 weights are missing.*'encoder\.conv_in\.bias'"):
        load(file, folder)


def test_a_file_that_is_torn_or_of_another_model_is_one_clear_error(file: Path, folder: Path, tmp_path: Path) -> None:
    other = save_autoencoder(tmp_path / "other", "kl", latent_channels=8, scaling_factor=0.5)
    with pytest.raises(EncoderError, match=r"ae\.safetensors': cannot be loaded as AutoencoderKL"):
        load(file, other)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(EncoderError, match="cannot be loaded"):
        load(file, folder)


@pytest.mark.parametrize("family", ["tiny", "flux2", "qwen", "rae"])
def test_a_class_that_diffusers_does_not_convert_is_refused_with_advice(
    family: str, file: Path, tmp_path: Path
) -> None:
    config = save_autoencoder(tmp_path / family, family)
    with pytest.raises(
        EncoderError, match=r"reads a single file of AutoencoderKL, AutoencoderDC, AutoencoderKLWan, not"
    ):
        load(file, config)


def test_a_store_of_a_single_file_is_found_unchanged_and_its_decoder_loads(
    file: Path, folder: Path, tmp_path: Path
) -> None:
    source = make_class_folder(tmp_path / "train", classes=1, per_class=3)
    recipe = label_recipe(f"vae.model={file}", f"vae.config={folder}", NO_CHECK)
    root = tmp_path / "store"
    precompute(recipe, source_path=source, store_path=root, device=CPU, progress=no_progress)
    store = LatentStore(root)
    assert store.spec.recipe["vae"]["model"] == store.spec.vae.model == "../ae.safetensors"
    assert store.spec.recipe["vae"]["config"] == "../vae"
    assert isinstance(unchanged(recipe, [str(source)], root, device="cpu"), Unchanged)
    assert LatentDecoder.of_store(store, None, CPU).is_own
    assert LatentDecoder.of_store(store, str(folder), CPU).identity.model == str(folder)
