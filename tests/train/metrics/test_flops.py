"""FLOPs counted from the model, and the table of GPUs."""

from __future__ import annotations

import pytest

from leandit.train.metrics.flops import forward_flops, tokens_per_image, train_flops
from leandit.train.metrics.gpus import GPUS, gpu_by_name
from leandit.train.models.spec import AdapterSpec, ModelSpec


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


def test_frozen_weights_cost_two_forwards_and_adapters_three() -> None:
    adapter = AdapterSpec(rank=16, alpha=16, targets=("attn2.to_k", "attn2.to_v"))
    adapted, tokens, width, rank, depth = PIXART.model_copy(update={"adapter": adapter}), 120, 1152, 16, 28
    products = 2 * depth * 2 * tokens * rank * (width + width)  # of A and B, for keys and values
    assert forward_flops(adapted, (64, 64), tokens) - forward_flops(PIXART, (64, 64), tokens) == products
    image_tokens = 32 * 32
    attention = 2 * depth * 2 * width * image_tokens * (image_tokens + tokens)  # to image tokens and to the caption
    frozen = forward_flops(PIXART, (64, 64), tokens) - attention
    assert train_flops(adapted, (64, 64), tokens) == 3 * (attention + products) + 2 * frozen


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
