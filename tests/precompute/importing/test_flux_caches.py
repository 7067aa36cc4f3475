"""Imports of caches for Flux and its like: MLPerf's set, and NeMo AutoModel's files."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from features import COUNT, SIDE, assert_holds, imported, make_mlperf_flux, make_nemo, noise, rejects, run_import

from leandit.datasets.batches.latents import denormalise, final_latents
from leandit.datasets.store import LatentStore
from leandit.precompute.config import load as load_precompute
from leandit.tools.inspection.store_facts import StoreFacts
from leandit.tools.inspection.store_text import render


def test_the_set_of_mlperf_becomes_a_store_like_that_of_the_flux_recipe(tmp_path: Path) -> None:
    store, recipe = imported(tmp_path, make_mlperf_flux)[1], load_precompute("flux1-1024", [])
    assert store.texts == list(recipe.text)
    for one in store.spec.text_encoders:
        section, spec = recipe.text[one.name], one.spec
        said = (section.output, section.full_length, section.attend_padding)
        assert (spec.output, spec.full_length, spec.attend_padding) == said
        assert (spec.kind, spec.dtype) == ("imported", "bfloat16")
    assert (store.text("t5").spec.max_tokens, store.text("clip").spec.max_tokens) == (6, 77)
    assert store.captions.num_rows == 7  # the others have the same embeddings
    rendered = render(StoreFacts(store))
    assert "distinct captions   7, 7 tokens" in rendered
    assert "clip encoder        imported:mlperf-flux 'openai/clip-vit-large-patch14'" in rendered
    assert "captions t5         tokens, 16 wide, stored as bfloat16, all 6 tokens" in rendered


def test_captions_of_mlperf_are_named_by_a_column_or_by_their_record(tmp_path: Path) -> None:
    texts = [f"an image of {i % 5} things" for i in range(COUNT - 1)]
    columns, settings = {"txt": [*texts, None], "timestep": [0] * COUNT}, ("layout.text=txt", "store.text_dtype=int8")
    made, store = imported(tmp_path, make_mlperf_flux, *settings, "source.max_reject_share=1", columns=columns)
    assert (store.text("t5").spec.dtype, store.text("clip").pooled.dtype) == ("int8", "float16")
    captions = store.captions.to_pylist()
    assert all(0.999 < row["min_cosine_t5"] <= 1 and 0 < row["max_error_t5"] < 0.05 for row in captions)
    assert store.captions["text"].to_pylist() == list(dict.fromkeys(texts))
    assert rejects(store) == {f"{COUNT - 1:09d}": ("scan", "no_caption")}
    run_import(made, tmp_path / "unread", "text.check=mask")
    assert LatentStore(tmp_path / "unread").captions["text"].to_pylist() == [
        f"caption of {i:09d}" for i in range(COUNT)
    ]


@pytest.mark.parametrize(("model", "recipe"), [("flux", "flux1-1024"), ("qwen_image", "qwen-image-1024")])
def test_a_cache_of_nemo_becomes_a_store_like_that_of_the_recipe(model: str, recipe: str, tmp_path: Path) -> None:
    (made, store), texts = imported(tmp_path, make_nemo, model=model), load_precompute(recipe, []).text
    assert_holds(store, made.records)
    assert store.buckets == {"64x64": 4, "32x96": 4, "96x32": 3}
    latent = store.spec.latent
    assert (latent.kind, latent.channels, latent.downscale, latent.dtype) == ("sample", 16, 8, "float16")
    assert store.spec.vae.model == "someone/a-model"
    assert store.texts == list(texts)
    for one in store.spec.text_encoders:
        said = (texts[one.name].output, texts[one.name].full_length, texts[one.name].attend_padding)
        assert (one.spec.output, one.spec.full_length, one.spec.attend_padding) == said
        assert one.spec.dtype == "bfloat16"
    rows = torch.from_numpy(noise(3, 2, 16, SIDE, SIDE))
    np.testing.assert_array_equal(final_latents(rows, latent, None), rows)
    vae = AutoencoderKLQwenImage if model == "qwen_image" else None
    defaults = inspect.signature(vae).parameters if vae else {}
    shift = torch.tensor(defaults["latents_mean"].default if vae else [0.1159] * 16)[:, None, None]
    std = torch.tensor(defaults["latents_std"].default if vae else [1 / 0.3611] * 16)[:, None, None]
    np.testing.assert_allclose(denormalise(rows, latent), rows * std + shift, rtol=1e-5, atol=1e-6)


def test_a_cache_of_flux_2_has_the_batch_norm_of_the_command(tmp_path: Path) -> None:
    shift, scale = [i / 128 for i in range(128)], [1 + i / 128 for i in range(128)]
    made, store = imported(tmp_path, make_nemo, f"vae.shift={shift}", f"vae.scale={scale}", model="flux2")
    assert_holds(store, made.records)
    latent = store.spec.latent
    assert (latent.kind, latent.channels, latent.downscale, latent.patchify) == ("mean", 128, 16, 2)
    assert latent.decoding
    assert (latent.decoding.shift, latent.decoding.scale) == (shift, scale)
