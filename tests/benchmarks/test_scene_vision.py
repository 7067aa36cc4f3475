"""The small vision model that benchmarks/learning.py takes as a teacher and to measure samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from scene_vision import train_vision

pytestmark = pytest.mark.usefixtures("tiny_models")


def test_the_vision_model_learns_what_lies_in_a_patch(tmp_path: Path) -> None:
    accuracy = train_vision(tmp_path, seed=0, steps=60, num_images=128, progress=lambda step, steps: None)
    assert accuracy > 0.6  # two thirds of the patches are background
    files = {path.name for path in tmp_path.iterdir()}
    assert files >= {"config.json", "model.safetensors", "preprocessor_config.json"}
