"""A ds_config.json and the recipe: the file holds, what it leaves open comes from the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from making import CPU, ROOT, train_recipe

from leandit.datasets.errors import RecipeError
from leandit.datasets.recipe import flatten
from leandit.datasets.store import LatentStore
from leandit.tools.plan.dry_run import describe_train
from leandit.tools.plan.strategies import with_ds_config
from leandit.train.loop import train
from leandit.train.parallel.deepspeed_config import ResolvedConfig, read_config, resolve
from leandit.train.parallel.deepspeed_keys import drop_unknown
from leandit.train.parallel.stop import StopRequest

RECIPE = train_recipe("dit-s-4", "run.grad_clip=0.5", "run.microbatch=2")
DOCS = ROOT / "docs"


def both(config: dict[str, Any], *overrides: str, world_size: int = 2) -> ResolvedConfig:
    recipe = train_recipe("dit-s-4", "run.grad_clip=0.5", "run.microbatch=2", *overrides)
    return resolve({"zero_optimization": {"stage": 2}} | config, recipe, world_size)


def test_what_is_auto_or_missing_comes_from_the_recipe() -> None:
    adam = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
    found = both({"gradient_clipping": "auto", "train_batch_size": "auto", "optimizer": adam})
    assert found.config["gradient_clipping"] == 0.5
    assert found.config["optimizer"]["params"] == {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0, "eps": 1e-8}
    assert found.recipe == RECIPE
    assert not found.notes


def test_weights_stay_float32() -> None:
    found = both({"fp16": {"enabled": True}})
    assert (found.config["bf16"], found.config["fp16"]) == ({"enabled": False}, {"enabled": False})


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        ({"gradient_clipping": 1.0}, "run.grad_clip", 1.0),
        ({"train_batch_size": 64}, "run.global_batch", 64),
        ({"train_micro_batch_size_per_gpu": 4}, "run.microbatch", 4),
        ({"gradient_accumulation_steps": 4}, "run.microbatch", 1),  # 8 images, 2 ranks
        ({"gradient_accumulation_steps": 4, "train_batch_size": 32}, "run.microbatch", 4),
        ({"gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 3}, "run.global_batch", 24),
        ({"fp16": {"enabled": True}}, "run.precision", "fp16"),
        ({"bf16": {"enabled": True}}, "run.precision", "bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "run.precision", "fp16"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 3.0}}}, "optimizer.lr", 3.0),
        ({"optimizer": {"type": "Adam", "params": {"eps": 1e-6}}}, "optimizer.eps", 1e-6),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.9]}}}, "optimizer.betas", [0.8, 0.9, 0.9999]),
        ({"activation_checkpointing": {}}, "run.activation_checkpointing", "blocks"),
    ],
)
def test_where_they_differ_the_file_holds_and_the_table_says_so(config: dict[str, Any], key: str, value: Any) -> None:
    found = both(config)
    assert flatten(found.recipe.model_dump())[key] == value
    header, *rows = found.notes
    assert header.split() == ["key", "recipe", "ds_config.json,", "which", "holds"]
    assert [row.split()[0] for row in rows if row.split()[0] == key] == [key]
    assert resolve({"zero_optimization": {"stage": 2}} | config, found.recipe, 2).notes == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
            "64 is not 4",
        ),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0, needed a whole number"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer 'lamb' with DeepSpeed: needed 'adamw'"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "optimizer.lr would be -1"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": "auto"}}}, 'cycle_min_lr is "auto"'),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage is 0, needed 1, 2 or 3"),
        ({"zero_optimization": {}}, "zero_optimization.stage is None"),
        ({"zero_optimization": [2]}, r"zero_optimization is \[2\], needed an object"),
        ({"zero_optimization": {"stage": 2, "offload_param": "cpu"}}, "zero_optimization.offload_param is 'cpu'"),
        ({"bf16": True}, "bf16 is True, needed an object"),
        ({"optimizer": "adam"}, "optimizer is 'adam', needed an object"),
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "optimizer.betas would be 0.9"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "only 'cpu' can be saved"),
    ],
)
def test_what_cannot_be_resolved_is_refused_by_its_key(config: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        both(config)


def test_a_file_that_disables_the_recipes_precision_asks_for_float32() -> None:
    found = both({"bf16": {"enabled": False}}, "run.precision=bf16")
    assert found.recipe.run.precision == "fp32"
    assert found.notes[1].split() == ["run.precision", "bf16", "fp32"]
    assert both({"fp16": {"enabled": False}}, "run.precision=bf16").recipe.run.precision == "bf16"


def test_a_section_that_is_null_is_as_if_it_were_not_there() -> None:
    zero = {"stage": 2, "offload_param": None, "offload_optimizer": None}
    none = dict.fromkeys(("fp16", "bf16", "torch_autocast", "optimizer", "scheduler", "activation_checkpointing"))
    found = both({"zero_optimization": zero} | none)
    assert (found.recipe, found.config, found.notes) == (RECIPE, both({}).config, [])


def test_a_scheduler_of_the_file_is_filled_from_the_recipe_and_told() -> None:
    params = {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    found = both({"scheduler": {"type": "WarmupLR", "params": params}}, "schedule.warmup_steps=7")
    assert found.config["scheduler"]["params"] == {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 7}
    assert found.notes[1].split() == ["scheduler", "schedule.kind", "constant", "WarmupLR"]


def test_the_config_of_a_guide_is_read_as_it_is() -> None:
    config = read_config(str(DOCS / "ds-stable-diffusion.json"))
    (line,) = drop_unknown(config)
    assert "no key 'zero_optimization.stage3_max_reuse_parameters'" in line
    assert line.endswith("The nearest that it has is 'stage3_max_reuse_distance'.")
    found = resolve(config, RECIPE, 2)
    assert found.cpu_checkpointing
    assert found.loss_scaler == {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    run, optimizer = found.recipe.run, found.recipe.optimizer
    assert (run.precision, run.microbatch, run.activation_checkpointing) == ("fp16", 1, "blocks")
    assert optimizer.lr == 1e-5
    assert any("partition_activations" in line and "not used" in line for line in found.notes)


def test_the_sample_is_a_config_for_every_precision() -> None:
    config = read_config(str(DOCS / "ds-zero-2.json"))
    assert not list(drop_unknown(config))
    for precision in ("fp32", "bf16", "fp16"):
        assert resolve(config, train_recipe("dit-s-4", f"run.precision={precision}"), 2).notes == []


def test_fp16_is_refused_where_deepspeed_has_none(label_store: LatentStore, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}')
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().is_fp16_supported():
        pytest.skip("this CPU has float16")
    with pytest.raises(RecipeError, match="device 'cpu' has no float16"):
        train(
            train_recipe("dit-s-4", f"parallel.deepspeed_config={path}"),
            store_path=label_store.path,
            run=tmp_path / "run",
            device=CPU,
            report=lambda _: None,
            stop=StopRequest(),
        )


def test_a_dry_run_shows_the_recipe_as_the_file_changes_it(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"gradient_clipping": 0.25, "zero_optimization": {"stage": 2}, "steps_per_prints": 1}')
    lines = describe_train(train_recipe("dit-s-4", f"parallel.deepspeed_config={path}"), None, CPU).splitlines()
    assert "grad_clip = 0.25" in lines
    table = lines[lines.index("[parallel]") :]
    assert ["#", "run.grad_clip", "1.0", "0.25"] in [line.split() for line in table]
    assert any("no key 'steps_per_prints'" in line for line in table)
    assert not any("cannot run yet" in line for line in table)


def test_a_dry_run_shows_what_cannot_run_here_and_why(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "gradient_clipping": 0.25}')
    recipe = train_recipe("dit-s-4", f"parallel.deepspeed_config={path}", "parallel.strategy=ddp")
    text = describe_train(recipe, None, CPU)
    assert "\ngrad_clip = 0.25\n" in text
    assert "\ncannot run yet      parallel.strategy 'ddp': there is one rank" in text


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


def test_the_users_config_is_not_changed() -> None:
    config = {"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"}
    before = json.dumps(config)
    resolve(config, RECIPE, 1)
    assert json.dumps(config) == before
