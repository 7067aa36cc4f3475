"""The benchmarks of stage 1, of scale and of learning run and print their figures; no time is asserted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from making import CPU, picture
from PIL import Image

from leandit.precompute.config import TextSection, VaeSection
from leandit.precompute.encoders.model_files import local_folder
from leandit.precompute.encoders.text.encoder import CaptionEncoder
from leandit.precompute.encoders.text.tokenizer import CaptionTokenizer
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.precompute.images.pixels import decode_picture

ROOT = Path(__file__).parents[2]
SIDE_PX = 32
TINY_TRAINING = ["--set", "run.global_batch=2", "--set", "run.precision=fp32"]
PRECOMPUTE = [
    *("encode.py", "precompute", "--vae", "shipped:vae", "--text", "shipped:t5", "--records", "6", "--rounds", "1"),
    *("--seconds", "0.01", "--device", "cpu", "--set", "images.resolution=32", "--set", "vae.batch_size=4"),
]


def run(script: str, *arguments: object) -> str:
    """Stdout of a benchmark that ends with 0."""
    return output([str(ROOT / "benchmarks" / script), *map(str, arguments)])


def call(function: str, arguments: dict[str, Any]) -> Any:
    """The result of a function of encode.py, by way of JSON."""
    code = f"import json, encode; print(json.dumps(encode.{function}(**json.loads({json.dumps(arguments)!r}))))"
    return json.loads(output(["-c", code]).splitlines()[-1])


def output(command: list[str]) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def table(text: str) -> dict[str, list[str]]:
    """The cells of Markdown tables, by the first one."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name.strip(): cells for name, *cells in rows}


@pytest.mark.slow
def test_a_precompute_is_measured_beside_its_encoder_and_the_extraction_loops(
    caption_folder: Path, tmp_path: Path
) -> None:
    found = table(run(*PRECOMPUTE, "--source", caption_folder, "--scratch", tmp_path))
    names = ["bare encoder", "bare decode", "leandit", "PixArt", "fast-DiT", "leandit captions", "PixArt captions"]
    assert all(float(found[name][0]) > 0 for name in names)
    assert float(found["host memory beyond the encoder, MiB"][0]) >= 0
    assert "bytes a caption, padded in float16, of ours in int8" in found


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "text"), [("dit-s-2-256", []), ("demo", ["--text", "shipped:t5"])])
def test_training_on_a_store_is_measured_beside_training_that_encodes(
    recipe: str, text: list[str], tmp_path: Path
) -> None:
    how = ["--vae", "shipped:vae", "--resolution", "64", "--rounds", "1", "--steps", "1", "--device", "cpu"]
    found = table(run("encode.py", "caching", recipe, "--scratch", tmp_path, *how, *text, *TINY_TRAINING))
    assert all(float(found[name][0]) > 0 for name in ("cached", "online"))


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--captions"], ["--no-captions", "--sizes", "header"]])
def test_a_manifest_is_planned_opened_and_sealed(how: list[str], tmp_path: Path) -> None:
    found = table(run("scale.py", "plan", "--scratch", tmp_path, "--records", 2000, *how))
    sealed = next(cells for name, cells in found.items() if name.startswith("read and seal"))
    assert all(float(cell) >= 0 for cell in sealed)


@pytest.mark.slow
def test_opening_and_searching_are_measured(tmp_path: Path) -> None:
    opened = table(run("scale.py", "open", "--scratch", tmp_path, "--records", 1000, "--rounds", 1))
    assert {"open", "first batch after that"} <= opened.keys()
    assert {"elapsed", "processor"} <= table(run("scale.py", "search", "--records", 20_000)).keys()


@pytest.mark.slow
def test_the_page_has_the_bytes_that_the_command_prints() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    lines = [line for line in run("scale.py", "bytes").splitlines() if line]
    assert len(lines) > 30
    assert [line for line in lines if line not in page] == []


@pytest.mark.slow
def test_recipes_are_compared_and_the_comparison_resumes(tmp_path: Path) -> None:
    sizes = ["--seeds", 1, "--steps", 2, "--images", 48, "--teacher-steps", 2, "--samples", 1, "--rounds", 1]
    settings = ["--set", "run.global_batch=2", "--set", "run.evaluate_images=8"]
    command = ["learning.py", "--out", tmp_path, *sizes, *settings]
    found = table(run(*command))
    assert {"plain", "REPA", "TREAD", "contrastive"} <= found.keys()
    assert np.asarray(Image.open(tmp_path / "learning.png")).std() > 0
    assert table(run(*command)) == found  # nothing is measured again


