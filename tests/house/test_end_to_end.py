"""The whole way, small: images, store, training, samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from making import CPU, train_recipe

from leandit.datasets.store import LatentStore
from leandit.train.loop import StopRequest, train


@pytest.mark.usefixtures("tiny_models")
def test_training_on_labels_makes_a_snapshot(label_store: LatentStore, tmp_path: Path) -> None:
    seen = []
    outcome = train(
        train_recipe(),
        store_path=label_store.path,
        run=tmp_path / "run",
        device=CPU,
        report=seen.append,
        stop=StopRequest(),
    )
    assert outcome.finished
    assert [figures.step for figures in seen] == [1, 2, 3, 4, 5, 6]
