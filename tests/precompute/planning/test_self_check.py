"""The self-check before a plan: what it tells, what it stops, and what it cannot see."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from harness import InProcessDecoders
from making import CPU, make_class_folder, no_progress, smooth_image

from leandit.datasets.errors import EncoderError
from leandit.datasets.format.schema import Manifest
from leandit.datasets.maintenance.compact import compact
from leandit.datasets.revisions.catalog import read_manifest
from leandit.datasets.revisions.plan import read_plan
from leandit.datasets.store import LatentStore
from leandit.precompute import pipeline
from leandit.precompute.config import PrecomputeRecipe, load
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.precompute.planning.self_check import NUM_IMAGES, checked_positions
from leandit.tools.inspection.store_facts import StoreFacts
from leandit.tools.inspection.store_text import render

LATENT_GAIN = 4.0  # so raw latents deviate by about 2
LATENT_OFFSET = (10.0, -8.0, 20.0)
WIDTH = 8
STATISTICS = {"latents_mean": list(LATENT_OFFSET), "latents_std": [2.0, 2.0, 2.0]}
FLAT: dict[str, Any] = {
    "block_out_channels": (WIDTH,),
    "down_block_types": ("DownEncoderBlock2D",),
    "up_block_types": ("UpDecoderBlock2D",),
    "layers_per_block": 1,
    "norm_num_groups": 1,
    "latent_channels": 3,
    "mid_block_add_attention": False,
}
FRAMES: dict[str, Any] = {
    "base_dim": WIDTH,
    "z_dim": 3,
    "dim_mult": [1],
    "num_res_blocks": 1,
    "temperal_downsample": [],
    **STATISTICS,
}
HONEST: dict[str, tuple[Any, dict[str, Any]]] = {
    "kl": (diffusers.AutoencoderKL, FLAT | STATISTICS | {"scaling_factor": 1.0}),
    "flux2": (diffusers.AutoencoderKLFlux2, FLAT),
    "qwen": (diffusers.AutoencoderKLQwenImage, FRAMES),
    "wan": (diffusers.AutoencoderKLWan, FRAMES | {"scale_factor_spatial": 1}),
}
CONSTANT = 1000.0  # in two channels before the norm, which then divides by it
LINEAR = 20.0  # the SiLU is the identity near it


def honest_autoencoder(family: str, **config: Any) -> Any:
    """The autoencoder of a family; ``config`` replaces keys after the weights are constructed."""
    model_class, base = HONEST[family]
    model = model_class(**base).eval()
    gains, offsets = torch.full((3,), LATENT_GAIN), torch.tensor(LATENT_OFFSET)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.split(".")[-2] in ("conv2", "proj"):  # ends of residual branches
                parameter.zero_()
        _construct(model.encoder, torch.ones(3), torch.zeros(3), gains, offsets)
        _construct(model.decoder, 1 / gains, -offsets / gains, torch.ones(3), torch.zeros(3))
        for conv in (model.quant_conv, model.post_quant_conv):
            _affine(conv, torch.ones(len(conv.bias)), torch.zeros(len(conv.bias)))
        if hasattr(model, "bn"):
            model.bn.running_mean.copy_(offsets.repeat_interleave(4))
            model.bn.running_var.fill_(4.0)
    model.register_to_config(**config)
    return model


def save_honest(folder: Path, family: str, **config: Any) -> Path:
    """Save ``honest_autoencoder`` as a folder."""
    honest_autoencoder(family, **config).save_pretrained(folder)
    return folder


def _construct(half: Any, *affine: torch.Tensor) -> None:
    """Make an encoder or a decoder two affine maps of its first three channels; a log-variance is -20.

    Args:
      affine: gains and offsets of the first convolution, then of the last.
    """
    gains, offsets, last_gains, last_offsets = affine
    constants = torch.tensor([CONSTANT, -CONSTANT])
    norm = half.conv_norm_out if hasattr(half, "conv_norm_out") else half.norm_out
    if isinstance(norm, torch.nn.GroupNorm):  # the negatives keep its mean at 0
        _affine(half.conv_in, torch.cat([gains, -gains]), torch.cat([offsets, -offsets, constants]))
        norm.weight.fill_(CONSTANT * (2 / WIDTH) ** 0.5)
        norm.bias.fill_(LINEAR)
    else:  # root mean square of the channels, without a bias of its own
        _affine(half.conv_in, gains, torch.cat([offsets + LINEAR, torch.zeros(3), constants]))
        norm.gamma.fill_(float((2 * CONSTANT**2 + 3 * LINEAR**2) ** 0.5 / WIDTH**0.5))
    biases = torch.full_like(half.conv_out.bias, -20.0)
    biases[:3] = last_offsets - last_gains * LINEAR
    _affine(half.conv_out, last_gains, biases)


def _affine(conv: Any, gains: torch.Tensor, offsets: torch.Tensor) -> None:
    """Make a convolution gain * channel + offset, channels in turn; of frames only the newest counts."""
    conv.weight.zero_()
    middle = [size // 2 for size in conv.weight.shape[2:]]
    if len(middle) == 3:
        middle[0] = conv.weight.shape[2] - 1
    for channel, gain in enumerate(gains):
        conv.weight[(channel, channel % conv.weight.shape[1], *middle)] = gain
    conv.bias.copy_(offsets)


@dataclass
class Run:
    """A store made of a class folder with an honest autoencoder, and what was said."""

    root: Path
    said: list[str] = field(default_factory=list)

    def go(self, vae: Path, *overrides: str, source: Path | None = None) -> Manifest:
        settings = [f"vae.model={vae}", "images.resolution=32", "vae.batch_size=8", *overrides]
        recipe: PrecomputeRecipe = load("imagenet-256", settings)
        report = pipeline.precompute(
            recipe,
            source_path=source or self.root / "train",
            store_path=self.root / "store",
            device=CPU,
            progress=no_progress,
            say=self.said.append,
        )
        assert report.manifest
        return report.manifest


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(pipeline, "Decoders", InProcessDecoders)
    monkeypatch.setattr("leandit.precompute.encoders.vae.PROBE_PX", 32)  # their attention sees every pixel
    make_class_folder(tmp_path / "train")
    return Run(tmp_path)


def decibels(manifest: Manifest) -> list[float]:
    assert manifest.self_check
    return [one.psnr_db for one in manifest.self_check.images]


@pytest.mark.parametrize("family", HONEST)
def test_an_honest_autoencoder_of_each_family_passes(family: str, run: Run, tmp_path: Path) -> None:
    manifest = run.go(save_honest(tmp_path / "vae", family))
    assert min(decibels(manifest)) > 35
    assert len(decibels(manifest)) == NUM_IMAGES
    check = manifest.self_check
    assert check
    channels = LatentStore(tmp_path / "store").spec.latent.channels
    assert len(check.channel_mean) == len(check.channel_std) == channels == (12 if family == "flux2" else 3)
    assert np.abs(check.channel_mean).max() < 1
    assert all(0.3 < std < 2 for std in check.channel_std)
    assert not [line for line in run.said if "warning" in line]
    told = [line for line in run.said if line.startswith("self-check: ")]
    assert f"{decibels(manifest)[0]:.1f}, {decibels(manifest)[1]:.1f}" in told[0]
    assert "mean of each channel" in told[1]
    assert "deviation of each channel" in told[2]


@pytest.mark.parametrize(("family", "config"), [("kl", {"scaling_factor": 8.0}), ("qwen", {"latents_std": [0.1] * 3})])
def test_a_wrong_scale_cancels_in_the_images_and_is_told_by_the_deviations(
    family: str, config: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    manifest = run.go(save_honest(tmp_path / "vae", family, **config))
    assert min(decibels(manifest)) > 35
    assert manifest.self_check
    assert min(manifest.self_check.channel_std) > 5
    (warning,) = [line for line in run.said if "warning" in line]
    assert "expected about 1 (3 of 3 channels are outside 0.2 to 5): check scaling_factor" in warning


@pytest.mark.parametrize("family", ["kl", "wan"])
def test_a_wrong_shift_cancels_in_the_images_and_is_told_by_the_means(family: str, run: Run, tmp_path: Path) -> None:
    manifest = run.go(save_honest(tmp_path / "vae", family, latents_mean=[0.0] * 3))
    assert min(decibels(manifest)) > 35
    assert manifest.self_check
    np.testing.assert_allclose(manifest.self_check.channel_mean, np.array(LATENT_OFFSET) / 2, atol=1)
    (warning,) = [line for line in run.said if "warning" in line]
    assert "expected about 0 (3 of 3 channels are beyond 3): check shift_factor, latents_mean" in warning


def with_pixels_of(zero_to_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder gives pixels in another range than its family says."""
    original = ImageEncoder.decode
    monkeypatch.setattr(
        ImageEncoder, "decode", lambda self, latents, **_: original(self, latents, zero_to_one=zero_to_one)
    )


