"""The decoder of a store or run in every command that shows images: what it is given, and where it may come from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from click.testing import Result
from hub_server import Hub
from making import CPU, label_recipe, no_progress, train_recipe
from runs import run_to
from stores import copy_of, rewrite_recipe
from tiny_autoencoders import save_autoencoder
from tiny_models import make_dinov2
from typer.testing import CliRunner

from leandit.datasets.batches.latents import denormalise
from leandit.datasets.store import LatentStore
from leandit.errors import EncoderError
from leandit.precompute.pipeline import precompute
from leandit.tools.cli.commands import app
from leandit.tools.inspection.images import LatentDecoder
from leandit.tools.sample.decode_grids import decode_grids
from leandit.tools.sample.evaluation.images import decoded_images
from leandit.tools.sample.request import SampleRequest
from leandit.tools.sample.sample import sample_grid
from leandit.train.loop import StopRequest, train
from leandit.train.run.evaluation.decoding import Decoding
from leandit.train.sampling.snapshot import load_snapshot

pytestmark = pytest.mark.usefixtures("tiny_models")

LARGE = {"latent_channels": 5, "scaling_factor": 0.25, "shift_factor": 0.5, "block_out_channels": (8, 8, 16)}
LARGE |= {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
RUN = ["model.channels=0", "run.steps=1"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, class_folder: Path) -> Path:
    """A store of a KL autoencoder, and tiny ones: for the same latents, and for others."""
    root = tmp_path_factory.mktemp("home")
    save_autoencoder(root / "large", "kl", **LARGE)
    save_autoencoder(root / "tiny", "tiny")
    save_autoencoder(root / "other", "tiny", latent_channels=16)
    recipe = label_recipe(f"vae.model={root / 'large'}")
    precompute(recipe, source_path=class_folder, store_path=root / "store", device=CPU, progress=no_progress)
    return root


@pytest.fixture(scope="module")
def store(home: Path) -> LatentStore:
    return LatentStore(home / "store")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the tiny autoencoder is given to decode."""
    seen, decode = list[torch.Tensor](), diffusers.AutoencoderTiny.decode
    noting = lambda self, x, *more, **how: (seen.append(x), decode(self, x, *more, **how))[1]  # noqa: E731
    monkeypatch.setattr(diffusers.AutoencoderTiny, "decode", noting)
    return seen


def leandit(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)), obj=StopRequest())


def assert_given(given: list[torch.Tensor], raw: np.ndarray) -> None:
    """Latents as the model sees them, of raw ones of the large autoencoder."""
    assert np.allclose(torch.cat(given).numpy(), (raw - 0.5) * 0.25, atol=1e-3)


def test_a_tiny_vae_decodes_a_store(home: Path, store: LatentStore, given: list[torch.Tensor], tmp_path: Path) -> None:
    bucket = next(iter(store.buckets))
    means = store.latents(bucket).take(store.index(bucket).rows)[:, :5].astype(np.float32)
    named, count = ["--vae", home / "tiny"], len(means)
    decoder = LatentDecoder.of_store(store, str(home / "tiny"), CPU)
    read = decoded_images(store, str(home / "tiny"), CPU).read
    ended = leandit("inspect", store.path, "--sheet", tmp_path / "a", "--vae", home / "other")
    assert isinstance(ended.exception, EncoderError)
    assert re.search("it decodes 16 channels of 1/4 of the .* store .* have 5 of 1/4", str(ended.exception))
    for show in (
        lambda: leandit("inspect", store.path, "--sheet", tmp_path / "a.png", "--count", count, *named),
        lambda: leandit("report", store.path, "--out", tmp_path / "a.html", "--count", count, *named),
        lambda: decoder.decode_rows(store.latents(bucket).take(store.index(bucket).rows)),
        lambda: list(read([np.arange(count)])),
    ):
        given.clear()
        show()
        assert_given(given, means)


@pytest.mark.parametrize("normalise", ["encoder", "store"])
def test_a_tiny_vae_decodes_a_run(
    normalise: str, home: Path, store: LatentStore, given: list[torch.Tensor], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Decoding, "start", lambda self: None)
    recipe = train_recipe("dit-s-4", *RUN, f"latent.normalise={normalise}", "run.sample_every=1", "run.sample_count=2")
    run, tiny = tmp_path / "run", str(home / "tiny")
    run_to(recipe, store, run)
    drawn = torch.randn(2, 5, 8, 8)
    monkeypatch.setattr("leandit.tools.sample.sampler.draw_latents", lambda *_, **__: drawn)
    sample_grid(run, SampleRequest(labels=["0", "1"], steps=1, vae=tiny), out=tmp_path / "out", device=CPU)
    assert_given(given, denormalise(drawn, load_snapshot(run, CPU).latent).numpy())
    given.clear()
    from safetensors.numpy import load_file

    raw = load_file(run / "samples/step-1.safetensors")["latents"]
    decode_grids(run / "samples", tiny)
    assert (run / "samples/step-1.png").is_file()
    assert_given(given, raw)


def test_nothing_is_fetched_because_a_store_or_a_run_names_it(store: LatentStore, hub: Hub, tmp_path: Path) -> None:
    named = copy_of(store.path, tmp_path / "named")
    rewrite_recipe(named, lambda recipe: recipe["vae"].__setitem__("model", "somebody/vae"))
    make_dinov2(tmp_path / "dinov2", width=16, deviation=0.2)
    run, recipe = tmp_path / "run", train_recipe("dit-s-4", *RUN)
    train(recipe, store_path=named, run=run, device=CPU, report=lambda _: None, stop=StopRequest())
    report = ["report", named, "--out", tmp_path / "a.html"]
    for words in (
        ["inspect", named, "--sheet", tmp_path / "a.png"],
        ["sample", run, "--out", tmp_path / "out", "--label", 0, "--device", "cpu"],
        ["evaluate", named, "--against", named, "--features", tmp_path / "dinov2", "--device", "cpu"],
        ["export", run, "--out", tmp_path / "exported", "--encoders"],
    ):
        ended = leandit(*words)
        assert "what only a store or run names is never fetched" in str(ended.exception), words
    assert leandit(*report).exit_code == 0
    assert "somebody/vae&#39;: it is not on this machine" in (tmp_path / "a.html").read_text()
    assert hub.requests == []
    assert leandit(*report, "--vae", "somebody/vae").exit_code == 1
    assert hub.requests
