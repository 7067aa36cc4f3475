"""Exports with encoders decode the latents of the run, however it normalised them, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from features import Made, run_import
from loaded import load_pipeline
from making import CPU, Leandit, caption_recipe, encode, label_recipe, train_recipe
from runs import run_to
from stores import encoder_recipe
from tiny_autoencoders import save_autoencoder
from tiny_models import save_qwen3, save_qwen_vl

from leandit.datasets.batches.latents import denormalise
from leandit.datasets.store import LatentStore
from leandit.train.sampling.snapshot import load_snapshot

pytestmark = pytest.mark.usefixtures("tiny_models")
FOUR: dict[str, Any] = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
FOUR |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}


def decoded_by_pipeline(model: str, vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Images of latents (B, C, H, W) of a model, as the formulas of diffusers' pipelines have them."""
    if model in ("dit-s-4", "pixart-tiny", "sana-tiny"):
        return vae.decode(latents / vae.config.scaling_factor).sample
    if model == "qwen-image-tiny":
        mean, std = (torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
        return vae.decode(latents.unsqueeze(2) * std + mean).sample
    return vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample


def check_decoding(model: str, run: Path, out: Path, class_name: str) -> dict[str, Any]:
    """Compare a pipeline's decoding with ours; returns the exported config of the VAE."""
    vae = getattr(diffusers, class_name).from_pretrained(out / "vae", low_cpu_mem_usage=False)
    spec = load_snapshot(run, CPU).latent
    side = 8
    latents = torch.randn((2, spec.channels, side, side), generator=torch.Generator().manual_seed(0))
    raw = denormalise(latents, spec)
    with torch.no_grad():
        expected = vae.decode(raw.unsqueeze(2) if model == "qwen-image-tiny" else raw).sample
        torch.testing.assert_close(decoded_by_pipeline(model, vae, latents), expected, rtol=1e-4, atol=1e-5)
    return json.loads((out / "vae/config.json").read_text())


def trained(model: str, store: LatentStore, run: Path, *settings: str) -> Path:
    run_to(train_recipe(model, "run.steps=1", "run.checkpoint_every=1", *settings), store, run)
    return run


@pytest.fixture(scope="module")
def stores(class_folder: Path, caption_folder: Path, golden: Any) -> dict[str, LatentStore]:
    """Of autoencoders with one scale for all channels; those of the shipped one differ by channel."""

    def make(root: Path) -> None:
        save_autoencoder(root / "kl", "kl", **FOUR, latent_channels=4, scaling_factor=0.25)
        save_autoencoder(root / "dc", "dc", latent_channels=4, scaling_factor=0.25)
        exact = "vae.dtype=float32"
        encode(label_recipe(f"vae.model={root / 'kl'}", exact), class_folder, root / "dit-s-4")
        encode(caption_recipe(f"vae.model={root / 'kl'}", exact), caption_folder, root / "pixart-tiny")
        encode(caption_recipe(f"vae.model={root / 'dc'}", exact), caption_folder, root / "sana-tiny")
        encode(encoder_recipe(root / "models"), caption_folder, root / "sd3-tiny")

    root = golden("decoding", make)
    return {model: LatentStore(root / model) for model in ("dit-s-4", "pixart-tiny", "sana-tiny", "sd3-tiny")}


SCALED = {"dit-s-4": (0.25, None), "pixart-tiny": (0.25, None), "sana-tiny": (0.25, None), "sd3-tiny": (1.5305, 0.0609)}


@pytest.mark.parametrize("model", SCALED)
@pytest.mark.parametrize("normalise", ["encoder", "none"])
def test_the_scale_of_the_run_is_that_of_the_exported_vae(
    model: str, normalise: str, stores: dict[str, LatentStore], leandit: Leandit, tmp_path: Path
) -> None:
    run = trained(model, stores[model], tmp_path / "run", f"latent.normalise={normalise}")
    assert leandit("export", run, "--out", tmp_path / "out", "--encoders").code == 0
    class_name = "AutoencoderDC" if model == "sana-tiny" else "AutoencoderKL"
    config = check_decoding(model, run, tmp_path / "out", class_name)
    scale, shift = SCALED[model]
    if normalise == "none":
        scale, shift = 1.0, 0.0 if model == "sd3-tiny" else None
    assert (config["scaling_factor"], config.get("shift_factor")) == (scale, shift)
    assert leandit("export", run, "--out", tmp_path / "plain").code == 0
    card = (tmp_path / "plain/README.md").read_text().replace("\\", "")
    assert ("register_to_config(scaling_factor=1.0" in card) == (normalise == "none")


@pytest.mark.parametrize("model", ["dit-s-4", "pixart-tiny"])
def test_a_pipeline_with_its_encoders_loads_and_draws(
    model: str, stores: dict[str, LatentStore], leandit: Leandit, tmp_path: Path
) -> None:
    run = trained(model, stores[model], tmp_path / "run")
    assert leandit("export", run, "--out", tmp_path / "out", "--encoders").code == 0
    name = "DiTPipeline" if model == "dit-s-4" else "PixArtSigmaPipeline"
    pipeline = load_pipeline(name, tmp_path / "out")
    options: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 2.0, "output_type": "np"}
    if model == "dit-s-4":
        images = pipeline(class_labels=[1], **options).images
    else:
        options |= {"use_resolution_binning": False, "max_sequence_length": 20}
        images = pipeline(prompt="a red circle", **options).images
    side = 32 if model == "dit-s-4" else 64
    assert images.shape == (1, side, side, 3)
    assert images.std() > 0