def test_pixels_in_another_range_stop_the_run_before_anything_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = save_honest(tmp_path / "vae", "kl")
    with_pixels_of(True, monkeypatch)
    with pytest.raises(EncoderError) as caught:
        run.go(vae, "vae.min_psnr=20")
    words = str(caught.value)
    assert "expected vae.min_psnr = 20. Nothing was written." in words
    assert "pixels in another range (0 to 1, not -1 to 1)" in words
    assert not (tmp_path / "store").exists() or not list((tmp_path / "store").rglob("plan.json"))
    assert run.go(vae, "vae.min_psnr=5").self_check  # the same command with a lower limit goes on


def test_halves_of_two_models_stop_the_run(run: Run, tmp_path: Path) -> None:
    model = honest_autoencoder("kl")
    with torch.no_grad():
        model.decoder.conv_out.weight[:] = model.decoder.conv_out.weight.flip(0)  # blue, green, red
        model.decoder.conv_out.weight[1] *= -1
    model.save_pretrained(tmp_path / "vae")
    with pytest.raises(EncoderError, match="Encoder and decoder do not belong together"):
        run.go(tmp_path / "vae")


def test_zero_turns_it_off_and_the_key_is_no_part_of_the_fingerprint(run: Run, tmp_path: Path) -> None:
    vae = save_honest(tmp_path / "vae", "kl")
    manifest = run.go(vae, "vae.min_psnr=0")
    assert manifest.self_check is None
    assert "self_check" not in json.loads((tmp_path / "store/revisions/000001/manifest.json").read_bytes())
    assert not run.said
    again = run.go(vae)
    assert (again.fingerprint, again.root_hash) == (manifest.fingerprint, manifest.root_hash)


