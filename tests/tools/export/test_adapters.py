"""Exported adapters: diffusers and peft load them, and compute what the run does; merged ones are a whole pipeline."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import forward, load_transformer
from making import CPU, train_recipe, tree_digest
from runs import ADAPTED as MODELS
from runs import run_to, runs_of_whole_models
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from leandit.datasets.batches.captions import Captions
from leandit.datasets.store import LatentStore
from leandit.errors import RunError
from leandit.tools.export.export import export, transformer_of
from leandit.train.models.conditioning import Conditioning
from leandit.train.sampling.snapshot import Snapshot, load_snapshot

WHOLE = ("pixart-tiny", "sana-tiny")  # SD3's store of noise names no encoders of a pipeline

pytestmark = pytest.mark.usefixtures("tiny_models")


@pytest.fixture(scope="module")
def whole(store_of: dict[str, LatentStore], golden: Any) -> dict[str, Path]:
    """A run of all weights of each model."""
    return runs_of_whole_models(golden, store_of)


@pytest.fixture(scope="module")
def bases(whole: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Their transformers as diffusers has them."""
    root = tmp_path_factory.mktemp("bases")
    for name in MODELS:
        config, weights = transformer_of(load_snapshot(whole[name], CPU))
        (root / name / "transformer").mkdir(parents=True)
        (root / name / "transformer/config.json").write_text(json.dumps(config))
        save_file(weights, root / name / "transformer/diffusion_pytorch_model.safetensors")
    return {name: root / name for name in MODELS}


