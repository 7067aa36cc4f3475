"""FLUX, Qwen-Image, Z-Image, SD3 from images to diffusers: its pipelines draw from prompts what ours draws."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from loaded import forward, load_pipeline, load_transformer
from making import CPU, FLOW_MODELS, caption_recipe, no_progress, train_recipe
from runs import run_to
from stores import encoder_recipe
from tiny_autoencoders import save_autoencoder
from tiny_models import save_clip, save_qwen3, save_qwen_vl, save_t5

from leandit.datasets.order.shuffle import keyed_hash
from leandit.datasets.store import LatentStore
from leandit.errors import EncoderError, RunError
from leandit.precompute.config import load as load_precompute
from leandit.precompute.pipeline import precompute
from leandit.tools.export.export import export
from leandit.tools.sample.subjects import Captions
from leandit.train.models.build import FAMILIES, diffusers_config, transformer_class
from leandit.train.models.spec import ModelSpec, TextInput
from leandit.train.run.fit import model_spec
from leandit.train.run.state import Run
from leandit.train.sampling.guided import Solver, draw_latents
from leandit.train.sampling.snapshot import load_snapshot

pytestmark = pytest.mark.usefixtures("tiny_models")
PROMPTS = ["a red circle", "a red triangle"]
PLACES = ("subfolder=text_encoder", "tokenizer_subfolder=tokenizer", "dtype=float32")
FOUR = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
FOUR |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
KL = FOUR | {"latent_channels": 4, "scaling_factor": 0.3611, "shift_factor": 0.1159}
QWEN_VAE = {"dim_mult": [1, 1, 1, 1], "temperal_downsample": [False, True, True]}
STEPS = 3
FLUX_1 = {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
PUBLISHED: dict[str, dict[str, Any]] = {
    "flux1": FLUX_1,
    "flux2": FLUX_1,
    "qwen-image": FLUX_1 | {"shift": 1.0, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02},
    "z-image": {"shift": 6.0},
}
SETTINGS = ("run.ema_decay=0.0", "objective.shift=3.0", "schedule.kind=constant", "schedule.warmup_steps=0")


def text(name: str, folder: Path, *settings: str, template: str = "") -> list[str]:
    section = f"text.{name}" if name else "text"
    more = (f"model={folder}", *([f"template={json.dumps(template)}"] if template else ()))
    return [f"{section}.{setting}" for setting in (*settings, *PLACES, *more)]


def flux1(root: Path) -> list[str]:
    save_clip(root / "clip", projected=False)
    save_t5(root / "t5")
    save_autoencoder(root / "vae", "kl", **KL)
    padded = ("full_length=true", "attend_padding=true", "max_tokens=24")
    clip = text("clip", root / "clip", "kind=clip", "output=pooled", "max_tokens=77")
    return ["text.kind=none", *clip, *text("t5", root / "t5", "kind=t5", *padded)]


def flux2(root: Path) -> list[str]:
    save_qwen3(root / "qwen")
    save_autoencoder(root / "vae", "flux2", **FOUR | {"latent_channels": 2})
    template = load_precompute("flux2-klein-1024", []).text["qwen"].template
    settings = ("kind=causal_lm", "layers=[1,2,3]", "full_length=true", "max_tokens=48")
    return ["text.kind=none", *text("qwen", root / "qwen", *settings, template=template)]


def qwen_image(root: Path) -> list[str]:
    save_qwen_vl(root / "qwen")
    save_autoencoder(root / "vae", "qwen", **QWEN_VAE)
    template = load_precompute("qwen-image-1024", []).text[""].template
    return text("", root / "qwen", "kind=causal_lm", "drop_prefix_tokens=34", "max_tokens=160", template=template)


def z_image(root: Path) -> list[str]:
    save_qwen3(root / "qwen")
    save_autoencoder(root / "vae", "kl", **KL)
    template = load_precompute("z-image-1024", []).text[""].template
    return text("", root / "qwen", "kind=causal_lm", "layers=[-2]", "max_tokens=48", template=template)


ENCODERS: dict[str, Callable[[Path], list[str]]] = dict(
    zip(FLOW_MODELS, (flux1, flux2, qwen_image, z_image), strict=True)
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.integration] * (name != "flux1-tiny")) for name in FLOW_MODELS]
)
def test_from_images_to_what_the_pipeline_draws(name: str, caption_folder: Path, tmp_path: Path) -> None:
    encoders = ENCODERS[name](tmp_path)
    recipe = caption_recipe(*encoders, f"vae.model={tmp_path / 'vae'}", "vae.dtype=float32", "store.text_dtype=float32")
    precompute(recipe, source_path=caption_folder, store_path=tmp_path / "store", device=CPU, progress=no_progress)
    store = LatentStore(tmp_path / "store")

    spec = model_spec(train_recipe(name), store.spec, "the store")
    family = name.removesuffix("-tiny")
    torch.manual_seed(0)
    net: Any = transformer_class(family)(**diffusers_config(spec))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else None
    net.save_pretrained(tmp_path / "base/transformer")
    scheduler = FlowMatchEulerDiscreteScheduler(**PUBLISHED[family])
    scheduler.save_pretrained(tmp_path / "base/scheduler")
    for steps in (1, 2):
        settings = (f"run.steps={steps}", *SETTINGS, f"model.init_from={tmp_path / 'base'}")
        run_to(train_recipe(name, *settings), store, tmp_path / "run")

    made = export(tmp_path / "run", tmp_path / "out", encoders=True)
    snapshot = load_snapshot(tmp_path / "run", CPU)
    exported = load_pipeline(made["pipeline"], tmp_path / "out").scheduler.config
    assert {key: exported[key] for key in scheduler.config if key[0] != "_"} == {
        key: value for key, value in scheduler.config.items() if key[0] != "_"
    }
    assert made["pipeline"] == FAMILIES[family].pipeline(spec)
    captions = Captions(snapshot, tmp_path / "run", None, None, CPU)
    given = captions.conditioning(captions.embed(PROMPTS))
    side = 64 // store.spec.latent.downscale
    guided = {
        scale: draw_latents(snapshot, given, size=(side, side), seed=3, solver=Solver(steps=STEPS, guidance=scale))
        for scale in (1.0, 4.0)
    }
    how = {"size": (side, side), "seed": 3, "solver": Solver(steps=STEPS, guidance=1.0)}
    wanted = guided[1.0]
    other = captions.conditioning(captions.embed(PROMPTS[::-1]))
    assert (draw_latents(snapshot, other, **how) - wanted).abs().max() > 1e-3, "captions matter"
    for scale, latents in guided.items():
        found = drawn(family, load_pipeline(made["pipeline"], tmp_path / "out"), spec.channels, side, scale)
        assert (found - latents).norm() < 1e-3 * latents.norm()
    assert (guided[4.0] - wanted).abs().max() > 1e-2, "guidance matters"

    lora = ("lora.rank=2", f"model.init_from={tmp_path / 'out'}", "optimizer.lr=1e-1", "run.steps=2", *SETTINGS)
    run_to(train_recipe(name, *lora), store, tmp_path / "lora")
    export(tmp_path / "lora", tmp_path / "adapters")
    pipeline = load_pipeline(made["pipeline"], tmp_path / "out")
    pipeline.load_lora_weights(tmp_path / "adapters")
    adapted = draw_latents(load_snapshot(tmp_path / "lora", CPU), given, **how)
    assert (adapted - wanted).abs().max() > 1e-3, "adapters matter"
    assert (drawn(family, pipeline, spec.channels, side) - adapted).norm() < 1e-3 * adapted.norm()


def drawn(family: str, pipeline: Any, channels: int, side: int, guidance: float = 1.0) -> torch.Tensor:
    """Latents (2, C, side, side) that a pipeline draws from ``PROMPTS``, from our noise and at our steps."""
    generators = [torch.Generator().manual_seed(keyed_hash(3, number) % 2**63) for number in range(2)]
    noise = torch.stack([torch.randn((channels, side, side), generator=generator) for generator in generators])
    px = side * FAMILIES[family].downscale
    how: dict[str, Any] = {"height": px, "width": px, "num_inference_steps": STEPS, "output_type": "latent"}
    how["sigmas"] = np.linspace(1, pipeline.scheduler.sigma_min, STEPS)
    sizes = (2, channels, side, side)
    if family in ("flux1", "qwen-image"):
        how |= {"true_cfg_scale": guidance, "negative_prompt": ["", ""]}
        how |= {
            "latents": pipeline._pack_latents(noise, *sizes),
            "max_sequence_length": 24 if family == "flux1" else 160,
        }
        images = pipeline._unpack_latents(pipeline(prompt=[*PROMPTS], **how).images, px, px, 8)
        return images if family == "flux1" else images.squeeze(2)
    if family == "z-image":  # it writes into the list of prompts
        how |= {"guidance_scale": guidance - 1, "negative_prompt": ["", ""], "max_sequence_length": 48}
        return pipeline(prompt=[*PROMPTS], **how, latents=noise).images
    kept, step = [], pipeline.scheduler.step
    pipeline.scheduler.step = lambda *args, **more: kept.append(step(*args, **more)) or kept[-1]
    how |= {"latents": noise, "guidance_scale": guidance, "max_sequence_length": 48}
    pipeline(prompt=[*PROMPTS], **how, text_encoder_out_layers=(1, 2, 3))
    return kept[-1][0].transpose(1, 2).unflatten(2, (side, side))


SIZE = (8, 8)  # of the latents of 64 px


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


def test_the_pipeline_draws_from_prompts_what_ours_draws(run: Path, store: LatentStore, tmp_path: Path) -> None:
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
    assert (snapshot.spec.config["sample_size"], pipeline.transformer.config.sample_size) == (128, 8)
    of_its_own_size = {key: value for key, value in options.items() if key not in ("height", "width")}
    assert pipeline(PROMPTS[:1], **of_its_own_size, output_type="np").images.shape == (1, 64, 64, 3)


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
        torch.testing.assert_close(one.embeddings, encoded[name].embeddings, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.pooled, encoded[name].pooled, rtol=1e-4, atol=1e-4)
    assert store.find_captions(["a green cat"]) == [None]
    given: Any = captions.conditioning(captions.embed(["a green cat", *PROMPTS]))
    assert given.captions.shape == (3, 77 + 24, 96)
    with pytest.raises(EncoderError, match="reads 3 text encoders"):
        Captions(snapshot, run, None, "somewhere", CPU)
