"""The self-check before a plan: what it tells, what it stops, and what it cannot see."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from harness import InProcessDecoders
from making import CPU, make_class_folder, no_progress, smooth_image
from tiny_autoencoders import save_autoencoder

from leandit.datasets.format.schema import Manifest
from leandit.datasets.revisions.catalog import read_manifest
from leandit.datasets.store import LatentStore
from leandit.errors import EncoderError
from leandit.precompute import pipeline
from leandit.precompute.config import load
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.precompute.planning.self_check import NUM_IMAGES
from leandit.tools.export.compact import compact
from leandit.tools.inspection.store_facts import StoreFacts
from leandit.tools.inspection.store_text import render

LATENT_GAIN = 4.0  # so raw latents deviate by about 2
LATENT_OFFSET = (10.0, -8.0, 20.0)


def honest_autoencoder(folder: Path, **config: Any) -> Path:
    """A KL autoencoder of one pixel a latent, which ``run`` makes the identity."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    numbers = {"latents_mean": list(LATENT_OFFSET), "latents_std": [2.0] * 3, "scaling_factor": 1.0} | config
    return save_autoencoder(folder, "kl", block_out_channels=(8,), **blocks, **numbers)


def encode_images(_: Any, images: torch.Tensor) -> SimpleNamespace:
    latents = LATENT_GAIN * images + torch.tensor(LATENT_OFFSET)[:, None, None]
    return SimpleNamespace(latent_dist=DiagonalGaussianDistribution(torch.cat([latents, 0 * latents - 20], 1)))


def decode_latents(_: Any, latents: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(sample=(latents - torch.tensor(LATENT_OFFSET)[:, None, None]) / LATENT_GAIN)


@dataclass
class Run:
    """A store made of a class folder with an honest autoencoder, and what was said."""

    root: Path
    said: list[str] = field(default_factory=list)

    def go(self, vae: Path, *overrides: str, source: Path | None = None) -> Manifest:
        recipe = load("imagenet-256", [f"vae.model={vae}", "images.resolution=32", "vae.batch_size=8", *overrides])
        where = {"source_path": source or self.root / "train", "store_path": self.root / "store", "device": CPU}
        return pipeline.precompute(recipe, **where, progress=no_progress, say=self.said.append).manifest


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(pipeline, "Decoders", InProcessDecoders)
    monkeypatch.setattr(diffusers.AutoencoderKL, "encode", encode_images)
    monkeypatch.setattr(diffusers.AutoencoderKL, "decode", decode_latents)
    make_class_folder(tmp_path / "train")
    return Run(tmp_path)


def decibels(manifest: Manifest) -> list[float]:
    return [one.psnr_db for one in manifest.self_check.images]


def test_an_honest_autoencoder_passes_and_its_numbers_are_kept(run: Run, tmp_path: Path) -> None:
    vae = honest_autoencoder(tmp_path / "vae")
    manifest = run.go(vae)
    check = manifest.self_check
    assert min(decibels(manifest)) > 35
    assert len(decibels(manifest)) == NUM_IMAGES
    assert np.abs(check.channel_mean).max() < 1
    assert all(0.3 < std < 2 for std in check.channel_std)
    assert not [line for line in run.said if "warning" in line]
    told = [line for line in run.said if line.startswith("self-check: ")]
    assert f"{decibels(manifest)[0]:.1f}, {decibels(manifest)[1]:.1f}" in told[0]
    assert "mean of each channel" in told[1]
    assert "standard deviation of each channel" in told[2]
    # A grown store and a compacted one keep them.
    smooth_image(77).save(tmp_path / "train/n000/9.png")
    grown = run.go(vae)
    assert (grown.revision, grown.self_check) == (2, check)
    compact(tmp_path / "store", tmp_path / "new", progress=no_progress)
    assert read_manifest(tmp_path / "new", 3).self_check == check
    facts = StoreFacts(LatentStore(tmp_path / "store"))
    assert "<- unusual" not in render(facts)
    summary = json.loads(json.dumps(facts.to_json()))["self_check"]
    assert [one["psnr_db"] for one in summary["images"]] == decibels(manifest)
    assert summary["channel_std"] == check.channel_std
    assert f"8 images reconstructed with {summary['median_psnr_db']:.1f} dB PSNR (median)" in render(facts)


@pytest.mark.parametrize(
    ("config", "mean", "std", "words"),
    [
        (
            {"scaling_factor": 8.0},
            0,
            8,
            "expected about 1 (3 of 3 channels are outside 0.2 to 5): check scaling_factor",
        ),
        (
            {"latents_mean": [0.0] * 3},
            np.array(LATENT_OFFSET) / 2,
            1,
            "expected about 0 (3 of 3 channels are beyond 3): check shift_factor, latents_mean",
        ),
    ],
)
def test_a_wrong_normalisation_cancels_in_the_images_and_is_told_by_the_channels(
    config: dict[str, Any], mean: Any, std: float, words: str, run: Run, tmp_path: Path
) -> None:
    manifest = run.go(honest_autoencoder(tmp_path / "vae", **config))
    assert min(decibels(manifest)) > 35
    np.testing.assert_allclose(manifest.self_check.channel_mean, np.broadcast_to(mean, 3), atol=std)
    assert min(manifest.self_check.channel_std) > 0.3 * std
    (warning,) = [line for line in run.said if "warning" in line]
    assert words in warning
    shown = render(StoreFacts(LatentStore(run.root / "store")))  # by the same limits, of all images
    assert shown.count("<- unusual") == 3


def test_pixels_in_another_range_stop_the_run_before_anything_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae, decode = honest_autoencoder(tmp_path / "vae"), ImageEncoder.decode
    monkeypatch.setattr(ImageEncoder, "decode", lambda self, latents, **_: decode(self, latents, zero_to_one=True))
    with pytest.raises(EncoderError) as caught:
        run.go(vae, "vae.min_psnr=20")
    words = str(caught.value)
    assert "expected vae.min_psnr = 20. Nothing was written." in words
    assert "pixels in another range (0 to 1, not -1 to 1)" in words
    assert not (tmp_path / "store").exists() or not list((tmp_path / "store").rglob("plan.json"))
    assert run.go(vae, "vae.min_psnr=5").self_check  # the same command with a lower limit goes on


def test_halves_of_two_models_stop_the_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(_: Any, latents: torch.Tensor) -> SimpleNamespace:
        red, green, blue = decode_latents(_, latents).sample.unbind(1)
        return SimpleNamespace(sample=torch.stack([blue, -green, red], 1))

    monkeypatch.setattr(diffusers.AutoencoderKL, "decode", decode)
    with pytest.raises(EncoderError, match="Encoder and decoder do not belong together"):
        run.go(honest_autoencoder(tmp_path / "vae"))


def test_zero_turns_it_off_and_the_key_is_no_part_of_the_fingerprint(run: Run, tmp_path: Path) -> None:
    vae = honest_autoencoder(tmp_path / "vae")
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
    manifest = run.go(honest_autoencoder(tmp_path / "vae"), "source.max_reject_share=1", source=source)
    assert sorted(one.key for one in manifest.self_check.images) == [f"n000/{i}.png" for i in (0, 2, 3)]  # type: ignore
