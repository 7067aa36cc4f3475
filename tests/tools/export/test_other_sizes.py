"""Weights of one resolution, trained on at another: exports draw at the new one, with the positions they learned."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from features import Made, run_import
from loaded import forward, load_transformer
from making import CPU, Leandit, train_recipe
from noise_store import make_store
from runs import run_to
from safetensors.torch import load_file

from leandit.datasets.batches.captions import Captions
from leandit.datasets.store import LatentStore
from leandit.tools.export.export import export, transformer_of
from leandit.train.models.build import build_model, diffusers_config, transformer_class
from leandit.train.models.conditioning import Conditioning
from leandit.train.models.layers import position_table
from leandit.train.models.spec import ModelSpec
from leandit.train.run.fit import model_spec
from leandit.train.sampling.snapshot import load_snapshot
from leandit.train.weights.init_from import initial_weights

pytestmark = pytest.mark.usefixtures("tiny_models")
WIDTH = 64


def captioned_store(root: Path, resolution_px: int, *, count: int = 8) -> LatentStore:
    """A store of noise with captions of a T5, imported from a cache of PixArt's."""
    side, rng, listed = resolution_px // 8, np.random.default_rng(0), []
    for folder in ("img_vae_features", "caption_features"):
        (root / "cache" / folder).mkdir(parents=True)
    for number in range(count):
        moments = np.concatenate([rng.standard_normal((4, side, side)), np.full((4, side, side), 0.1)])
        np.save(root / f"cache/img_vae_features/{number}.npy", moments.astype(np.float32))
        tokens, mask = rng.standard_normal((1, 5, WIDTH)), np.ones((1, 5), np.int16)
        captions = root / f"cache/caption_features/{number}.npz"
        np.savez(captions, caption_feature=tokens.astype(np.float32), attention_mask=mask)
        sizes = {"height": resolution_px, "width": resolution_px, "ratio": 1.0}
        listed.append({"path": f"{number}.png", "prompt": f"image {number}"} | sizes)
    (root / "cache/data_info.json").write_text(json.dumps(listed))
    run_import(Made("pixart", root / "cache", {}, null="zeros"), root / "store")
    return LatentStore(root / "store")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, LatentStore]:
    """Captioned stores by their resolution."""
    root = tmp_path_factory.mktemp("stores")
    return {px: captioned_store(root / str(px), px) for px in (64, 128, 256)}


@pytest.fixture(scope="module")
def label_stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, LatentStore]:
    """Labelled stores by their resolution."""
    root = tmp_path_factory.mktemp("stores")
    for px in (64, 128):
        make_store(root / str(px), {f"{px}x{px}": 8}, resolution_px=px, num_classes=3)
    return {px: LatentStore(root / str(px)) for px in (64, 128)}


def published(folder: Path, family: str, side: int, **changes: Any) -> Path:
    """Random weights of a small model in diffusers' layout, of a resolution of ``side`` latent pixels."""
    sizes: Any = {"channels": 4, "out_channels": 4, "num_classes": 0, "caption_width": WIDTH, "base_size": side}
    torch.manual_seed(0)
    config = diffusers_config(ModelSpec(name=f"{family}-tiny", **sizes)) | {"sample_size": side} | changes
    model = transformer_class(family)(**config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / "transformer")
    return folder


