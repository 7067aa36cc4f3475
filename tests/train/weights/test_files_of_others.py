"""Weights that others saved: which files of a folder are read, names with wrappers, averages, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.training_utils import EMAModel
from making import Leandit, shaken, train_recipe
from runs import run_to
from safetensors.torch import load_file, save_file
from torch import Tensor

from leandit.datasets.store import LatentStore
from leandit.errors import EncoderError, RunError
from leandit.precompute.config import VaeSection
from leandit.precompute.encoders.model_files import VAE_WEIGHTS, ModelFiles, local_folder, weight_files
from leandit.train.models.build import build_model, diffusers_config, transformer_class
from leandit.train.models.spec import ModelSpec
from leandit.train.weights.init_from import initial_weights
from leandit.train.weights.sources import position_grid

pytestmark = pytest.mark.usefixtures("tiny_models")
SPEC = ModelSpec(name="DiT-S/2", channels=4, out_channels=8, num_classes=3, caption_width=0, base_size=8)
STEM = "diffusion_pytorch_model"
SINGLE = f"{STEM}.safetensors"
INDEX = f"{SINGLE}.index.json"


def saved_pixart(folder: Path) -> Any:
    """A transformer of diffusers that fits the caption store, saved in shards."""
    torch.manual_seed(1)
    sizes: Any = {"channels": 4, "out_channels": 4, "num_classes": 0, "caption_width": 64, "base_size": 8}
    model = transformer_class("pixart")(**diffusers_config(ModelSpec(name="pixart-tiny", **sizes)))
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


def shards_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"{STEM}-*.safetensors"))


def in_one_file(folder: Path, weights: dict[str, Tensor]) -> None:
    for name in (*shards_of(folder), INDEX):
        (folder / name).unlink()
    save_file(weights, folder / SINGLE)


def other(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor + 1 for name, tensor in weights.items()}


def add_variant(name: str) -> Callable[[Path, dict[str, Tensor]], None]:
    return lambda folder, weights: save_file(other(weights), folder / f"{STEM}.{name}.safetensors")


def add_sharded_variant(folder: Path, weights: dict[str, Tensor]) -> None:
    shard = f"{STEM}.bf16-00001-of-00001.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / shard)
    (folder / f"{STEM}.safetensors.index.bf16.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(weights, shard)})
    )


def add_older_single(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(other(weights), folder / SINGLE)


def add_older_shards(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(other(weights), folder / f"{STEM}-00001-of-00009.safetensors")


def single_with_variant(folder: Path, weights: dict[str, Tensor]) -> None:
    in_one_file(folder, weights)
    add_variant("non_ema")(folder, weights)


def wrap(prefix: str, at: str = "") -> Callable[[Path, dict[str, Tensor]], None]:
    """Names as torch.compile, DDP and others save them, before all or within them."""

    def change(folder: Path, weights: dict[str, Tensor]) -> None:
        in_one_file(folder, {_wrapped(name, prefix, at): tensor for name, tensor in weights.items()})

    return change


def _wrapped(name: str, prefix: str, at: str) -> str:
    return name.replace(at, f"{at}{prefix}", 1) if at else f"{prefix}{name}"


FOLDERS: dict[str, Callable[[Path, dict[str, Tensor]], None]] = {
    "shards": lambda folder, weights: None,
    "shards and a bf16 variant": add_variant("bf16"),
    "shards and an fp16 variant": add_variant("fp16"),
    "shards and a non_ema variant": add_variant("non_ema"),
    "shards and a sharded variant": add_sharded_variant,
    "shards and an older single file": add_older_single,
    "shards and older shards": add_older_shards,
    "a single file": in_one_file,
    "a single file and a variant": single_with_variant,
    "compiled": wrap("_orig_mod."),
    "compiled under DDP": wrap("module._orig_mod."),
    "with compiled blocks": wrap("_orig_mod.", at="transformer_blocks.0."),
    "under FSDP, checkpointed": wrap("_fsdp_wrapped_module._checkpoint_wrapped_module.", at="transformer_blocks.1."),
}


@pytest.fixture(scope="module")
def pixart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """The folder of a transformer in shards, and its weights."""
    folder = tmp_path_factory.mktemp("pixart")
    model = saved_pixart(folder)
    return folder, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_gives_the_weights_that_diffusers_loads(
    case: str, pixart: tuple[Path, dict[str, Tensor]], caption_store: LatentStore, tmp_path: Path
) -> None:
    folder, weights = tmp_path / "folder", pixart[1]
    shutil.copytree(pixart[0], folder)
    assert len(shards_of(folder)) > 1
    FOLDERS[case](folder, weights)
    recipe = train_recipe("pixart-tiny", f"model.init_from={folder}", "run.steps=1", "optimizer.lr=1e-30")
    run_to(recipe, caption_store, tmp_path / "run")
    begun = load_file(tmp_path / "run/checkpoint-1/model.safetensors")
    assert begun.keys() == {f"net.{name}" for name in weights}
    for name, tensor in weights.items():
        torch.testing.assert_close(begun[f"net.{name}"], tensor, rtol=0, atol=1e-6)


def a_tensor_twice(folder: Path) -> None:
    first, second = shards_of(folder)[:2]
    tensors = load_file(folder / first)
    name = next(iter(tensors))
    save_file(load_file(folder / second) | {name: tensors[name]}, folder / second)


def variant_alone(folder: Path) -> None:
    for name in (*shards_of(folder), INDEX):
        (folder / name).unlink()
    save_file({"a": torch.zeros(1)}, folder / f"{STEM}.bf16.safetensors")


def wrapped_and_plain(folder: Path) -> None:
    weights = {name: tensor for shard in shards_of(folder) for name, tensor in load_file(folder / shard).items()}
    name = next(iter(weights))
    in_one_file(folder, weights | {f"module.{name}": torch.zeros(1)})


def set_index(content: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / INDEX).write_text(json.dumps(content))


def adapters_alone(folder: Path) -> None:
    (folder / "config.json").unlink()
    save_file({"a": torch.zeros(1)}, folder / "pytorch_lora_weights.safetensors")


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor in two shards": (a_tensor_twice, "is in 'diffusion_pytorch_model-00001.*' and in '.*-00002"),
    "a variant alone": (variant_alone, r"only the variant 'bf16'.*variant='bf16'"),
    "shards without their index": (lambda folder: (folder / INDEX).unlink(), "only shards without it"),
    "a missing shard": (lambda folder: (folder / shards_of(folder)[0]).unlink(), "-00001-of-.*which is not there"),
    "a name with and without a wrapper": (wrapped_and_plain, "it has two tensors '"),
    "an index that leaves the folder": (set_index({"weight_map": {"a": "../a.safetensors"}}), "expected only safeten"),
    "an index of nothing": (set_index({}), "has no 'weight_map'"),
    "adapters": (adapters_alone, r"but adapters \(LoRA\). Merge them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_diffusers_would_not_load_is_refused(
    case: str, pixart: tuple[Path, dict[str, Tensor]], caption_store: LatentStore, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(pixart[0], folder)
    change, words = REFUSED[case]
    change(folder)
    with pytest.raises(RunError, match=words):
        run_to(train_recipe("pixart-tiny", f"model.init_from={folder}"), caption_store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_averages_of_diffusers_scripts_are_read(caption_store: LatentStore, tmp_path: Path) -> None:
    """EMAModel.save_pretrained writes its own settings into the config."""
    model = saved_pixart(tmp_path / "saved")
    average = EMAModel(model.parameters(), decay=0.5, model_cls=type(model), model_config=model.config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    average.step(model.parameters())
    average.save_pretrained(tmp_path / "checkpoint-500/transformer_ema")
    assert "decay" in json.loads((tmp_path / "checkpoint-500/transformer_ema/config.json").read_text())
    expected = load_file(tmp_path / f"checkpoint-500/transformer_ema/{SINGLE}")
    source = tmp_path / "checkpoint-500/transformer_ema"
    recipe = train_recipe("pixart-tiny", f"model.init_from={source}", "run.steps=1", "optimizer.lr=1e-30")
    run_to(recipe, caption_store, tmp_path / "run")
    begun = load_file(tmp_path / "run/checkpoint-1/model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(begun[f"net.{name}"], tensor, rtol=0, atol=1e-6)
    with pytest.raises(RunError, match="transformer_ema: name the one that is meant"):
        run_to(train_recipe("pixart-tiny", f"model.init_from={source.parent}"), caption_store, tmp_path / "other")


def test_a_file_of_another_model_is_not_called_missing(
    caption_store: LatentStore, leandit: Leandit, tmp_path: Path
) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    ended = leandit(
        *("train", "demo", "--store", caption_store.path, "--run", tmp_path / "run", "--device", "cpu"),
        *("--set", "model.name=pixart-tiny", "--set", f"model.init_from={tmp_path / 'model.safetensors'}"),
    )
    assert ended.code == 3
    assert "it is a file. Expected a folder or hub id of a diffusers pipeline" in ended.err
    assert "no such folder" not in ended.err


# --- files of a DiT ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def official() -> dict[str, Tensor]:
    return {name.removeprefix("net."): tensor for name, tensor in shaken(SPEC).state_dict().items()}


def under(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in weights.items()}


CONTENTS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "compiled": lambda weights: {"model": under("_orig_mod.", other(weights)), "ema": under("_orig_mod.", weights)},
    "DDP of compiled": lambda weights: {"model": under("module._orig_mod.", weights)},
    "compiled DDP": lambda weights: under("_orig_mod.module.", weights),
    "compiled blocks": lambda weights: {
        name.replace("blocks.0.", "blocks.0._orig_mod."): tensor for name, tensor in weights.items()
    },
    "state_dict": lambda weights: {"state_dict": weights, "epoch": 3},
    "PixArt's": lambda weights: {"state_dict": other(weights), "state_dict_ema": weights},
    "PixArt's without an average": lambda weights: {"state_dict": weights, "state_dict_ema": None},
    "DeepSpeed's": lambda weights: {"module": under("module.", weights), "dp_world_size": 1},
    "AveragedModel": lambda weights: under("module.", weights) | {"n_averaged": torch.tensor(5)},
}


@pytest.mark.parametrize(
    ("case", "suffix"), [*((case, ".pt") for case in CONTENTS), *(("state_dict", end) for end in (".ckpt", ".bin", ""))]
)
def test_a_file_gives_its_weights_by_their_plain_names(
    case: str, suffix: str, official: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / f"weights{suffix}"
    torch.save(CONTENTS[case](official), path)
    weights, _ = initial_weights(str(path), build_model(SPEC, seed=9), SPEC)
    assert weights.keys() == official.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in official.items())
    assert position_grid(str(path)) == 4


# --- encoders ---------------------------------------------------------------------------------------------------------


def vae_files(folder: Path) -> ModelFiles:
    return ModelFiles(VaeSection(model=str(folder), subfolder=""), "vae.model", stem=VAE_WEIGHTS)


def test_an_encoder_is_identified_by_the_files_that_its_library_loads(tmp_path: Path) -> None:
    shipped = local_folder("shipped:vae")
    assert shipped
    shutil.copytree(shipped, tmp_path / "vae")
    plain = vae_files(tmp_path / "vae").identity("AutoencoderKL", "float32", "diffusers").weights_sha256
    weights = load_file(shipped / SINGLE)
    for variant in ("bf16", "fp16", "non_ema"):
        add_variant(variant)(tmp_path / "vae", weights)
    files = vae_files(tmp_path / "vae")
    assert [path.name for path in files.weights] == [SINGLE]
    assert files.identity("AutoencoderKL", "float32", "diffusers").weights_sha256 == plain
    model: Any = AutoencoderKL.from_pretrained(shipped, low_cpu_mem_usage=False)
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    add_older_single(tmp_path / "shards", weights)
    named = [path.name for path in vae_files(tmp_path / "shards").weights]
    assert named == shards_of(tmp_path / "shards")
    assert len(named) > 1
    loaded: Any = AutoencoderKL.from_pretrained(tmp_path / "shards", low_cpu_mem_usage=False)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in weights.items())
    a_tensor_twice(tmp_path / "shards")
    with pytest.raises(EncoderError, match="is in two of its files"):
        _ = vae_files(tmp_path / "shards").weights


def test_a_text_encoder_in_one_file_and_in_shards_is_that_of_the_file(tmp_path: Path) -> None:
    """As transformers, and unlike diffusers, chooses."""
    for name in ("model.safetensors", "model-00001-of-00001.safetensors", "model.bf16.safetensors"):
        save_file({"a": torch.zeros(1)}, tmp_path / name)
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(tmp_path, "model", what="text.model")] == ["model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert [path.name for path in weight_files(tmp_path, "model", what="text.model")] == [*index["weight_map"].values()]