@pytest.mark.slow
def test_functions_for_other_processes_return_what_tables_need(tmp_path: Path) -> None:
    where = {"device": "cpu", "scratch": str(tmp_path), "rounds": 1}
    sizes = where | {"records": 4, "seconds": 0.01}
    images = {"side_px": 32, "batch": 2, "vae": "shipped:vae"}
    settings = ["model.name=DiT-Ti/4", "run.global_batch=2", "run.precision=fp32", "run.compile=false"]
    caching = {"recipe": "dit-s-2-256", "side_px": 64, "settings": settings, "vae": "shipped:vae", "text": None}

    rates = call("measure_precompute", sizes | images)["rates"]
    assert rates.keys() == {"bare encoder", "bare decode", "leandit", "PixArt", "fast-DiT"}
    captions = call("measure_captions", sizes | {"text": "shipped:t5"})
    assert captions["rates"].keys() == {"leandit captions", "PixArt captions"}
    assert 0 <= captions["captions"]["padding_share"] < 1
    assert call("measure_caching", where | caching | {"steps": 1})["images_per_second"].keys() == {"cached", "online"}


# -------------------------------------------------------------------- the extraction loops compute what we encode

VAE, TEXT = VaeSection(model="shipped:vae", dtype="float32"), TextSection(kind="t5", model="shipped:t5")


@pytest.fixture(scope="module")
def extraction() -> ModuleType:
    spec = importlib.util.spec_from_file_location("extraction", ROOT / "benchmarks/extraction.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def vae(extraction: ModuleType) -> Any:
    return extraction.load_vae(local_folder(VAE.model), CPU)


@pytest.fixture
def squares(tmp_path: Path) -> list[Path]:
    """Images of just the bucket's size, which every crop leaves as they are."""
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for i, path in enumerate(paths):
        picture(i, SIDE_PX, SIDE_PX).save(path)
    return paths


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as file:
        return np.array(file.convert("RGB"))[None]


def test_pixart_extracts_the_mean_and_deviation_that_we_encode(
    extraction: ModuleType, vae: Any, squares: list[Path], tmp_path: Path
) -> None:
    buckets = [(SIDE_PX, SIDE_PX)] * len(squares)
    assert list(extraction.pixart_images(squares, buckets, vae=vae, out=tmp_path, workers=0)) == [0, 1, 2]
    encoder = ImageEncoder(VAE, CPU)
    for i, path in enumerate(squares):
        mean, logvar = np.split(encoder.encode(pixels_of(path))[0], 2)
        expected = np.concatenate([mean, np.exp(0.5 * logvar)])
        np.testing.assert_allclose(np.load(tmp_path / f"{i}.npy"), expected, rtol=1e-4, atol=1e-4)


def test_fast_dit_extracts_one_scaled_draw_of_what_we_encode(
    extraction: ModuleType, vae: Any, squares: list[Path], tmp_path: Path
) -> None:
    loop = extraction.fast_dit(squares, SIDE_PX, vae=vae, out=tmp_path, workers=0)
    encoder = ImageEncoder(VAE, CPU)
    assert next(loop) == 0  # a loader that starts draws too
    for i, path in list(enumerate(squares))[1:]:
        torch.manual_seed(i)
        assert next(loop) == i
        torch.manual_seed(i)
        is_flipped = torch.rand(1).item() < 0.5
        pixels = pixels_of(path)[:, :, ::-1] if is_flipped else pixels_of(path)
        mean, logvar = np.split(encoder.encode(pixels)[0], 2)
        drawn = mean + np.exp(0.5 * logvar) * torch.randn(1, *mean.shape)[0].numpy()
        found = np.load(tmp_path / f"{i}-features.npy")[0]
        np.testing.assert_allclose(found, extraction.SCALE * drawn, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [(40, 56), (129, 64), (200, 300), (32, 32)])
def test_the_crop_is_the_published_one(extraction: ModuleType, size: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    picture(1, *size).save(path)
    ours = decode_picture(path.read_bytes(), bucket=(SIDE_PX, SIDE_PX), crop="adm")[0]
    with Image.open(path) as file:
        assert np.array_equal(np.array(extraction.adm_square(file.convert("RGB"), SIDE_PX)), ours)


def test_pixart_pads_what_we_leave_out(extraction: ModuleType, tmp_path: Path) -> None:
    captions = ["a red circle", "a big blue square above a tiny green circle"]
    models = extraction.load_t5(local_folder(TEXT.model), CPU)
    assert extraction.pixart_captions(captions, out=tmp_path, **models) > 0
    encoder = CaptionEncoder(TEXT, CaptionTokenizer(TEXT), CPU)
    for i, caption in enumerate(captions):
        with np.load(tmp_path / f"{i}.npz") as found:
            feature, mask = found["caption_feature"], found["attention_mask"]
        ours = encoder.encode([caption]).token_rows()[0]
        assert feature.shape == (1, extraction.PIXART_TOKENS, encoder.width)
        assert mask.sum() == len(ours)
        np.testing.assert_allclose(feature[0, : len(ours)], ours, rtol=2e-3, atol=2e-3)
