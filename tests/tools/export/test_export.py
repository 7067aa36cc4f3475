"""Exports: diffusers' pipelines load and draw with them; a forward equals the trained model's, or the gap is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderDC, AutoencoderKL
from loaded import forward, load_pipeline, load_transformer
from making import CPU, train_recipe, tree_digest
from runs import run_to
from torch import Tensor
from transformers import AutoTokenizer, T5EncoderModel

from leandit.datasets.batches.captions import Captions
from leandit.datasets.format.schema import Decoding
from leandit.datasets.store import LatentStore
from leandit.errors import RunError
from leandit.precompute.encoders.model_files import local_folder
from leandit.tools.export.compatibility import compatibility_notes
from leandit.tools.export.export import export, index_of, transformer_of
from leandit.train.models.conditioning import Conditioning
from leandit.train.sampling.snapshot import Snapshot, load_snapshot
from leandit.train.weights.init_from import initial_weights

pytestmark = pytest.mark.usefixtures("tiny_models")

RUNS = {
    "dit": ("dit-s-4", []),
    "dit-flow": ("dit-s-4", ["objective.kind=flow", "objective.shift=2.0"]),
    "dit-rope": ("dit-s-4", ["model.positions=rope"]),
    "dit-text": ("dit-s-2-text", []),
    "pixart": ("pixart-tiny", []),
    "pixart-flow": ("pixart-tiny", ["objective.kind=flow"]),
    "pixart-ddpm": ("pixart-tiny", ["objective.kind=ddpm"]),
    "sana": ("sana-tiny", ["objective.kind=flow", "objective.shift=3.0"]),
    "sana-ddpm": ("sana-tiny", ["objective.kind=ddpm", "objective.variance=fixed"]),
}


@pytest.fixture(scope="module")
def runs(
    label_store: LatentStore, caption_store: LatentStore, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A trained run of each kind; a large rate moves all weights from where they began."""
    root = tmp_path_factory.mktemp("runs")
    for name, (model, settings) in RUNS.items():
        store = label_store if model == "dit-s-4" else caption_store
        more = ["run.steps=6", "run.ema_decay=0.0", "optimizer.lr=3e-2"]
        recipe = train_recipe(model, *more, *settings)
        run_to(recipe, store, root / name)
    return {name: root / name for name in RUNS}


def captions_of(snapshot: Snapshot) -> Conditioning:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn((11, snapshot.spec.caption_width), generator=generator)
    return Conditioning(captions=Captions.packed(tokens, [6, 1, 4]))


@pytest.mark.parametrize(
    ("name", "size"),
    [("pixart", (8, 8)), *((name, (6, 10)) for name in ("pixart", "pixart-ddpm", "sana", "sana-ddpm"))],
)
def test_what_is_exported_is_the_model(name: str, size: tuple[int, int], runs: dict[str, Path], tmp_path: Path) -> None:
    export(runs[name], tmp_path / "out")
    snapshot = load_snapshot(runs[name], CPU)
    theirs = load_transformer(("Sana" if "sana" in name else "PixArt") + "Transformer2DModel", tmp_path / "out")
    given, t = captions_of(snapshot), torch.tensor([3.0, 500.0, 999.0])
    captions = given.captions
    x = torch.randn((3, snapshot.spec.channels, *size), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = snapshot.model(x, t, given)
    found = forward(theirs, x, t, given)
    assert wanted.abs().max() > 0.02
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        other = snapshot.model(x, t, given._replace(captions=captions.with_tokens(-4 * captions.tokens)))
    # So that equality says something of captions too. What PixArt's cross-attention adds begins with zero: six steps.
    assert (other - wanted).abs().max() > 1e-3
    weights = transformer_of(snapshot)[1]
    assert all(torch.equal(tensor, weights[key]) for key, tensor in theirs.state_dict().items())


DRAWN = ["dit-flow", "pixart-flow", "pixart-ddpm", "sana", "sana-ddpm"]


@pytest.mark.parametrize("name", DRAWN)
def test_the_pipeline_loads_and_draws(name: str, runs: dict[str, Path], tmp_path: Path) -> None:
    made = export(runs[name], tmp_path / "out")
    pipeline = load_pipeline(made["pipeline"], tmp_path / "out", **encoders_of(name))
    generator = torch.Generator().manual_seed(0)
    shared = {"num_inference_steps": 2, "guidance_scale": 2.0, "generator": generator, "output_type": "np"}
    if name.startswith("dit"):
        assert pipeline.labels == {"n000": 0, "n001": 1, "n002": 2}
        images = pipeline(class_labels=pipeline.get_label_ids(["n001", "n002"]), **shared).images
        assert images.shape == (2, 32, 32, 3)
    else:
        sizes = {"height": 64, "width": 64, "use_resolution_binning": False, "max_sequence_length": 20}
        more = {"complex_human_instruction": None} if "sana" in name else {}
        images = pipeline(prompt="a red circle", **shared, **sizes, **more).images
        assert images.shape == (1, 64, 64, 3)
    assert images.std() > 0


def encoders_of(name: str) -> dict[str, Any]:
    """Encoders as a user has them loaded; the pipeline of Sana takes no other VAE."""
    vae: Any = AutoencoderKL.from_pretrained(local_folder("shipped:vae"), low_cpu_mem_usage=False)
    if name.startswith("dit"):
        return {"vae": vae}
    if name.startswith("sana"):
        coders = {"block_out_channels": (4,) * 4, "layers_per_block": (1,) * 4, "qkv_multiscales": ((),) * 4}
        sizes: Any = {f"{part}_{key}": value for key, value in coders.items() for part in ("encoder", "decoder")}
        types = {"encoder_block_types": "ResBlock", "decoder_block_types": "ResBlock"}
        vae = AutoencoderDC(latent_channels=4, attention_head_dim=2, **sizes, **types)
    folder = local_folder("shipped:t5")
    text = {"text_encoder": T5EncoderModel.from_pretrained(folder), "tokenizer": AutoTokenizer.from_pretrained(folder)}
    return {"vae": vae} | text


def dit_outputs(model: Any, snapshot: Snapshot) -> tuple[Tensor, Tensor]:
    """Of our model and of diffusers', at times from data to noise, for labels and null."""
    x = torch.randn((4, 4, 4, 4), generator=torch.Generator().manual_seed(1))
    t = torch.tensor([0.0, 100.0, 500.0, 999.0])
    ours, theirs = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 1000])
    with torch.no_grad():
        return snapshot.model(x, t, Conditioning(labels=ours)), model(x, timestep=t.long(), class_labels=theirs).sample