@pytest.fixture(scope="module")
def runs(
    bases: dict[str, Path], store_of: dict[str, LatentStore], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Adapters of each model, trained on its export, with an alpha that is not the rank."""
    root = tmp_path_factory.mktemp("runs")
    for name in MODELS:
        settings = [f"model.init_from={bases[name]}", "lora.rank=4", "lora.alpha=6", "optimizer.lr=1e-2"]
        recipe = train_recipe(name, *settings, "schedule.warmup_steps=0", "run.ema_decay=0.0")
        run_to(recipe, store_of[name], root / name)
    return {name: root / name for name in MODELS}


CLASSES = {"pixart-tiny": "PixArtTransformer2DModel", "sana-tiny": "SanaTransformer2DModel"}
CLASSES |= {"sd3-tiny": "SD3Transformer2DModel"}
PIPELINES = {"pixart-tiny": "PixArtSigmaPipeline", "sana-tiny": "SanaPipeline", "sd3-tiny": "StableDiffusion3Pipeline"}
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
TIMES = torch.tensor([10.0, 700.0])


def outputs(model: Any, snapshot: Snapshot) -> Tensor:
    """Of our model or of a transformer of diffusers, for the same noise and captions."""
    spec, generator = snapshot.spec, torch.Generator().manual_seed(0)
    captions = torch.randn((2, 5, spec.caption_width), generator=generator)
    x = torch.randn((2, spec.channels, 8, 8), generator=generator)
    pooled = torch.randn((2, spec.pooled_width), generator=generator) if spec.pooled_width else None
    given = Conditioning(captions=captions if spec.pooled_width else Captions.of(list(captions)), pooled=pooled)
    with torch.no_grad():
        return model(x, TIMES, given) if model is snapshot.model else forward(model, x, TIMES, given)


@pytest.mark.parametrize("name", MODELS)
def test_adapters_compute_what_the_run_does(
    name: str, bases: dict[str, Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    made = export(runs[name], tmp_path / "out")
    snapshot, theirs = load_snapshot(runs[name], CPU), load_transformer(CLASSES[name], bases[name])
    plain, wanted = outputs(theirs, snapshot), outputs(snapshot.model, snapshot)
    assert (made["format"], made["pipeline"]) == ("adapters", PIPELINES[name])
    if "pixart" in name:
        from peft import PeftModel

        assert made["files"] == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
        config = json.loads((tmp_path / "out/adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 4, TARGETS)
        assert config["base_model_name_or_path"] == str(bases[name])
        theirs = PeftModel.from_pretrained(theirs, tmp_path / "out").merge_and_unload()
    else:
        import diffusers

        assert made["files"] == ["README.md", "pytorch_lora_weights.safetensors"]
        if "sana" in name:
            with safe_open(tmp_path / "out/pytorch_lora_weights.safetensors", "pt") as file:
                config = json.loads(file.metadata()["lora_adapter_metadata"])
            expected = {"r": 4, "lora_alpha": 4, "target_modules": TARGETS}
            assert config == {f"transformer.{key}": value for key, value in expected.items()}
        cls = getattr(diffusers, PIPELINES[name])
        parts = dict.fromkeys(signature(cls.__init__).parameters.keys() - {"self", "transformer"})
        cls(transformer=theirs, **parts).load_lora_weights(tmp_path / "out")
    torch.testing.assert_close(outputs(theirs, snapshot), wanted, rtol=1e-5, atol=1e-5)
    assert (wanted - plain).abs().max() > 1e-3
    card = (tmp_path / "out/README.md").read_text()
    assert f"'{bases[name]}'" in card
    assert "rank 4, alpha 6" in card


@pytest.mark.parametrize("name", MODELS)
def test_a_loader_that_reads_no_alpha_adds_what_was_trained(
    name: str, bases: dict[str, Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    """ComfyUI and kohya's scripts look for "LAYER.alpha"; where there is none, they add B A."""
    export(runs[name], tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    before = load_file(bases[name] / "transformer/diffusion_pytorch_model.safetensors")
    trained = transformer_of(load_snapshot(runs[name], CPU))[1]
    adapters = {
        key.removeprefix("transformer.").removeprefix("base_model.model."): t for key, t in load_file(file).items()
    }
    assert not any("alpha" in key for key in adapters)
    layers = {key.removesuffix(".lora_A.weight") for key in adapters if key.endswith(".lora_A.weight")}
    assert len(adapters) == 2 * len(layers)
    changed = {key for key, tensor in trained.items() if not torch.equal(tensor, before[key])}
    assert changed
    assert changed <= {f"{layer}.weight" for layer in layers}
    for layer in layers:
        added = adapters[f"{layer}.lora_B.weight"] @ adapters[f"{layer}.lora_A.weight"]
        change = trained[f"{layer}.weight"] - before[f"{layer}.weight"]
        torch.testing.assert_close(added, change, rtol=1e-3, atol=1e-6)


def test_adapters_of_a_run_say_that_it_is_exported_too(
    whole: dict[str, Path], runs: dict[str, Path], store_of: dict[str, LatentStore], tmp_path: Path
) -> None:
    base = whole["pixart-tiny"]
    settings = [f"model.init_from={base}", "lora.rank=2", "run.steps=1", "schedule.warmup_steps=0"]
    run_to(train_recipe("pixart-tiny", *settings), store_of["pixart-tiny"], tmp_path / "run")
    said = [export(run, tmp_path / f"{n}")["notes"] for n, run in enumerate((tmp_path / "run", runs["pixart-tiny"]))]
    wanted = f"'leandit export {base} --step 2 --out FOLDER'"
    assert [any(wanted in note for note in notes) for notes in said] == [True, False]


@pytest.mark.parametrize("name", WHOLE)
def test_a_merged_export_is_a_whole_model(name: str, runs: dict[str, Path], tmp_path: Path) -> None:
    made = export(runs[name], tmp_path / "out", merged=True)
    assert made["format"] == "diffusers"
    assert "model_index.json" in made["files"]
    snapshot = load_snapshot(runs[name], CPU)
    found = outputs(load_transformer(CLASSES[name], tmp_path / "out"), snapshot)
    torch.testing.assert_close(found, outputs(snapshot.model, snapshot), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("of_base", "options", "words"),
    [
        (False, {"encoders": True}, "--encoders: adapters are saved without a pipeline. Use --merged"),
        (False, {"layout": "official"}, "--format diffusers"),
        (True, {"merged": True}, "--merged: run .* has no adapters"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    of_base: bool, options: dict[str, Any], words: str, whole: dict[str, Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    run = (whole if of_base else runs)["sana-tiny"]
    with pytest.raises(RunError, match=words):
        export(run, tmp_path / "out", **options)
    assert tree_digest(tmp_path) == {}