@pytest.mark.parametrize("model", SCALED)
def test_a_scale_by_channel_is_refused_with_encoders_and_noted_without(
    model: str, stores: dict[str, LatentStore], leandit: Leandit, tmp_path: Path
) -> None:
    run = trained(model, stores[model], tmp_path / "run", "latent.normalise=store")
    ended = leandit("export", run, "--out", tmp_path / "out", "--encoders")
    assert ended.code == 3
    undone = "one scaling_factor and one shift_factor" if model == "sd3-tiny" else "one scaling_factor"
    assert f"undoes {undone} for all channels" in ended.err
    assert "Leave --encoders out" in ended.err
    assert not (tmp_path / "out").exists()
    assert leandit("export", run, "--out", tmp_path / "out").code == 0
    assert "shifted, or scaled by channel" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("model", ["dit-s-4", "pixart-tiny"])
def test_a_vae_with_a_scale_of_its_own_for_each_channel_is_refused(
    model: str, store_of: dict[str, LatentStore], leandit: Leandit, tmp_path: Path
) -> None:
    """These pipelines ignore latents_mean and latents_std of its config."""
    run = trained(model, store_of[model], tmp_path / "run")
    ended = leandit("export", run, "--out", tmp_path / "out", "--encoders")
    assert ended.code == 3
    assert "undoes one scaling_factor for all channels and no shift" in ended.err


QWEN_VAE = {"dim_mult": [1, 1, 1, 1], "temperal_downsample": [False, True, True]}


def text_settings(folder: Path, *settings: str) -> list[str]:
    places = ("subfolder=text_encoder", "tokenizer_subfolder=tokenizer", "dtype=float32", f"model={folder}")
    return [f"text.{setting}" for setting in (*settings, *places)]


def qwen_settings(root: Path) -> list[str]:
    save_qwen_vl(root / "qwen")
    save_autoencoder(root / "vae", "qwen", **QWEN_VAE)
    return text_settings(root / "qwen", "kind=causal_lm", "max_tokens=48", 'template="a {caption}"')


def z_image_settings(root: Path) -> list[str]:
    save_qwen3(root / "qwen")
    save_autoencoder(root / "vae", "kl", **FOUR, latent_channels=4, scaling_factor=0.5, shift_factor=None)
    return text_settings(root / "qwen", "kind=causal_lm", "layers=[-2]", "max_tokens=48")


def flux2_settings(root: Path) -> list[str]:
    save_qwen3(root / "qwen")
    save_autoencoder(root / "vae", "flux2", **FOUR, latent_channels=2)
    named = text_settings(root / "qwen", "kind=causal_lm", "layers=[1,2,3]", "full_length=true", "max_tokens=48")
    return ["text.kind=none", *(setting.replace("text.", "text.qwen.", 1) for setting in named)]


@pytest.fixture(scope="module")
def flow_stores(caption_folder: Path, golden: Any) -> Callable[[str], LatentStore]:
    settings = {"qwen-image-tiny": qwen_settings, "z-image-tiny": z_image_settings, "flux2-tiny": flux2_settings}

    def make(model: str, root: Path) -> None:
        recipe = caption_recipe(
            *settings[model](root), f"vae.model={root / 'vae'}", "vae.dtype=float32", "store.text_dtype=float32"
        )
        encode(recipe, caption_folder, root / "store")

    return lambda model: LatentStore(golden(f"{model}-decoding", lambda root: make(model, root)) / "store")