def test_fewer_images_are_checked_where_there_are_fewer_or_some_do_not_decode(run: Run, tmp_path: Path) -> None:
    source = make_class_folder(tmp_path / "few", classes=1, per_class=4)
    whole = (source / "n000/1.png").read_bytes()
    (source / "n000/1.png").write_bytes(whole[: len(whole) // 2])
    manifest = run.go(save_honest(tmp_path / "vae", "kl"), "source.max_reject_share=1", source=source)
    assert sorted(one.key for one in manifest.self_check.images) == [f"n000/{i}.png" for i in (0, 2, 3)]  # type: ignore


def test_the_choice_depends_on_the_keys_alone(run: Run, tmp_path: Path) -> None:
    vae = save_honest(tmp_path / "vae", "kl")
    first = run.go(vae)
    plan = read_plan(tmp_path / "store", 1)
    keys = [plan.records["key"][i].as_py() for i in list(checked_positions(plan))[:NUM_IMAGES]]
    assert first.self_check
    assert [one.key for one in first.self_check.images] == keys
    other = Run(tmp_path / "other")
    other.root.mkdir()
    (other.root / "train").symlink_to(tmp_path / "train")
    assert other.go(vae).self_check == first.self_check


def test_a_grown_and_a_compacted_store_keep_it_and_one_that_starts_over_makes_its_own(run: Run, tmp_path: Path) -> None:
    vae = save_honest(tmp_path / "vae", "kl")
    first = run.go(vae)
    smooth_image(77).save(tmp_path / "train/n000/9.png")
    grown = run.go(vae)
    assert (grown.revision, grown.self_check) == (2, first.self_check)
    compact(tmp_path / "store", tmp_path / "new", progress=no_progress)
    assert read_manifest(tmp_path / "new", 3).self_check == first.self_check

    store = LatentStore(tmp_path / "store")
    facts = StoreFacts(store)
    summary = facts.to_json()
    assert [one["psnr_db"] for one in summary["self_check"]["images"]] == decibels(first)
    assert json.loads(json.dumps(summary))["self_check"]["channel_std"] == first.self_check.channel_std  # type: ignore
    median = summary["self_check"]["median_psnr_db"]
    assert f"8 images came back from the VAE with {median:.1f} dB PSNR (median)" in render(facts)
