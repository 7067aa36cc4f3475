"""Trained runs for the tests of this folder; do not change them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from making import train_recipe
from runs import run_to

from leandit.datasets.store import LatentStore


@pytest.fixture(scope="module")
def runs(label_store: LatentStore, caption_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trained run on labels and one on captions."""
    root = tmp_path_factory.mktemp("runs")
    for name, store in (("dit-s-4", label_store), ("pixart-tiny", caption_store)):
        recipe = train_recipe(name, "run.steps=4", "run.ema_decay=0.0", "run.checkpoint_every=4", "optimizer.lr=1e-2")
        run_to(recipe, store, root / name)
    return SimpleNamespace(labels=root / "dit-s-4", captions=root / "pixart-tiny")
