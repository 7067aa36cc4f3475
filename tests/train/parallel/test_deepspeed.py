"""A ds_config.json and the recipe: the file holds, what it leaves open comes from the recipe."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from making import CPU, ROOT, train_recipe

from leandit.errors import RecipeError
from leandit.recipe import flatten
from leandit.tools.plan.dry_run import describe_train
from leandit.tools.plan.strategies import with_ds_config
from leandit.train.config import ParallelSection, TrainRecipe
from leandit.train.parallel.deepspeed_config import config_for_deepspeed, drop_unknown, may_compile, merge, read_config

RECIPE = train_recipe("dit-s-4", "run.grad_clip=0.5", "run.microbatch=2")
DOCS = ROOT / "docs"
FOUR_PARTS = {"gradient_accumulation_steps": 4}


def file(config: dict[str, Any]) -> dict[str, Any]:
    """A file with stage 2 of ZeRO, read."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as written:
        json.dump({"zero_optimization": {"stage": 2}} | config, written)
        written.flush()
        return read_config(written.name)


def both(config: dict[str, Any], *overrides: str) -> tuple[TrainRecipe, list[str]]:
    """The recipe by a file, for two ranks, and the table of differences."""
    recipe = train_recipe("dit-s-4", "run.grad_clip=0.5", "run.microbatch=2", *overrides)
    return merge(file(config), recipe, 2)


def test_what_is_auto_missing_or_null_comes_from_the_recipe_and_weights_stay_float32() -> None:
    adam = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
    none = dict.fromkeys(("fp16", "bf16", "torch_autocast", "scheduler", "activation_checkpointing"))
    zero = {"stage": 2, "offload_param": None, "offload_optimizer": None}
    config = {"gradient_clipping": "auto", "train_batch_size": "auto", "optimizer": adam, "zero_optimization": zero}
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}}
    assert both(config | {"scheduler": schedule}) == (RECIPE, [])
    assert both(config | none) == (RECIPE, [])
    made = config_for_deepspeed(file(config | none), RECIPE, torch.float16)
    assert made == {
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "torch_autocast": {"enabled": True, "dtype": "float16", "lower_precision_safe_modules": []},
    }


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        ({"gradient_clipping": 1.0}, "run.grad_clip", 1.0),
        ({"train_batch_size": 64}, "run.global_batch", 64),
        ({"train_micro_batch_size_per_gpu": 4}, "run.microbatch", 4),
        (FOUR_PARTS, "run.microbatch", 1),  # 8 images, 2 ranks
        (FOUR_PARTS | {"train_batch_size": 32}, "run.microbatch", 4),
        (FOUR_PARTS | {"train_micro_batch_size_per_gpu": 3}, "run.global_batch", 24),
        ({"fp16": {"enabled": True}}, "run.precision", "fp16"),
        ({"bf16": {"enabled": True}}, "run.precision", "bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "run.precision", "fp16"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 3.0}}}, "optimizer.lr", 3.0),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.9]}}}, "optimizer.betas", [0.8, 0.9, 0.9999]),
        ({"activation_checkpointing": {}}, "run.activation_checkpointing", "blocks"),
        ({"scheduler": {"type": "WarmupCosineLR"}}, "schedule.kind", "cosine"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, "schedule.warmup_steps", 9),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3.0}}}, "optimizer.lr", 3.0),
    ],
)
def test_where_they_differ_the_file_holds_and_the_table_says_so(config: dict[str, Any], key: str, value: Any) -> None:
    merged, (header, *rows) = both(config)
    assert flatten(merged.model_dump())[key] == value
    assert header.split() == ["key", "recipe", "ds_config.json", "(takes", "precedence)"]
    assert [row.split()[0] for row in rows if row.split()[0] == key] == [key]
    assert merge(file(config), merged, 2) == (merged, [])


def test_a_disabled_precision_asks_for_float32_and_what_would_change_adamw_is_said_to_be_unused() -> None:
    merged, (_, row) = both({"bf16": {"enabled": False}}, "run.precision=bf16")
    assert (merged.run.precision, row.split()) == ("fp32", ["run.precision", "bf16", "fp32"])
    assert both({"fp16": {"enabled": False}}, "run.precision=bf16")[0].run.precision == "bf16"
    _, table = both({"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}}})
    assert any("optimizer.params.adam_w_mode" in line and "it is torch's AdamW" in line for line in table)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, **FOUR_PARTS}, "64 is not 4"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0, expected a whole number"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer 'lamb' with DeepSpeed: expected 'adamw'"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "optimizer.lr would be -1"),
        ({"zero_optimization": {}}, "zero_optimization.stage is None, expected 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "offload_param": "cpu"}}, "zero_optimization.offload_param is 'cpu'"),
        ({"optimizer": "adam"}, "optimizer is 'adam', expected an object"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type is 'OneCycle', expected WarmupLR or WarmupCosineLR"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "only 'cpu' can be saved"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_its_key(config: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        both(config)


def test_the_configs_of_the_documentation_are_read_as_they_are() -> None:
    sample = read_config(str(DOCS / "ds-zero-2.json"))
    assert not list(drop_unknown(sample))
    for precision in ("fp32", "bf16", "fp16"):
        recipe = train_recipe("dit-s-4", f"run.precision={precision}")
        assert merge(sample, recipe, 2) == (recipe, [])
    path = str(DOCS / "ds-stable-diffusion.json")
    config = read_config(path)
    (line,) = drop_unknown(config)
    assert "no key 'zero_optimization.stage3_max_reuse_parameters'" in line
    assert line.endswith("Did you mean 'stage3_max_reuse_distance'?")
    merged, table = merge(config, RECIPE, 2)
    assert may_compile(ParallelSection(deepspeed_config=path)) == (config["zero_optimization"]["stage"] < 3)
    assert (merged.run.precision, merged.run.microbatch, merged.optimizer.lr) == ("fp16", 1, 1e-5)
    for key in ("partition_activations", "cpu_checkpointing", "initial_scale_power"):
        assert any(key in line and "not used" in line for line in table)


def test_a_dry_run_shows_the_recipe_as_the_file_changes_it_and_what_cannot_run(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"gradient_clipping": 0.25, "zero_optimization": {"stage": 2}, "steps_per_prints": 1}')
    recipe = train_recipe("dit-s-4", f"parallel.deepspeed_config={path}")
    lines = describe_train(recipe, None, CPU).splitlines()
    assert "grad_clip = 0.25" in lines
    table = lines[lines.index("[parallel]") :]
    assert ["#", "run.grad_clip", "1.0", "0.25"] in [line.split() for line in table]
    assert any("no key 'steps_per_prints'" in line for line in table)
    other = train_recipe("dit-s-4", f"parallel.deepspeed_config={path}", "parallel.strategy=ddp")
    text = describe_train(other, None, CPU)
    assert re.search(r"\ncannot run yet +parallel\.strategy 'ddp': there is only one rank", text)


def test_a_plan_is_of_the_recipe_as_the_file_changes_it_on_so_many_gpus(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": 64, "gradient_accumulation_steps": 2}')
    recipe, table = with_ds_config(train_recipe("dit-s-4", f"parallel.deepspeed_config={path}"), 8)
    assert (recipe.run.global_batch, recipe.run.microbatch) == (64, 4)
    assert [line.split()[0] for line in table] == ["key", "run.global_batch", "run.microbatch"]
    assert with_ds_config(RECIPE, 8) == (RECIPE, [])


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_a_config_that_cannot_be_read_is_named(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecipeError, match=r"ds\.json"):
        read_config(str(path))
