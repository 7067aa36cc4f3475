"""FLOPs counted from the model, and the table of GPUs."""

from __future__ import annotations

import pytest

from leandit.train.metrics.flops import forward_flops, tokens_per_image, train_flops
from leandit.train.metrics.gpus import GPUS, gpu_by_name
from leandit.train.models.spec import ModelSpec, ProjectorSpec


def dit(name: str) -> ModelSpec:
    return ModelSpec(name=name, channels=4, out_channels=8, num_classes=1000, caption_width=0, base_size=32)


PIXART = ModelSpec(name="pixart-sigma", channels=4, out_channels=8, num_classes=0, caption_width=4096, base_size=64)


GMACS = {("DiT-XL/2", 32): 118.6, ("DiT-XL/2", 64): 524.5, ("DiT-B/2", 32): 23.0, ("DiT-S/2", 32): 6.1}


def test_the_flops_are_twice_the_macs_of_the_papers_and_count_captions() -> None:
    for (name, side), gmac in GMACS.items():
        assert forward_flops(dit(name), (side, side)) / 2e9 == pytest.approx(gmac, abs=0.06)
    spec = dit("DiT-B/4")
    assert train_flops(spec, (32, 64)) == 3 * forward_flops(spec, (32, 64))
    assert tokens_per_image(spec, (32, 64)) == 128
    for tokens, gmac in ((300, 644.3), (120, 618.0)):
        assert forward_flops(PIXART, (64, 64), tokens) / 2e9 == pytest.approx(gmac, rel=0.002)


def test_the_captions_of_z_image_count_at_its_published_size() -> None:
    """Those of 512 tokens beyond those of 32, with 4,096 of the image: matrices and attention."""
    spec = ModelSpec(name="z-image", channels=16, out_channels=16, num_classes=0, caption_width=2560, base_size=128)
    width, hidden, depth, refiners = 3840, 10240, 30, 2
    matrices = 4 * width * width + 3 * width * hidden  # of a block
    image, text, least = 4096, 512, 32
    joined = depth * ((text - least) * matrices + 2 * width * ((image + text) ** 2 - (image + least) ** 2))
    of_text = refiners * ((text - least) * matrices + 2 * width * (text**2 - least**2))
    more = joined + of_text + (text - least) * width * (2560 + 4 * 16)  # and in embedder and final layer
    assert forward_flops(spec, (128, 128), 512) - forward_flops(spec, (128, 128), 32) == 2 * more


def test_projectors_count_in_training_alone() -> None:
    plain = dit("DiT-S/2")
    aligned = plain.model_copy(update={"projectors": {"dinov2": ProjectorSpec(block=4, width=2048, feature_width=768)}})
    projector = 2 * 256 * (384 * 2048 + 2048 * 2048 + 2048 * 768)  # for 256 tokens
    assert forward_flops(aligned, (32, 32)) == forward_flops(plain, (32, 32))
    assert train_flops(aligned, (32, 32)) - train_flops(plain, (32, 32)) == 3 * projector


DRIVERS = {
    "H200": "NVIDIA H200",
    "H100": "NVIDIA H100 80GB HBM3",
    "H100-PCIe": "NVIDIA H100 PCIe",
    "A100-40": "NVIDIA A100-SXM4-40GB",
    "A100-80": "NVIDIA A100 80GB PCIe",
    "A10": "NVIDIA A10",
    "A10G": "NVIDIA A10G",
    "L4": "NVIDIA L4",
    "V100": "Tesla V100-SXM2-16GB",
    "RTX-4090": "NVIDIA GeForce RTX 4090",
}


def test_every_gpu_is_found_by_its_own_name_and_that_of_its_driver_and_others_are_not() -> None:
    assert [gpu and gpu.name for gpu in map(gpu_by_name, DRIVERS.values())] == list(DRIVERS)
    assert [gpu_by_name(gpu.name) for gpu in GPUS] == list(GPUS)
    assert gpu_by_name("NVIDIA GeForce GTX 1080") is None
    for other in ("RTX 4090 Laptop GPU", "RTX 4090 D", "RTX 3090 Ti", "H200 MIG 1g.18gb"):
        assert gpu_by_name(f"NVIDIA GeForce {other}") is None
    rates = {gpu.name: gpu.peak_flops("bf16") for gpu in GPUS}
    assert (rates["V100"], rates["H200"]) == (0, 989.4e12)
