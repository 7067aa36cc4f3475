"""Each script of benchmarks/ runs at its smallest size and prints its table; no time is asserted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from making import CPU
from training import diffusers_model

from leandit.datasets.store import LatentStore
from leandit.tools.plan.synthetic import synthetic_batch
from leandit.tools.plan.workload import workload_at_resolution
from leandit.train.config import load
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioner

MODELS = """
from torch import nn
MADE = []
class Model(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.table = nn.Embedding(num_classes + 1, 8)
    def forward(self, x, t, y):
        return x.repeat(1, 2, 1, 1) * (self.table(y) + t[:, None])[:, :, None, None]
def DiT_S_8(input_size, num_classes):
    assert input_size == 8
    MADE.append(Model(num_classes))
    return MADE[-1]
"""
DIFFUSION = """
STEPS = []
class Diffusion:
    num_timesteps = 10
    def training_losses(self, model, x, t, model_kwargs):
        assert model.training and t.max() < self.num_timesteps
        STEPS.append(tuple(x.shape))
        return {"loss": model(x, t, **model_kwargs).square().mean((1, 2, 3))}
def create_diffusion(timestep_respacing):
    return Diffusion()
"""


def made_up_fast_dit(folder: Path) -> Path:
    """A checkout with what is called of fast-DiT's: ``models`` and ``diffusion``, tiny."""
    checkout = folder / "fast-DiT"
    (checkout / "diffusion").mkdir(parents=True)
    (checkout / "models.py").write_text(MODELS)
    (checkout / "diffusion/__init__.py").write_text(DIFFUSION)
    return checkout


ROOT = Path(__file__).parents[2]
TINY = ["run.global_batch=2", "run.precision=fp32", "run.compile=false"]
TINY_DIT = [word for setting in ["model.name=DiT-Ti/4", *TINY] for word in ("--set", setting)]
pytestmark = pytest.mark.slow


def run(script: str, *arguments: object) -> dict[str, list[str]]:
    """The tables that a script prints: the cells of each row, by the first one."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = [line.strip("|").split("|") for line in ended.stdout.splitlines() if line.startswith("| ")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in rows}


def test_every_kind_of_cell_that_needs_a_gpu_runs_in_its_tiny_form_and_only_once(tmp_path: Path) -> None:
    how = ["run", "--tiny", "--device", "cpu", "--out", tmp_path / "out", "--fast-dit", made_up_fast_dit(tmp_path)]
    run("gpu.py", *how)
    lines = (tmp_path / "out/cells.jsonl").read_text().splitlines()
    found = run("gpu.py", "table", tmp_path / "out")
    assert "not yet measured" not in str(found)
    assert "failed" not in str(found)
    cells = {"DiT-Ti/4, 64 px", "PixArt, 64 px", "DiT-S/8, 64 px", "32 px", "T5", "DiT-Ti/4, 1 x 2 images"}
    assert cells <= found.keys()
    run("gpu.py", *how)
    assert (tmp_path / "out/cells.jsonl").read_text().splitlines() == lines


def test_loaders_deliver_the_records_of_the_store_and_are_timed(tmp_path: Path) -> None:
    peers = ["leandit", "memmap dataset", "npy", "safetensors", "webdataset"]
    sizes = ["--records", 60, "--rounds", 1, "--seconds", 0.01, "--peers", ",".join(peers)]
    for workload in ("latents", "aligned"):
        found = run("loader_peers.py", "--scratch", tmp_path, "--workload", workload, *sizes)
        assert all(float(found[name][0]) > 0 for name in ["flat gather", *peers])


def test_our_step_stands_beside_others() -> None:
    sizes = ["--resolution", 64, "--rounds", 2, "--steps", 1]
    assert {"leandit", "diffusers"} <= run("training.py", "dit-s-2-256", *sizes, *TINY_DIT).keys()
    without = ["--without", "objective", "--set", "objective.kind=ddpm"]
    assert "without objective" in run("training.py", "demo", *sizes, *without, *TINY_DIT)


@pytest.mark.parametrize("recipe", ["pixart-sigma-512", "sana-1600m-1024", "sd3.5-medium-512"])
def test_the_models_of_diffusers_are_the_same_functions_as_ours(recipe: str) -> None:
    tiny = recipe.partition("-")[0].removesuffix(".5") + "-tiny"
    work = workload_at_resolution(load(recipe, [*TINY, f"model.name={tiny}", "optimizer.name=adamw"]), 64)
    ours, (theirs, call) = build_model(work.spec, seed=0), diffusers_model(work.spec)
    theirs.load_state_dict(ours.net.state_dict())
    batch = synthetic_batch(work.store, "64x64", 2, work.tokens, CPU)
    given = Conditioner(work.spec, None)(batch.labels, batch.texts)
    t = torch.tensor([3.0, 900.0])
    torch.testing.assert_close(call(batch.latents, t, given), ours(batch.latents, t, given), rtol=1e-4, atol=1e-4)


def test_a_precompute_is_measured_beside_its_encoder_and_an_extraction_loop(
    caption_folder: Path, tmp_path: Path
) -> None:
    sizes = ["--records", 6, "--rounds", 1, "--seconds", 0.01, "--set", "images.resolution=32"]
    how = ["--vae", "shipped:vae", "--text", "shipped:t5", "--device", "cpu", "--set", "vae.batch_size=4", *sizes]
    found = run("encode.py", "--source", caption_folder, "--scratch", tmp_path, *how)
    names = ["bare encoder", "bare decode", "leandit", "leandit captions", "PixArt captions"]
    assert all(float(found[name][0]) > 0 for name in names)
    assert "bytes a caption, padded in float16, of ours in int8" in found


def test_captions_are_smaller_than_in_padded_files(tmp_path: Path) -> None:
    found = run("cache_sizes.py", "--scratch", tmp_path, "--captions", 8, "--tokens", 20)
    assert float(found["Z-Image"][3]) > 10
    assert float(found["FLUX.2 [dev]"][3]) == pytest.approx(2, rel=0.02)


def test_codecs_are_compared_on_the_rows_of_a_store(label_store: LatentStore) -> None:
    found = run("store_codecs.py", label_store.path, "--min-kib", 1, "--levels", "3", "--rounds", 2)
    assert found["none"][0] == "100.0%"
    assert float(found["blosc 3"][2]) > 0


def test_millions_of_records_are_planned_written_opened_and_read(tmp_path: Path) -> None:
    assert "open the plan" in run("scale.py", "plan", "--scratch", tmp_path, "--records", 2000)
    started = run("scale.py", "start", "--scratch", tmp_path, "--records", 1000)
    assert {"open the store, with indexes", "first batch after that"} <= started.keys()
    assert {"seal", "open, with indexes"} <= run("scale.py", "store", "--scratch", tmp_path, "--records", 1000).keys()
    assert "list, compare and plan 20 more" in run("growth.py", "--scratch", tmp_path, "--records", 2000)
