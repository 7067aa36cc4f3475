"""A DiT begins from weights of another patch size or another resolution."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from making import shaken, train_recipe
from shown_runs import run_to

from leandit.datasets.errors import RunError
from leandit.datasets.store import LatentStore
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioning
from leandit.train.models.spec import ModelSpec
from leandit.train.run.fit import model_spec
from leandit.train.weights.init_from import initial_weights
from leandit.train.weights.published import bilinear_map, official_bytes
from leandit.train.weights.sources import position_grid

pytestmark = pytest.mark.usefixtures("tiny_models")
SPEC = ModelSpec(name="DiT-S/2", channels=4, out_channels=8, num_classes=3, caption_width=0, base_size=8)


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 4), (1, 4), (2, 8)])
def test_a_larger_patch_gives_the_same_picture_larger(old: int, new: int, tmp_path: Path) -> None:
    """Each patch of the latents enlarged, the output is that of the source, each patch enlarged likewise."""
    spec = SPEC.model_copy(update={"name": f"DiT-S/{old}", "base_size": 4 * old})
    source = shaken(spec)
    (tmp_path / "source.pt").write_bytes(official_bytes(source.state_dict(), ".pt"))
    other = spec.model_copy(update={"name": f"DiT-S/{new}", "base_size": 4 * new})
    model = build_model(other, seed=1)
    model.load_state_dict(initial_weights(str(tmp_path / "source.pt"), model, other)[0])
    x, t = torch.randn(2, 4, 4 * old, 4 * old), torch.tensor([10.0, 700.0])
    conditioning = Conditioning(labels=torch.tensor([0, 2]))
    with torch.no_grad():
        expected = enlarge(source(x, t, conditioning), old, new)
        got = model.eval()(enlarge(x, old, new), t, conditioning)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def enlarge(x: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """(B, C, 4 old, 4 old) to (B, C, 4 new, 4 new), patch by patch."""
    patches = x.unflatten(3, (4, old)).unflatten(2, (4, old)).permute(0, 1, 2, 4, 3, 5).flatten(4)
    return (
        (patches @ bilinear_map(old, new).float().T)
        .unflatten(4, (new, new))
        .permute(0, 1, 2, 4, 3, 5)
        .reshape(len(x), -1, 4 * new, 4 * new)
    )


def test_a_smaller_patch_knows_a_constant_picture() -> None:
    resize = bilinear_map(4, 2)
    assert torch.allclose(resize.sum(1), torch.ones(4, dtype=torch.float64))
    assert torch.allclose(bilinear_map(2, 2), torch.eye(4, dtype=torch.float64))


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
    images = label_store.spec.images
    large = label_store.spec.model_copy(
        update={"images": images.model_copy(update={"resolution_px": 2 * images.resolution_px})}
    )
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


@pytest.mark.parametrize("option", ["time=share", "norm=rms", "positions=both"])
def test_weights_of_a_run_with_other_options_are_refused(option: str, label_store: LatentStore, tmp_path: Path) -> None:
    """None of these changes a tensor, so the weights would load and compute something else."""
    recipe = train_recipe("dit-s-4", "run.steps=1", f"model.{option}", "objective.kind=flow")
    first = tmp_path / "first"
    run_to(recipe, label_store, first)
    other = train_recipe("dit-s-4", f"model.init_from={first}", "objective.kind=flow")
    with pytest.raises(RunError, match=f"has learned model.{option}, .* Use --set model.{option}"):
        run_to(other, label_store, tmp_path / "second")
