"""Every family of autoencoders: the model's input and the decoded image are those of its pipeline in diffusers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.modular_pipelines import modular_pipeline
from diffusers.modular_pipelines.flux.decoders import FluxDecodeStep
from diffusers.modular_pipelines.flux2.decoders import Flux2DecodeStep
from diffusers.modular_pipelines.qwenimage import encoders as qwen
from diffusers.modular_pipelines.qwenimage.decoders import QwenImageDecoderStep
from diffusers.modular_pipelines.stable_diffusion_3.decoders import StableDiffusion3DecodeStep
from diffusers.modular_pipelines.stable_diffusion_xl.decoders import StableDiffusionXLDecodeStep
from diffusers.modular_pipelines.wan import encoders as wan
from diffusers.modular_pipelines.wan.decoders import WanVaeDecoderStep
from making import CPU, set_json, smooth_image
from safetensors.torch import load_file, save_file
from tiny_autoencoders import FAMILIES, random_autoencoder, save_autoencoder
from transformers import SiglipVisionConfig, SiglipVisionModel

from leandit.datasets.batches.latents import denormalise, final_latents
from leandit.errors import EncoderError, RecipeError
from leandit.precompute.config import PrecomputeRecipe, VaeSection
from leandit.precompute.encoders.loading import Encoders, describe_store
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.precompute.run.columns import to_stored

SIDE_PX = 64
Encode = Callable[[Any, torch.Tensor], torch.Tensor]
Decode = Callable[[Any, torch.Tensor], torch.Tensor]


def pixels(count: int = 3) -> np.ndarray:
    return np.stack([np.asarray(smooth_image(i, SIDE_PX, SIDE_PX)) for i in range(count)])


def decode_step(step: Any, name: str = "images") -> Decode:
    """Decoding by a step of the modular pipelines, before pixels are made of its output."""
    unchanged = SimpleNamespace(postprocess=lambda x, **_: x, postprocess_video=lambda x, **_: x)

    def decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
        state = modular_pipeline.PipelineState()
        state.set("latents", latents)
        step()(SimpleNamespace(vae=vae, image_processor=unchanged, video_processor=unchanged), state)
        return state.get(name)

    return decode


def sdxl(vae: Any, image: torch.Tensor) -> torch.Tensor:
    prepare: Any = diffusers.StableDiffusionXLImg2ImgPipeline.prepare_latents
    return prepare(SimpleNamespace(vae=vae), image, None, len(image), 1, torch.float32, CPU, add_noise=False)


def sd3(vae: Any, image: torch.Tensor) -> torch.Tensor:
    clean = SimpleNamespace(scale_noise=lambda latents, timestep, noise: latents)
    prepare: Any = diffusers.StableDiffusion3Img2ImgPipeline.prepare_latents
    return prepare(SimpleNamespace(vae=vae, scheduler=clean), image, None, len(image), 1, torch.float32, CPU)


def flux(vae: Any, image: torch.Tensor) -> torch.Tensor:
    encode: Any = diffusers.FluxKontextPipeline._encode_vae_image
    return encode(SimpleNamespace(vae=vae), image, None)


def flux2(vae: Any, image: torch.Tensor) -> torch.Tensor:
    pipeline: Any = diffusers.Flux2Pipeline
    return pipeline._encode_vae_image(
        SimpleNamespace(vae=vae, _patchify_latents=pipeline._patchify_latents), image, None
    )


def sana(vae: Any, image: torch.Tensor) -> torch.Tensor:
    """As in SanaSprintImg2ImgPipeline, less the sigma_data of its scheduler."""
    return vae.encode(image).latent * vae.config.scaling_factor


def frames(module: Any) -> Encode:
    def encode(vae: Any, image: torch.Tensor) -> torch.Tensor:
        return module.encode_vae_image(image.unsqueeze(2), vae, None, CPU, torch.float32, vae.config.z_dim)[:, :, 0]

    return encode


def decoded_frames(step: Any, name: str = "images") -> Decode:
    decode = decode_step(step, name)

    def run(vae: Any, latents: torch.Tensor) -> torch.Tensor:
        found = decode(vae, latents.unsqueeze(2))
        return found[:, :, 0] if found.ndim == 5 else found

    return run


def zero_to_one(vae: Any, image: torch.Tensor) -> torch.Tensor:
    return vae.encode((image + 1) / 2).latent


def whole_positions(side: int, width: int) -> torch.Tensor:
    """The table of MAE's code for a square of tokens: columns before rows, sine before cosine, zeros for the class."""
    rows, columns = np.divmod(np.arange(side * side), side)
    frequencies = 1.0 / 10000 ** (np.arange(width // 4) / (width // 4))
    angles = [np.outer(places, frequencies) for places in (columns, rows)]
    table = np.concatenate([wave(angle) for angle in angles for wave in (np.sin, np.cos)], axis=1)
    return torch.from_numpy(np.concatenate([np.zeros((1, width)), table])[None]).float()


def decoded_tokens(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """diffusers spreads 16 positions over any grid; the decoder was trained with whole ones, as MAE's."""
    table = vae.decoder.decoder_pos_embed
    table.copy_(whole_positions(latents.shape[2], table.shape[2]))
    return vae.decode(latents).sample * 2 - 1


RAE_OF_16_PX = {"encoder_patch_size": 16, "encoder_input_size": 64}
SD3 = {"latent_channels": 16, "scaling_factor": 1.5305, "shift_factor": 0.0609}
STATISTICS = {"latent_channels": 4, "latents_mean": [1.0, -2.0, 3.0, 0.5], "latents_std": [2.0, 4.0, 0.5, 1.0]}
CASES: dict[str, tuple[str, dict[str, Any], Encode, Decode]] = {
    "sdxl": ("kl", {"scaling_factor": 0.13025}, sdxl, decode_step(StableDiffusionXLDecodeStep)),
    "sdxl, channels": ("kl", STATISTICS, sdxl, decode_step(StableDiffusionXLDecodeStep)),
    "sd3": ("kl", SD3, sd3, decode_step(StableDiffusion3DecodeStep)),
    "flux": ("kl", {"scaling_factor": 0.3611, "shift_factor": 0.1159}, flux, decode_step(FluxDecodeStep)),
    "flux2": ("flux2", {}, flux2, decode_step(Flux2DecodeStep)),
    "tiny": ("tiny", {"scaling_factor": 1.5, "shift_factor": 0.25}, flux, decode_step(FluxDecodeStep)),
    "sana": ("dc", {"scaling_factor": 0.41407}, sana, lambda vae, z: vae.decode(z / vae.config.scaling_factor).sample),
    "qwen": ("qwen", {}, frames(qwen), decoded_frames(QwenImageDecoderStep)),
    "wan": ("wan", {}, frames(wan), decoded_frames(WanVaeDecoderStep, "videos")),
    "wan 2.2": ("wan_patched", {}, frames(wan), decoded_frames(WanVaeDecoderStep, "videos")),
    "rae": ("rae", {"scaling_factor": 0.5}, zero_to_one, decoded_tokens),
    "rae, SigLIP2": ("rae", RAE_OF_16_PX | {"encoder_type": "siglip2"}, zero_to_one, decoded_tokens),
    "rae, MAE": ("rae", RAE_OF_16_PX | {"encoder_type": "mae"}, zero_to_one, decoded_tokens),
}


def test_the_tokens_of_siglip2_are_those_of_transformers(tmp_path: Path) -> None:
    folder = save_autoencoder(tmp_path / "vae", "rae", **RAE_OF_16_PX, encoder_type="siglip2")
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    prefix = "encoder.vision_model."
    layers = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    size = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 16, "image_size": 256}
    siglip = SiglipVisionModel(SiglipVisionConfig(**size)).eval()
    missing, unexpected = siglip.load_state_dict(layers, strict=False)
    assert (set(missing), unexpected) == ({"post_layernorm.weight", "post_layernorm.bias"}, [])  # ones and zeros
    vae = FAMILIES["rae"][0].from_pretrained(folder)
    images = torch.rand(2, 3, 64, 64)
    normalised = (images - vae.encoder_mean) / vae.encoder_std
    with torch.no_grad():
        tokens = siglip(normalised, interpolate_pos_encoding=True).last_hidden_state
        latents = vae.encode(images).latent * torch.tensor(vae.config.latents_std) + torch.tensor(
            vae.config.latents_mean
        )
    torch.testing.assert_close(latents.flatten(2).transpose(1, 2), tokens, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_models_input_and_the_decoded_image_are_those_of_the_pipeline(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, config, encode, decode = CASES[case]
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    model_class, _, downscale = FAMILIES[family]
    vae = model_class.from_pretrained(save_autoencoder(tmp_path / "vae", family, **config)).eval()
    batch = torch.from_numpy(pixels()).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        wanted = encode(vae, batch)

    section = VaeSection(model=str(tmp_path / "vae"), keep="auto")
    encoder = ImageEncoder(section, CPU)
    spec = encoder.latent_spec(section, "float32")
    stored = to_stored(encoder.encode(pixels()), spec, np.arange(3))
    assert stored.shape == (3, spec.stored_channels, SIDE_PX // downscale, SIDE_PX // downscale)
    mean = spec.model_copy(update={"kind": "mean"}) if spec.has_posterior else spec
    latents = final_latents(torch.from_numpy(stored[:, : spec.channels]), mean, None)
    torch.testing.assert_close(latents, wanted, atol=1e-5, rtol=1e-5)
    assert spec.patchify == (2 if family == "flux2" else 1)
    assert ("patchify" in spec.model_dump()) == (family == "flux2")

    with torch.no_grad():
        shown = ((decode(vae, wanted).float().clamp(-1, 1) + 1) * 127.5).permute(0, 2, 3, 1).numpy()
    decoded = encoder.decode(denormalise(latents, spec).numpy())
    assert decoded.shape == pixels().shape
    assert np.abs(decoded - shown).max() < 0.51  # a level is the nearest integer


def test_a_batch_norm_is_read_in_float32_whatever_the_precision_of_the_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leandit.precompute.encoders.vae.arithmetic", lambda dtype, device: dtype)  # as on a GPU
    folder = save_autoencoder(tmp_path / "vae", "flux2")
    bn = random_autoencoder("flux2").bn
    for dtype in ("float32", "bfloat16"):
        section = VaeSection(model=str(folder), dtype=dtype)
        spec = ImageEncoder(section, CPU).latent_spec(section, "float16")
        assert spec.shift == bn.running_mean.tolist()
        np.testing.assert_allclose(spec.scale, 1 / np.sqrt(bn.running_var.double().numpy() + 1e-4), rtol=1e-12)


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("qwen", {"latents_mean": None, "latents_std": None}, r"no 'latents_mean' and 'latents_std'\. Add those"),
        ("wan", {"latents_std": None}, "one of 'latents_mean' and 'latents_std', expected both"),
        ("wan", {"latents_mean": [0.0], "latents_std": [1.0]}, "one for each of 4 channels"),
        ("wan_patched", {"in_channels": 3}, "encodes 3 channels, expected 3"),
        ("flux2", {"patch_size": [1, 1]}, r"patch_size \[1, 1\], expected \[2, 2\]"),
        ("flux2", {"shift_factor": 0.1159}, "has 'shift_factor', which AutoencoderKLFlux2 does not know"),
        ("rae", {"reshape_to_2d": False}, "reshape_to_2d = false, expected true"),
    ],
)
def test_a_config_that_leaves_the_normalisation_open_is_refused(
    family: str, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = save_autoencoder(tmp_path / "vae", family)
    set_json("config.json", **config)(folder)
    with pytest.raises(EncoderError, match=words):
        ImageEncoder(VaeSection(model=str(folder)), CPU)


def test_a_wan_of_patches_and_a_rae_have_no_tiles(tmp_path: Path) -> None:
    for family in ("wan_patched", "rae"):
        folder = save_autoencoder(tmp_path / family, family)
        with pytest.raises(RecipeError, match=r"cannot encode in tiles. Set vae\.tile_px = 0"):
            ImageEncoder(VaeSection(model=str(folder), tile_px=128), CPU)


def test_a_rae_takes_only_the_images_of_its_own_size(tmp_path: Path) -> None:
    encoder = ImageEncoder(VaeSection(model=str(save_autoencoder(tmp_path / "vae", "rae"))), CPU)
    assert (encoder.fixed_side_px, encoder.downscale, encoder.num_channels) == (64, 16, 64)
    recipe = PrecomputeRecipe.model_validate({"images": {"resolution": 64}})
    assert describe_store(recipe, None, Encoders(encoder)).latent.downscale == 16
    wide = PrecomputeRecipe.model_validate({"images": {"crop": "bucket", "buckets": ["64x64", "64x128"]}})
    with pytest.raises(RecipeError, match=r"bucket '64x128': AutoencoderRAE encodes squares of 64 px.*resolution = 64"):
        describe_store(wide, None, Encoders(encoder))


@pytest.mark.parametrize(("input_px", "side_px"), [(56, 64), (224, 256), (448, 512)])
def test_a_rae_of_any_size_decodes_with_the_positions_it_was_trained_with(
    input_px: int, side_px: int, tmp_path: Path
) -> None:
    folder = save_autoencoder(tmp_path / "vae", "rae", encoder_input_size=input_px)
    vae = FAMILIES["rae"][0].from_pretrained(folder).eval()
    encoder = ImageEncoder(VaeSection(model=str(folder)), CPU)
    image = np.random.default_rng(0).integers(0, 256, (1, side_px, side_px, 3), np.uint8)
    latents = encoder.encode(image)
    with torch.no_grad():
        by_diffusers = vae.decode(torch.from_numpy(latents)).sample
        shown = (decoded_tokens(vae, torch.from_numpy(latents)) + 1) / 2
    assert torch.allclose(by_diffusers, shown, atol=1e-4) == (side_px == 256)  # 16 x 16 tokens, where both agree
    decoded = encoder.decode(latents)
    wanted = (shown.clamp(0, 1) * 255).permute(0, 2, 3, 1).numpy()
    assert np.abs(decoded - wanted).max() < 0.51  # a level is the nearest integer


def test_a_rae_takes_the_decoder_positions_of_its_file(tmp_path: Path) -> None:
    folder = save_autoencoder(tmp_path / "vae", "rae")
    path = folder / "diffusion_pytorch_model.safetensors"
    encoder = ImageEncoder(VaeSection(model=str(folder)), CPU)
    latents = encoder.encode(np.zeros((1, 64, 64, 3), np.uint8))
    before = encoder.decode(latents)
    positions = "decoder.decoder_pos_embed"
    save_file(load_file(path) | {positions: whole_positions(4, 32)}, path)
    assert np.array_equal(ImageEncoder(VaeSection(model=str(folder)), CPU).decode(latents), before)
    save_file(load_file(path) | {positions: whole_positions(4, 32).flip(1)}, path)
    assert not np.array_equal(ImageEncoder(VaeSection(model=str(folder)), CPU).decode(latents), before)
    save_file(load_file(path) | {positions: whole_positions(8, 32)}, path)
    with pytest.raises(EncoderError, match=r"decoder positions of shape \(1, 65, 32\).*needs \(1, 17, 32\)"):
        ImageEncoder(VaeSection(model=str(folder)), CPU)


@pytest.mark.parametrize("size", [(2, 2), (8, 8), (8, 4)], ids=str)
def test_a_rae_decodes_no_latents_of_another_size(size: tuple[int, int], tmp_path: Path) -> None:
    encoder = ImageEncoder(VaeSection(model=str(save_autoencoder(tmp_path / "vae", "rae"))), CPU)
    with pytest.raises(RecipeError, match=rf"squares of 64 px alone, got {16 * size[0]}x{16 * size[1]}"):
        encoder.decode(np.zeros((1, 64, *size), np.float32))