@pytest.mark.parametrize("px", [64, 256], ids=["smaller", "larger"])
@pytest.mark.parametrize(
    ("family", "scale", "exported"),
    [
        ("pixart", None, {64: 0.5, 256: 2.0}),  # None: 1 up to a side of 64
        ("pixart", 2.0, {64: 1.0, 256: 4.0}),
        ("sana", None, {64: None, 256: None}),  # no positions are added
        ("sana", 1.0, {64: 0.5, 256: 2.0}),
    ],
)
def test_a_pipeline_draws_at_the_size_that_was_trained_with_the_positions_that_were_learned(
    px: int, family: str, scale: float | None, exported: Any, stores: dict[int, LatentStore], tmp_path: Path
) -> None:
    base = published(tmp_path / "base", family, 16, interpolation_scale=scale)
    run_to(train_recipe(f"{family}-tiny", f"model.init_from={base}", "run.steps=1"), stores[px], tmp_path / "run")
    made = export(tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out/transformer/config.json").read_text())
    assert (config["sample_size"], config["interpolation_scale"]) == (px // 8, exported[px])
    assert any("use_resolution_binning=False" in note for note in made["notes"]) == (px == 64)
    assert any(f"pass height={px}, width={px}" in note for note in made["notes"]) == (family == "sana")
    snapshot = load_snapshot(tmp_path / "run", CPU)
    name = "PixArtTransformer2DModel" if family == "pixart" else "SanaTransformer2DModel"
    theirs = load_transformer(name, tmp_path / "out")
    tokens = torch.randn((7, WIDTH), generator=torch.Generator().manual_seed(1))
    given, t = Conditioning(captions=Captions.packed(tokens, [4, 3])), torch.tensor([100.0, 900.0])
    for size in ((px // 8, px // 8), (16, 16), (8, 12)):
        x = torch.randn((2, 4, *size), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            expected = snapshot.model(x, t, given)
        assert expected.std() > 1e-2
        torch.testing.assert_close(forward(theirs, x, t, given), expected, rtol=1e-4, atol=1e-5)
    recipe = train_recipe(f"{family}-tiny", f"model.init_from={tmp_path / 'out'}")
    again = build_model(model_spec(recipe, stores[px].spec, "store"), seed=0).eval()
    again.load_state_dict(initial_weights(str(tmp_path / "out"), again, snapshot.spec)[0])
    with torch.no_grad():
        torch.testing.assert_close(again(x, t, given), expected, rtol=1e-4, atol=1e-5)


def test_pixart_of_256_px_trained_on_512_px_is_drawn_at_512_px(tmp_path: Path) -> None:
    store = captioned_store(tmp_path, 512, count=2)
    base = published(tmp_path / "base", "pixart", 32, num_layers=1)
    recipe = train_recipe("pixart-tiny", f"model.init_from={base}", "run.steps=1", "run.global_batch=1")
    run_to(recipe, store, tmp_path / "run")
    made = export(tmp_path / "run", tmp_path / "out")
    assert not any("use_resolution_binning" in note for note in made["notes"])
    transformer = load_transformer("PixArtTransformer2DModel", tmp_path / "out")
    scheduler = DPMSolverMultistepScheduler.from_pretrained(tmp_path / "out/scheduler")
    parts: Any = {"vae": None, "text_encoder": None, "tokenizer": None}
    pipeline = PixArtSigmaPipeline(transformer=transformer, scheduler=scheduler, **parts)
    pipeline.set_progress_bar_config(disable=True)
    tokens, mask = torch.randn(1, 5, WIDTH), torch.ones(1, 5)
    prompts: Any = {"prompt_embeds": tokens, "prompt_attention_mask": mask, "guidance_scale": 1.0}
    drawn = pipeline(**prompts, negative_prompt=None, num_inference_steps=1, output_type="latent").images
    assert drawn.shape == (1, 4, 64, 64)


def tuned_dit(label_stores: dict[int, LatentStore], folder: Path, *settings: str) -> Path:
    """A DiT of 64 px, trained on at 128 px."""
    quick = ("run.steps=1", "optimizer.lr=3e-2", "run.ema_decay=0.0", *settings)
    run_to(train_recipe("dit-s-4", *quick), label_stores[64], folder / "first")
    settings = (*quick, f"model.init_from={folder / 'first'}")
    run_to(train_recipe("dit-s-4", *settings), label_stores[128], folder / "tuned")
    return folder / "tuned"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_official_layout_has_the_positions_of_the_size_that_was_trained(
    suffix: str, label_stores: dict[int, LatentStore], tmp_path: Path
) -> None:
    run = tuned_dit(label_stores, tmp_path)
    export(run, tmp_path / "out", layout="official")
    (file,) = (tmp_path / "out").glob(f"*{suffix}")
    snapshot = load_snapshot(run, CPU)
    x, t = torch.randn(2, 4, 16, 16), torch.tensor([10.0, 700.0])
    labels = Conditioning(labels=torch.tensor([0, 2]))
    with torch.no_grad():
        expected = snapshot.model(x, t, labels)
    # As the official code has it for these images: a table of 4 x 4 tokens, which it adds as it is.
    official = build_model(snapshot.spec.model_copy(update={"base_size": 16}), seed=1).eval()
    weights = torch.load(file, weights_only=True) if suffix == ".pt" else load_file(file)
    width = weights["pos_embed"].shape[2]
    torch.testing.assert_close(weights["pos_embed"], position_table(4, 4, width, 2)[None])
    assert not torch.allclose(weights["pos_embed"], position_table(4, 4, width, 4)[None], atol=0.1)
    official.load_state_dict(weights)
    with torch.no_grad():
        torch.testing.assert_close(official(x, t, labels), expected)
    # A run that begins with the file knows the span that was learned, at any resolution.
    for store in label_stores.values():
        spec = model_spec(train_recipe("dit-s-4", f"model.init_from={file}"), store.spec, "store")
        assert spec.base_size == snapshot.spec.base_size == 8
    ours = build_model(spec, seed=2).eval()
    ours.load_state_dict(initial_weights(str(file), ours, spec)[0])
    with torch.no_grad():
        torch.testing.assert_close(ours(x, t, labels), expected)


@pytest.mark.parametrize(
    ("settings", "layout", "words"),
    [
        ((), "diffusers", "4 tokens a side with positions that span 2.*--format official"),
        (("model.positions=rope",), "official", "rotary positions that span 2.*from the snapshot"),
        (("model.positions=rope",), "diffusers", "positions = 'rope'.*from the snapshot"),
    ],
)
def test_a_layout_that_cannot_hold_size_and_span_is_refused(
    settings: tuple[str, ...],
    layout: str,
    words: str,
    label_stores: dict[int, LatentStore],
    leandit: Leandit,
    tmp_path: Path,
) -> None:
    run = tuned_dit(label_stores, tmp_path, *settings)
    ended = leandit("export", run, "--out", tmp_path / "out", "--format", layout)
    assert ended.code == 3
    assert re.search(words, " ".join(ended.err.split())), ended.err
    assert not (tmp_path / "out").exists()


def test_a_dit_of_one_resolution_draws_at_it(label_stores: dict[int, LatentStore], tmp_path: Path) -> None:
    run_to(train_recipe("dit-s-4", "run.steps=1"), label_stores[128], tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    theirs: Any = DiTTransformer2DModel.from_pretrained(tmp_path / "out/transformer", low_cpu_mem_usage=False)
    assert theirs.config.sample_size == 16
    config, _ = transformer_of(load_snapshot(tmp_path / "run", CPU))
    assert config["sample_size"] == 16
    assert math.isqrt(theirs.pos_embed.pos_embed.shape[1]) == 4
