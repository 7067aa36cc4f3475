"""What a ds_config.json may say beside the recipe: the same, "auto" or nothing; what contradicts it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from making import train_recipe

from leandit.datasets.errors import RecipeError
from leandit.train.config import TrainRecipe
from leandit.train.deepspeed_config import read_config, resolve_config

RECIPE = train_recipe("dit-s-4", "run.grad_clip=0.5", "run.microbatch=2")
SAMPLE = Path(__file__).parents[1] / "docs/ds-zero-2.json"


def resolve(config: dict[str, Any], recipe: TrainRecipe = RECIPE, dtype: torch.dtype | None = None) -> dict[str, Any]:
    return resolve_config({"zero_optimization": {"stage": 2}} | config, recipe, dtype)


def test_what_is_auto_or_missing_comes_from_the_recipe() -> None:
    adam = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
    found = resolve({"gradient_clipping": "auto", "train_batch_size": "auto", "optimizer": adam})
    assert found["gradient_clipping"] == 0.5
    assert found["optimizer"]["params"] == {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0, "eps": 1e-8}
    assert "train_batch_size" not in found
    assert resolve({})["gradient_clipping"] == 0.5


def test_weights_stay_float32_and_the_forward_is_cast() -> None:
    found = resolve({"bf16": {"enabled": "auto"}}, dtype=torch.bfloat16)
    assert (found["bf16"]["enabled"], found["fp16"]["enabled"]) == (False, False)
    assert found["torch_autocast"] == {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert "torch_autocast" not in resolve({})


def test_whose_gradients_travel_in_16_bits_is_what_the_config_says() -> None:
    said = {"torch_autocast": {"enabled": "auto", "lower_precision_safe_modules": ["torch.nn.Linear"]}}
    assert resolve(said, dtype=torch.bfloat16)["torch_autocast"]["lower_precision_safe_modules"] == ["torch.nn.Linear"]


def test_what_is_equal_is_taken_and_what_else_stands_there_is_left_alone() -> None:
    found = resolve({"gradient_clipping": 0.5, "train_batch_size": 8, "wall_clock_breakdown": True})
    assert (found["gradient_clipping"], found["wall_clock_breakdown"]) == (0.5, True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0, by the recipe it is 0.5"),
        ({"train_batch_size": 64}, "train_batch_size is 64, by the recipe it is 8"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu is 4, by the recipe it is 2"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is True, by the recipe it is False"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is True, by the recipe it is False"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled is True, by the recipe it is False"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 3.0}}}, "optimizer.params.lr is 3.0"),
        ({"optimizer": {"type": "Adam", "params": {"eps": 1e-6}}}, "optimizer.params.eps is 1e-06"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer 'lamb' with DeepSpeed: needed 'adamw'"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage is 0, needed 1, 2 or 3"),
        ({"zero_optimization": {}}, "zero_optimization.stage is None"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "only 'cpu' can be saved"),
        ({"activation_checkpointing": {}}, "run.activation_checkpointing is 'none'"),
    ],
)
def test_what_contradicts_the_recipe_is_refused_by_its_key(config: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        resolve(config)


def test_the_sample_is_a_config_for_every_precision() -> None:
    for dtype in (None, torch.bfloat16):
        resolve(read_config(str(SAMPLE)), dtype=dtype)


@pytest.mark.parametrize("key", ["run.precision=fp16", "optimizer.decay_all=false"])
def test_what_deepspeed_would_do_otherwise_is_refused(key: str) -> None:
    with pytest.raises(RecipeError, match="with DeepSpeed"):
        resolve({"optimizer": {"type": "AdamW"}}, train_recipe("dit-s-4", key))


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_a_config_that_cannot_be_read_is_named(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecipeError, match=r"ds\.json"):
        read_config(str(path))


def test_the_users_config_is_not_changed() -> None:
    config = {"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"}
    before = json.dumps(config)
    resolve_config(config, RECIPE, None)
    assert json.dumps(config) == before
