"""The compiled VAE encoder: a graph for each shape, none eager in silence, and a store that says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from making import CPU, encode, label_recipe
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from leandit.datasets.errors import RecipeError, ResourceError
from leandit.precompute.config import VaeSection
from leandit.precompute.encoders import compiled
from leandit.precompute.encoders.vae import ImageEncoder

SHAPES = [(16, 16 + 8 * i) for i in range(11)]  # dynamo's own limit is eight


@pytest.fixture
def section(tmp_path: Path) -> VaeSection:
    """A recipe's section with a VAE that compiles in a second."""
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=2, mid_block_add_attention=False
    ).save_pretrained(tmp_path / "vae")
    return VaeSection(model=str(tmp_path / "vae"), batch_size=4, compile=True)


@pytest.fixture
def _traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made and kept as always, but run by torch: no C++ compiler, no minutes."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch.compiler.reset()


def images(count: int, height_px: int, width_px: int) -> np.ndarray:
    return np.random.default_rng(width_px).integers(0, 256, (count, height_px, width_px, 3), np.uint8)


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("_traced")
def test_every_shape_has_its_graph_and_none_falls_back(section: VaeSection) -> None:
    plain, encoder = ImageEncoder(section.model_copy(update={"compile": False}), CPU), ImageEncoder(section, CPU)
    before = num_graphs()
    for count, _ in enumerate(SHAPES, 1):
        size = SHAPES[count - 1]
        moments = encoder.encode(images(4, *size))
        np.testing.assert_allclose(moments, plain.encode(images(4, *size)), rtol=1e-4, atol=1e-5)
        assert num_graphs() - before == count
    for size in SHAPES:  # again: all of them are there, and the last rows of a shard need none of their own
        assert np.array_equal(encoder.encode(images(4, *size)), encoder.encode(images(4, *size)))
        last = encoder.encode(images(4, *size)[:3])
        assert len(last) == 3
        np.testing.assert_allclose(last, plain.encode(images(4, *size)[:3]), rtol=1e-4, atol=1e-5)
    encoder.encode_in_float32(images(1, 24, 24))
    assert num_graphs() - before == len(SHAPES)
    assert not counters["graph_break"]


@pytest.mark.usefixtures("_traced")
def test_what_would_run_eagerly_is_an_error(section: VaeSection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MAX_SHAPES", 2)
    encoder = ImageEncoder(section, CPU)
    for size in SHAPES[:2]:
        encoder.encode(images(1, *size))
    with pytest.raises(RecipeError, match=r"vae\.compile: the encoder cannot be compiled.*vae\.compile = false"):
        encoder.encode(images(1, *SHAPES[2]))


def test_without_a_compiler_the_error_says_what_to_install(section: VaeSection) -> None:
    torch.compiler.reset()
    message = r"vae\.compile: torch cannot compile here.*g\+\+.*vae\.compile = false"
    # By its own patch: pytest's would leave a key that is an alias hidden from all later tests of this process.
    changes = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    with inductor_config.patch(changes), pytest.raises(ResourceError, match=message):
        ImageEncoder(section, CPU).encode(images(1, 16, 16))


@pytest.mark.usefixtures("_traced")
def test_a_compiled_store_says_so_and_others_keep_their_fingerprint(class_folder: Path, tmp_path: Path) -> None:
    found = {}
    for name in ("false", "true"):
        report = encode(label_recipe(f"vae.compile={name}"), class_folder, tmp_path / name)
        assert report.manifest is not None
        found[name] = report.manifest
    specs = {
        name: ImageEncoder(label_recipe(f"vae.compile={name}").vae, CPU).latent_spec(
            label_recipe(f"vae.compile={name}").vae, "float16"
        )
        for name in found
    }
    assert "compiled" not in specs["false"].model_dump()
    assert specs["true"].model_dump()["compiled"] is True
    assert found["false"].fingerprint != found["true"].fingerprint


@pytest.mark.slow
def test_inductor_gives_the_same_numbers_each_time(section: VaeSection) -> None:
    torch.compiler.reset()
    encoder = ImageEncoder(section, CPU)
    plain = ImageEncoder(section.model_copy(update={"compile": False}), CPU)
    pixels = images(4, 16, 24)
    first = encoder.encode(pixels)
    assert np.array_equal(first, encoder.encode(pixels))
    np.testing.assert_allclose(first, plain.encode(pixels), rtol=1e-3, atol=1e-5)
