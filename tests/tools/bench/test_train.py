"""What 'leandit bench train' prints is what the loop of a run has measured."""

from __future__ import annotations

import json

import pytest
from forked import run_forked

from leandit.datasets.store import LatentStore

pytestmark = pytest.mark.usefixtures("tiny_models")
MAIN = "from leandit.tools.cli.main import main; main()"
TINY = ["--set", "model.name=DiT-Ti/4", "--set", "run.global_batch=2", "--set", "run.precision=bf16"]


def test_a_recipe_is_measured_on_a_store(label_store: LatentStore) -> None:
    how = ["--store", label_store.path, "--rounds", "2", "--steps", "1", "--device", "cpu"]
    ended = run_forked(["-c", MAIN, "bench", "train", "dit-s-2-256", *map(str, how), *TINY, "--json"])
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [len(found[name]) for name in ("images_per_second", "step_seconds", "peak_gib")] == [2, 2, 2]
    assert min(found["images_per_second"] + found["step_seconds"] + found["peak_gib"]) > 0
    assert all(0 <= share <= 1 for share in found["data_wait_share"])
    assert found["mfu"] == [None, None]
    assert found["batch"] == 2
    assert found["precision"].startswith("fp32 (bf16 was requested, cpu has no fast bf16")


def test_a_recipe_without_a_store_is_a_usage_error() -> None:
    ended = run_forked(["-c", MAIN, "bench", "train", "dit-s-2-256", "--device", "cpu"])
    assert ended.returncode == 2, ended.stderr
    assert "--store" in ended.stderr
