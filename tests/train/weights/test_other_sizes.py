"""A DiT begins from weights of another resolution, not of another patch size or other options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from making import train_recipe
from runs import run_to

from leandit.datasets.errors import RunError
from leandit.datasets.store import LatentStore
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioning
from leandit.train.run.fit import model_spec
from leandit.train.weights.init_from import initial_weights
from leandit.train.weights.sources import position_grid

pytestmark = pytest.mark.usefixtures("tiny_models")


@pytest.mark.parametrize("name", ["dit-s-4", "dit-s-4-rope"])
def test_positions_keep_the_span_that_they_were_trained_with(
    name: str, label_store: LatentStore, tmp_path: Path
) -> None:
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
