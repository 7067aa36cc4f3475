"""A Stable Diffusion 3 from images to diffusers: its pipeline draws from prompts what ours draws from the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import forward, load_pipeline, load_transformer
from making import CPU, no_progress, train_recipe
from runs import run_to
from stores import encoder_recipe

from leandit.datasets.errors import EncoderError, RunError
from leandit.datasets.order.shuffle import keyed_hash
from leandit.datasets.store import LatentStore
from leandit.precompute.pipeline import precompute
from leandit.tools.export.export import export
from leandit.tools.sample.subjects import Captions
from leandit.train.models.build import diffusers_config, transformer_class
from leandit.train.models.spec import ModelSpec, TextInput
from leandit.train.run.state import Run
from leandit.train.sampling.guided import Solver, draw_latents
from leandit.train.sampling.snapshot import load_snapshot

pytestmark = pytest.mark.usefixtures("tiny_models")
SIZE = (8, 8)  # of the latents of 64 px
PROMPTS = ["a red circle", "a red triangle"]


@pytest.fixture(scope="module")
def store(caption_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    """14 captioned images by tiny random encoders of the classes of SD3."""
    root = tmp_path_factory.mktemp("sd3")
    recipe = encoder_recipe(root / "models")
    precompute(recipe, source_path=caption_folder, store_path=root / "store", device=CPU, progress=no_progress)
    return LatentStore(root / "store")


@pytest.fixture(scope="module")
def run(store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It begins with random weights, whose output depends on captions."""
    made = tmp_path_factory.mktemp("run") / "run"
    texts = (TextInput(name="", tokens=0, width=96, pooled_width=48),)
    sizes = {"channels": 16, "out_channels": 16, "num_classes": 0, "caption_width": 96, "base_size": 8}
    torch.manual_seed(0)
    model = transformer_class("sd3")(**diffusers_config(ModelSpec(name="sd3-tiny", texts=texts, **sizes)))
    for block in model.transformer_blocks:
        torch.nn.init.normal_(block.norm1.linear.weight, std=0.2)
    model.save_pretrained(made.parent / "model")
    settings = [f"model.init_from={made.parent / 'model'}", "objective.shift=3.0", "run.ema_decay=0.0"]
    recipe = train_recipe("sd3-tiny", *settings, "run.steps=2", "optimizer.lr=1e-2")
    run_to(recipe, store, made)
    return made


def test_the_pipeline_draws_from_prompts_what_the_sampler_draws_from_the_store(
    run: Path, store: LatentStore, tmp_path: Path
) -> None:
    assert store.find_captions(PROMPTS) != [None, None]
    made = export(run, tmp_path / "out", encoders=True)
    assert (made["pipeline"], made["notes"]) == (
        "StableDiffusion3Pipeline",
        ["Pass max_sequence_length=24, as in training."],
    )
    snapshot = load_snapshot(run, CPU)
    captions = Captions(snapshot, run, None, None, CPU)
    given = captions.conditioning(captions.embed(PROMPTS))
    how = {"size": SIZE, "seed": 3, "solver": Solver(steps=4, guidance=3.0)}
    wanted = draw_latents(snapshot, given, **how)
    other = captions.conditioning(captions.embed(PROMPTS[::-1]))
    assert (draw_latents(snapshot, other, **how) - wanted).abs().max() > 0.01, "captions matter"

    pipeline = load_pipeline("StableDiffusion3Pipeline", tmp_path / "out")
    assert pipeline.scheduler.config.shift == 3.0
    generators = [torch.Generator().manual_seed(keyed_hash(3, number) % 2**63) for number in range(2)]
    noise = torch.stack([torch.randn((16, *SIZE), generator=generator) for generator in generators])
    options = {"height": 64, "width": 64, "num_inference_steps": 4, "guidance_scale": 3.0, "max_sequence_length": 24}
    found = pipeline(PROMPTS, **options, latents=noise, output_type="latent").images
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert pipeline(PROMPTS[:1], **options, output_type="np").images.shape == (1, 64, 64, 3)


def test_a_model_that_is_no_flow_is_refused(store: LatentStore, tmp_path: Path) -> None:
    run_to(train_recipe("sd3-tiny", "objective.kind=ddpm", "run.steps=1"), store, tmp_path / "run")
    with pytest.raises(RunError, match="samples only flow models"):
        export(tmp_path / "run", tmp_path / "out")


def test_what_is_exported_is_read_again_as_it_was(run: Path, store: LatentStore, tmp_path: Path) -> None:
    """With its table of positions; a run begins with it and has the trained model's output."""
    export(run, tmp_path / "out")
    snapshot, theirs = load_snapshot(run, CPU), load_transformer("SD3Transformer2DModel", tmp_path / "out")
    index = json.loads((tmp_path / "out/model_index.json").read_text())
    expected = {"transformer": "SD3Transformer2DModel", "scheduler": "FlowMatchEulerDiscreteScheduler"}
    expected |= dict.fromkeys(("text_encoder", "text_encoder_2"), "CLIPTextModelWithProjection")
    expected |= dict.fromkeys(("tokenizer", "tokenizer_2"), "CLIPTokenizer") | {"vae": "AutoencoderKL"}
    expected |= {"text_encoder_3": "T5EncoderModel", "tokenizer_3": "T5Tokenizer"}
    assert {name: value[1] for name, value in index.items() if not name.startswith("_")} == expected
    recipe = train_recipe("sd3-tiny", f"model.init_from={tmp_path / 'out'}")
    state = Run.open(recipe, [store], CPU, print)
    batch = next(iter(state.loader))
    given, t = state.conditioner(None, batch.texts), torch.linspace(1, 999, len(batch))
    assert given.captions is not None
    with torch.no_grad():
        wanted = snapshot.model(batch.latents, t, given)
        assert torch.equal(state.engine.model(batch.latents, t, given), wanted)
    found = forward(theirs, batch.latents, t, given)
    assert wanted.abs().max() > 0.02
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_caption_that_no_store_has_is_encoded_by_all_three(run: Path, store: LatentStore) -> None:
    snapshot = load_snapshot(run, CPU)
    captions = Captions(snapshot, run, None, None, CPU)
    (stored,), (encoded,) = captions.embed(PROMPTS[:1]), captions.embed_live(PROMPTS[:1])
    assert list(encoded) == list(stored) == ["clip_g", "clip_l", "t5"]
    for name, one in stored.items():
        for ours, theirs in zip(one, encoded[name], strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    assert store.find_captions(["a green cat"]) == [None]
    given: Any = captions.conditioning(captions.embed(["a green cat", *PROMPTS]))
    assert given.captions.shape == (3, 77 + 24, 96)
    with pytest.raises(EncoderError, match="reads 3 text encoders"):
        Captions(snapshot, run, None, "somewhere", CPU)