def test_diffusers_dit_differs_by_its_time_embedding_and_by_nothing_else(runs: dict[str, Path], tmp_path: Path) -> None:
    export(runs["dit"], tmp_path / "out")
    snapshot, theirs = load_snapshot(runs["dit"], CPU), load_transformer("DiTTransformer2DModel", tmp_path / "out")
    wanted, found = dit_outputs(theirs, snapshot)
    gap = (found - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
    assert gap[0] < 1e-5  # at time 0 all angles are 0
    assert gap[1:].min() > 1e-4
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    found = dit_outputs(theirs, snapshot)[1]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dit", "dit-rope", "dit-text"])
def test_the_official_layout_is_exact(name: str, runs: dict[str, Path], tmp_path: Path) -> None:
    made = export(runs[name], tmp_path / "out", layout="official")
    snapshot = load_snapshot(runs[name], CPU)
    files = [file for file in made["files"] if file != "README.md"]
    assert len(files) == 2
    for file in files:
        weights, _ = initial_weights(str(tmp_path / "out" / file), snapshot.model, snapshot.spec)
        wanted = snapshot.model.state_dict()
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dit-rope", {}, "positions = 'rope'.*--format official"),
        ("dit-text", {}, "captions.*--format official"),
        ("pixart", {"layout": "official"}, "--format diffusers"),
        ("dit", {"layout": "official", "encoders": True}, "--format diffusers"),
        ("dit", {"step": 2}, "no snapshot of step 2.*3"),
    ],
)
def test_what_cannot_be_exported(
    name: str, options: dict[str, Any], words: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=words):
        export(runs[name], tmp_path / "out", **options)
    assert tree_digest(tmp_path) == {}


def test_notes_of_an_imported_store_and_of_a_sana(runs: dict[str, Path]) -> None:
    snapshot = load_snapshot(runs["pixart"], CPU)
    channels = snapshot.latent.channels
    plain = snapshot.latent.model_copy(update={"shift": [0.0] * channels, "scale": [1.0] * channels})
    assert not any("shifted" in note for note in compatibility_notes(replace(snapshot, latent=plain)))
    scales = ([0.1159] * channels, [0.3611] * channels), ([0.0] * channels, [1.0] * (channels - 1) + [2.0])
    for shift, scale in scales:
        latent = plain.model_copy(update={"decoding": Decoding(shift=shift, scale=scale, zero_to_one=True)})
        state = snapshot.state | {"vae": snapshot.state["vae"] | {"class_name": "imported:pixart"}}
        imported = replace(snapshot, latent=latent, state=state)
        assert index_of(imported, "DDIMScheduler", {})["vae"] == ["diffusers", "AutoencoderKL"]
        notes = "\n".join(compatibility_notes(imported))
        assert "shifted" in notes
        assert "from 0 to 1" in notes
    sana = load_snapshot(runs["sana"], CPU)
    text = sana.state["text_encoder"]
    for instruction, given in (("", "None"), ("Describe:\nPrompt: ", '["Describe:", "Prompt: "]')):
        state = sana.state | {"text_encoder": text | {"model": text["model"] | {"instruction": instruction}}}
        notes = compatibility_notes(replace(sana, state=state))
        assert any(f"complex_human_instruction={given}" in note for note in notes)


def test_the_card_says_what_is_known_and_a_folder_is_never_overwritten(runs: dict[str, Path], tmp_path: Path) -> None:
    made = export(runs["dit"], tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    snapshot = load_snapshot(runs["dit"], CPU)
    for word in (snapshot.state["root_hashes"][0], "snapshot-6", (runs["dit"] / "recipe.toml").read_text().strip()):
        assert word in card
    assert made["notes"] == compatibility_notes(snapshot)
    assert all(note in card.replace("\\", "") for note in made["notes"])  # Markdown's own escapes
    index = json.loads((tmp_path / "out/model_index.json").read_text())
    assert index["vae"] == ["diffusers", "AutoencoderKL"]
    before = tree_digest(tmp_path)
    with pytest.raises(RunError, match="it already exists"):
        export(runs["pixart"], tmp_path / "out")
    assert tree_digest(tmp_path) == before