@pytest.mark.parametrize(
    ("model", "normalise", "class_name"),
    [
        ("qwen-image-tiny", "store", "AutoencoderKLQwenImage"),
        ("qwen-image-tiny", "none", "AutoencoderKLQwenImage"),
        ("z-image-tiny", "encoder", "AutoencoderKL"),  # its config has no shift, which the pipeline adds
    ],
)
def test_other_families_decode_what_the_run_trained_on(
    model: str,
    normalise: str,
    class_name: str,
    flow_stores: Callable[[str], LatentStore],
    leandit: Leandit,
    tmp_path: Path,
) -> None:
    run = trained(model, flow_stores(model), tmp_path / "run", f"latent.normalise={normalise}")
    assert leandit("export", run, "--out", tmp_path / "out", "--encoders").code == 0
    config = check_decoding(model, run, tmp_path / "out", class_name)
    if model == "z-image-tiny":
        assert (config["scaling_factor"], config["shift_factor"]) == (0.5, 0.0)
    else:
        latent = load_snapshot(run, CPU).latent
        np.testing.assert_allclose(config["latents_mean"], latent.shift)
        np.testing.assert_allclose(config["latents_std"], 1 / np.array(latent.scale))


@pytest.mark.parametrize(("normalise", "code"), [("encoder", 0), ("store", 3)])
def test_the_batch_norm_of_flux2_is_all_that_its_pipeline_undoes(
    normalise: str, code: int, flow_stores: Callable[[str], LatentStore], leandit: Leandit, tmp_path: Path
) -> None:
    run = trained("flux2-tiny", flow_stores("flux2-tiny"), tmp_path / "run", f"latent.normalise={normalise}")
    ended = leandit("export", run, "--out", tmp_path / "out", "--encoders")
    assert ended.code == code, ended.err
    assert ("not normalized with the batch norm of the VAE" in ended.err) == (code == 3)


def imported(root: Path, *settings: str) -> LatentStore:
    """A store of noise imported from PixArt's cache, of the VAE and the text encoder in ``root``."""
    save_autoencoder(root / "vae", "kl", **FOUR, latent_channels=4, scaling_factor=0.25)
    listed, rng = [], np.random.default_rng(0)
    for folder in ("img_vae_features", "caption_features"):
        (root / "cache" / folder).mkdir(parents=True)
    for number in range(4):
        np.save(root / f"cache/img_vae_features/{number}.npy", rng.uniform(0.1, 1, (8, 8, 8)).astype(np.float32))
        tokens = rng.standard_normal((1, 5, 64)).astype(np.float32)
        mask = np.ones((1, 5), np.int16)
        np.savez(root / f"cache/caption_features/{number}.npz", caption_feature=tokens, attention_mask=mask)
        listed.append({"path": f"{number}.png", "prompt": f"image {number}", "height": 64, "width": 64, "ratio": 1.0})
    (root / "cache/data_info.json").write_text(json.dumps(listed))
    models = (f"vae.model={root / 'vae'}", "text.model=shipped:t5")
    run_import(Made("pixart", root / "cache", {}, null="zeros"), root / "store", *models, *settings)
    return LatentStore(root / "store")


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        (("vae.scale=[0.25]",), 0.25),
        (("vae.scale=[0.25]", "vae.multiplier=3"), 0.75),
        (("vae.scale=[0.18215]",), 0.18215),
    ],
)
def test_the_scale_of_an_import_is_that_of_the_exported_vae(
    settings: tuple[str, ...], scale: float, leandit: Leandit, tmp_path: Path
) -> None:
    store = imported(tmp_path, *settings)
    run = trained("pixart-tiny", store, tmp_path / "run", "run.global_batch=2")
    weights = tmp_path / "vae/diffusion_pytorch_model.safetensors"
    for variant in ("bf16", "non_ema"):  # the pipeline loads neither
        (tmp_path / f"vae/diffusion_pytorch_model.{variant}.safetensors").write_bytes(weights.read_bytes())
    moved = ("--vae", tmp_path / "vae")
    ended = leandit("export", run, "--out", tmp_path / "out", "--encoders", *moved)
    assert ended.code == 0, ended.err
    assert {path.name for path in (tmp_path / "out/vae").iterdir()} == {"config.json", weights.name}
    assert check_decoding("pixart-tiny", run, tmp_path / "out", "AutoencoderKL")["scaling_factor"] == scale


def test_a_vae_of_images_from_0_to_1_is_refused(leandit: Leandit, tmp_path: Path) -> None:
    store = imported(tmp_path, "vae.scale=[0.25]", "vae.pixels=0..1")
    run = trained("pixart-tiny", store, tmp_path / "run", "run.global_batch=2")
    moved = ("--vae", tmp_path / "vae")
    ended = leandit("export", run, "--out", tmp_path / "out", "--encoders", *moved)
    assert ended.code == 3
    assert "from 0 to 1" in ended.err
