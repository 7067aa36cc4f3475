"""Fine-tuning: the official layout of DiT, diffusers' folders of DiT, PixArt and Sana, and what is refused."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from making import set_json, shaken, train_recipe
from runs import run_to
from safetensors.torch import load_file, save_file
from torch import Tensor

from leandit.datasets.format.class_names import imagenet_names
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, RunError
from leandit.train.models.build import build_model, diffusers_config, transformer_class
from leandit.train.models.conditioning import Conditioning
from leandit.train.models.layers import DiTOptions, position_table
from leandit.train.models.spec import ModelSpec, TextInput
from leandit.train.run.fit import model_spec
from leandit.train.weights.init_from import initial_weights
from leandit.train.weights.published import official_bytes, read_official
from leandit.train.weights.sources import position_grid, read_config, source_warnings

pytestmark = pytest.mark.usefixtures("tiny_models")
SPEC = ModelSpec(name="DiT-S/2", channels=4, out_channels=8, num_classes=3, caption_width=0, base_size=8)


@pytest.fixture(scope="module")
def official() -> dict[str, Tensor]:
    """A flat state dict in the official layout."""
    return {name.removeprefix("net."): tensor for name, tensor in shaken(SPEC).state_dict().items()}


def trainer_file(path: Path, official: dict[str, Tensor]) -> None:
    """As the official trainer and its successors save: weights, averages, optimizer, arguments."""
    model = {f"module.{name}": tensor + 1 for name, tensor in official.items()}
    torch.save({"model": model, "ema": official, "opt": {"state": {}}, "args": argparse.Namespace(lr=1e-4)}, path)


WRITERS: dict[str, Callable[[Path, dict[str, Tensor]], Any]] = {
    "flat.pt": lambda path, weights: torch.save(weights, path),
    "trainer.pt": trainer_file,
    "flat.safetensors": lambda path, weights: save_file(weights, path),
    "ours.pt": lambda path, _: path.write_bytes(official_bytes(shaken(SPEC).state_dict(), ".pt")),
    "ours.safetensors": lambda path, _: path.write_bytes(official_bytes(shaken(SPEC).state_dict(), ".safetensors")),
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_official_file_gives_its_weights(name: str, official: dict[str, Tensor], tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name, official)
    model = build_model(SPEC, seed=9)
    assert read_official(tmp_path / name).keys() == official.keys()
    weights, _ = initial_weights(str(tmp_path / name), model, SPEC)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[key], tensor) for key, tensor in official.items())
    with torch.device("meta"):
        larger = build_model(SPEC.model_copy(update={"base_size": 16}), seed=0)
    table = initial_weights(str(tmp_path / name), larger, SPEC.model_copy(update={"base_size": 16}))[0]["pos_embed"]
    assert torch.equal(table[0], position_table(8, 8, 32, 8))
    model.load_state_dict(weights)
    x, t, given = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 900.0]), Conditioning(labels=torch.tensor([0, 3]))
    assert torch.equal(model.eval()(x, t, given), shaken(SPEC)(x, t, given))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_classes": 4}, ("label table", "3 classes", "model.num_classes=3")),
        ({"channels": 16}, ("x_embedder.proj.weight", "16")),
        ({"out_channels": 4}, ("final_layer.linear", "objective.kind")),
        ({"options": DiTOptions(qk_norm=True)}, ("k_norm", "missing", "options")),
        ({"options": DiTOptions(positions="rope")}, ("pos_embed", "does not have")),
        ({"caption_width": 6, "num_classes": 0}, ("conditioning.kind",)),
        ({"name": "DiT-B/2"}, ("model.name",)),
    ],
)
def test_another_model_is_refused(
    changed: dict[str, Any], words: tuple[str, ...], official: dict[str, Tensor], tmp_path: Path
) -> None:
    (tmp_path / "a.pt").write_bytes(official_bytes(official, ".pt"))
    spec = SPEC.model_copy(update=changed)
    with torch.device("meta"):
        model = build_model(spec, seed=0)
    with pytest.raises(RunError) as caught:
        initial_weights(str(tmp_path / "a.pt"), model, spec)
    assert all(word in str(caught.value) for word in words), caught.value


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


def test_a_file_that_is_no_checkpoint_is_refused_and_nothing_of_it_is_run(tmp_path: Path) -> None:
    marker, content = tmp_path / "marker", {"model": Payload(tmp_path / "marker")}
    torch.save(content, tmp_path / "evil.pt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    torch.save({"model": {"a": 3}}, tmp_path / "numbers.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(content))
    (tmp_path / "short.pt").write_bytes(b"PK")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "short.safetensors").write_bytes(b"\xff" * 20)
    for name in (*sorted(path.name for path in tmp_path.iterdir()), "no.pt"):
        with pytest.raises((RunError, DamageError), match=name):
            initial_weights(str(tmp_path / name), build_model(SPEC, seed=0), SPEC)
    assert not marker.exists()


# --- diffusers' layout ------------------------------------------------------------------------------------------------


def diffusers_dit(folder: Path, *, trained: bool = False) -> Any:
    """A DiT of diffusers with weights of its own, one embedder in all blocks unless it was trained there."""
    torch.manual_seed(3)
    sizes: Any = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8}
    sizes |= {"num_layers": 2, "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 3, "norm_eps": 1e-6}
    model = DiTTransformer2DModel(**sizes).eval()
    if not trained:
        model.transformer_blocks[1].norm1.emb.load_state_dict(model.transformer_blocks[0].norm1.emb.state_dict())
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("place", ["", "transformer"])
def test_a_dit_of_diffusers_is_loaded_exactly(place: str, tmp_path: Path) -> None:
    theirs, ours = diffusers_dit(tmp_path / place), build_model(SPEC, seed=0)
    ours.load_state_dict(initial_weights(str(tmp_path), ours, SPEC)[0])
    x, y, t = torch.randn(2, 4, 8, 8), torch.tensor([0, 3]), torch.zeros(2)
    with torch.no_grad():  # at every other time, diffusers' class has another embedding than DiT
        wanted = theirs(x, timestep=t, class_labels=y, return_dict=False)[0]
        torch.testing.assert_close(ours.eval()(x, t, Conditioning(labels=y)), wanted, rtol=1e-4, atol=1e-4)
    diffusers_dit(tmp_path / place, trained=True)
    with pytest.raises(RunError, match=r"embedders in every block"):
        initial_weights(str(tmp_path), ours, SPEC)


def saved_text_model(folder: Path, name: str, family: str, *, channels: int = 4, **more: Any) -> Any:
    """A transformer of diffusers that fits the caption store, or that of three texts."""
    torch.manual_seed(1)
    sizes: Any = {"channels": channels, "out_channels": channels, "num_classes": 0, "base_size": 8}
    sizes |= {"caption_width": 64}
    if family == "sd3":
        sizes |= {"caption_width": 32, "texts": (TextInput(name="", tokens=9, width=32, pooled_width=16),)}
    config = diffusers_config(ModelSpec(name=name, **sizes)) | more
    model = transformer_class(family)(**config).eval()
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


TEXT_MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("pixart-tiny", "pixart", {"num_layers": 3}),
    ("sana-tiny", "sana", {"num_layers": 3, "qk_norm": "rms_norm_across_heads"}),
    ("sd3-tiny", "sd3", {"num_layers": 2, "qk_norm": None, "dual_attention_layers": []}),
]


@pytest.mark.parametrize(("name", "family", "more"), TEXT_MODELS)
def test_a_run_begins_with_the_weights_of_a_folder_and_learns_from_them(
    name: str, family: str, more: dict[str, Any], store_of: dict[str, LatentStore], tmp_path: Path
) -> None:
    theirs, run = saved_text_model(tmp_path / "pipeline/transformer", name, family, **more), tmp_path / "run"
    recipe = train_recipe(name, f"model.init_from={tmp_path / 'pipeline'}", "optimizer.lr=1e-6", "run.steps=2")
    spec = model_spec(recipe, store_of[name].spec, "store")
    assert spec.config["num_layers"] == theirs.config.num_layers
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec
    run_to(recipe, store_of[name], run)
    learned, begun = load_file(run / "checkpoint-2/model.safetensors"), theirs.state_dict()
    assert {name.removeprefix("net.") for name in learned} == begun.keys()
    moved = [float((learned[f"net.{key}"] - tensor).abs().max()) for key, tensor in begun.items()]
    assert 0 < max(moved) < 1e-5


def change(key: str, value: Any) -> Callable[[Path], Any]:
    return set_json("config.json", **{key: value})


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), RunError, ("config.json",)),
        (lambda folder: [path.unlink() for path in folder.glob("*.safetensors")], RunError, ("safetensors",)),
        (change("_class_name", "SanaTransformer2DModel"), RunError, ("SanaTransformer2DModel",)),
        (change("in_channels", 16), RunError, ("in_channels", "16", "4")),
        (change("out_channels", 8), RunError, ("out_channels", "8", "flow")),
        (change("caption_channels", 4096), RunError, ("caption_channels", "4096", "64")),
        (change("num_layers", 3), RunError, ("transformer_blocks.2", "missing")),
        (change("num_layers", 10**9), RunError, ("num_layers",)),
        (change("new_thing", True), RunError, ("new_thing",)),
        (change("use_additional_conditions", True), RunError, ("PixArt-alpha of 1024",)),
        (lambda folder: (folder / "config.json").write_text("[1]"), DamageError, ("JSON object",)),
        (lambda folder: next(folder.glob("*.safetensors")).write_bytes(b"no"), DamageError, ("no tensors",)),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_before_anything_is_written(
    spoil: Any, error: Any, words: tuple[str, ...], caption_store: LatentStore, tmp_path: Path
) -> None:
    folder, run = tmp_path / "model", tmp_path / "run"
    saved_text_model(folder, "pixart-tiny", "pixart")
    spoil(folder)
    with pytest.raises(error) as caught:
        run_to(train_recipe("pixart-tiny", f"model.init_from={folder}"), caption_store, run)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not run.exists()


def test_a_distilled_sana_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    saved_text_model(tmp_path / "sprint", "sana-tiny", "sana", guidance_embeds=True)
    names = {f"{tmp_path}/sprint": "distilled", f"{tmp_path}/no": "no such folder", "a/b": "not available from the hub"}
    for name, words in names.items():
        with pytest.raises(RunError, match=words):
            read_config(name, "sana")


@pytest.mark.parametrize("name", ["pixart-tiny", "dit-s-2-text"])
def test_a_run_begins_with_the_averages_of_another_run(name: str, caption_store: LatentStore, tmp_path: Path) -> None:
    rates = []

    def go(run: str, *overrides: str) -> Path:
        constant = ("schedule.kind=constant", "schedule.warmup_steps=0", "run.ema_decay=0.5")
        recipe = train_recipe(name, "run.steps=1", *constant, *overrides)
        rates.extend(figures.learning_rate for figures in run_to(recipe, caption_store, tmp_path / run))
        return tmp_path / run

    first = go("first")
    averages = load_file(first / "snapshot-1/model.safetensors")
    spec = model_spec(train_recipe(name, f"model.init_from={first}"), caption_store.spec, "store")
    assert spec == model_spec(train_recipe(name), caption_store.spec, "store")
    larger = spec.model_copy(update={"base_size": 2 * spec.base_size})
    for source in (first, first / "snapshot-1"):
        with torch.device("meta"):
            model = build_model(larger, seed=5)
        weights, _ = initial_weights(str(source), model, larger)
        assert weights.keys() == model.state_dict().keys()
        for key, tensor in averages.items():
            assert torch.equal(weights[key], tensor) == (key != "pos_embed"), key
    second = go("second", f"model.init_from={first}", "optimizer.lr=1e-7", "optimizer.lr_base_batch=2")
    learned = load_file(second / "checkpoint-1/model.safetensors")
    assert 0 < max(float((learned[key] - tensor).abs().max()) for key, tensor in averages.items()) < 1e-5
    assert rates == [1e-3, pytest.approx(2e-7)]  # 8 images an update: twice the rate of 2
    with pytest.raises(RunError, match="'DiT-B/2'"):
        initial_weights(str(first), build_model(SPEC, seed=0), SPEC.model_copy(update={"name": "DiT-B/2"}))


def test_other_labels_than_those_learned_are_warned_of(label_store: LatentStore, tmp_path: Path) -> None:
    wnids, latent = list(imagenet_names()), label_store.spec.latent

    def warnings(classes: list[str], num_classes: int = 1000) -> list[str]:
        spec = SPEC.model_copy(update={"num_classes": num_classes})
        return [*source_warnings("DiT.pt", spec, classes, latent)]

    for same in (wnids, wnids[:3], ["0", "1", "2"]):
        assert warnings(same) == []
    subset = [wnids[0], wnids[207], wnids[360]]
    (warning,) = warnings(subset)
    assert "ImageNet's 1000 labels, 2 of this store's 3 differ" in warning
    assert f"'{wnids[207]}' is label 1, which was learned as '{wnids[1]}'." in warning
    assert f"'cat' is label 0, which was learned as '{wnids[0]}'." in warnings(["cat", "dog"])[0]
    assert warnings(subset, num_classes=3) == []
    first, recipe = tmp_path / "first", train_recipe("dit-s-4", "run.steps=1")
    run_to(recipe, label_store, first)
    spec = model_spec(recipe, label_store.spec, "store")

    def warnings_of(*classes: str) -> list[str]:
        return [line for line in source_warnings(str(first), spec, classes, latent) if "labels, " in line]

    assert warnings_of("n000", "n001") == warnings_of("0", "1") == []
    (warning,) = warnings_of("cat", "n000")
    assert f"'{first}' has learned another store's 3 labels, 2 of this store's 2 differ" in warning
    assert "'cat' is label 0, which was learned as 'n000'." in warning


@pytest.mark.parametrize("name", ["dit-s-4", "dit-s-4-rope"])
def test_positions_keep_the_span_of_their_training(name: str, label_store: LatentStore, tmp_path: Path) -> None:
    """A run at twice the side begins as the same function of the old sizes."""
    rope = ["model.positions=rope"] if name.endswith("rope") else []
    first = tmp_path / "first"
    recipe = train_recipe("dit-s-4", "run.steps=1", *rope)
    run_to(recipe, label_store, first)
    learned = model_spec(recipe, label_store.spec, "store")
    images = label_store.spec.images.model_copy(update={"resolution_px": 2 * label_store.spec.images.resolution_px})
    large = label_store.spec.model_copy(update={"images": images})
    spec = model_spec(train_recipe("dit-s-4", f"model.init_from={first}", *rope), large, "large")
    assert (position_grid(str(first)), spec.base_size) == (learned.base_size // 4, learned.base_size)
    one, other = build_model(learned, seed=0), build_model(spec, seed=1)
    for model, its in ((one, learned), (other, spec)):
        model.load_state_dict(initial_weights(str(first), model, its)[0])
    conditioning, t = Conditioning(labels=torch.tensor([0])), torch.tensor([300.0])
    with torch.no_grad():
        for size in (learned.base_size, 2 * learned.base_size):
            x = torch.randn(1, learned.channels, size, size)
            assert torch.equal(one.eval()(x, t, conditioning), other.eval()(x, t, conditioning))


def test_weights_of_a_run_with_other_options_are_refused(label_store: LatentStore, tmp_path: Path) -> None:
    """None of these changes a tensor, so the weights would load and compute something else."""
    for option in ("time=share", "norm=rms", "positions=both"):
        first = tmp_path / option
        recipe = train_recipe("dit-s-4", "run.steps=1", f"model.{option}", "objective.kind=flow")
        run_to(recipe, label_store, first)
        other = train_recipe("dit-s-4", f"model.init_from={first}", "objective.kind=flow")
        with pytest.raises(RunError, match=f"was trained with model.{option}, .* Use --set model.{option}"):
            run_to(other, label_store, tmp_path / "second")
