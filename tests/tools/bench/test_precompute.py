"""The precompute benchmark: what the peers extract is what we encode, where the maths is the same; and its report.

No time is asserted: how fast anybody is, is what the benchmark is for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_forked
from making import CPU, label_recipe, no_progress, picture, tree_digest
from PIL import Image
from transformers import AutoTokenizer, T5EncoderModel

from leandit.datasets.errors import RecipeError, ResourceError
from leandit.datasets.store import LatentStore
from leandit.precompute.config import TextSection, VaeSection
from leandit.precompute.encoders.model_files import local_folder
from leandit.precompute.encoders.text.encoder import CaptionEncoder
from leandit.precompute.encoders.text.tokenizer import CaptionTokenizer
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.precompute.images.pixels import decode_picture
from leandit.precompute.sources.source import list_source
from leandit.tools.bench.encode import inputs, plan
from leandit.tools.bench.encode.extract import (
    PIXART_TOKENS,
    SCALE,
    adm_square,
    fast_dit,
    load_text,
    load_vae,
    pixart_captions,
    pixart_pictures,
    steady_rate,
)
from leandit.tools.bench.encode.inputs import text_model, vae_model, write_sample
from leandit.tools.bench.encode.memory import measure, peak_mb
from leandit.tools.bench.encode.precompute import caption_bytes_on_disk, run
from leandit.tools.bench.encode.rates import PrecomputeRequest
from leandit.tools.bench.encode.ratios import bottleneck, ratios_of, render
from leandit.tools.bench.harness.rounds import alternating_rounds, median_and_range, ratios
from leandit.tools.bench.harness.scratch import benchmark_folder, fresh_folder

VAE, TEXT = VaeSection(model="shipped:vae", dtype="float32"), TextSection(kind="t5", model="shipped:t5")
SIDE_PX = 32


@pytest.fixture
def squares(tmp_path: Path) -> list[Path]:
    """Pictures of just the bucket's size, which every crop leaves as they are."""
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for i, path in enumerate(paths):
        picture(i, SIDE_PX, SIDE_PX).save(path)
    return paths


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as file:
        return np.array(file.convert("RGB"))[None]


@pytest.fixture(scope="module")
def vae() -> Any:
    folder = local_folder(VAE.model)
    assert folder is not None
    return load_vae(folder, CPU)


def test_pixart_extracts_the_mean_and_deviation_that_we_encode(squares: list[Path], vae: Any, tmp_path: Path) -> None:
    buckets = [(SIDE_PX, SIDE_PX)] * len(squares)
    assert list(pixart_pictures(squares, buckets, vae=vae, out=tmp_path / "out", workers=0)) == [0, 1, 2]
    encoder = ImageEncoder(VAE, CPU)
    for i, path in enumerate(squares):
        mean, logvar = np.split(encoder.encode(pixels_of(path))[0], 2)
        found = np.load(tmp_path / "out" / f"{i}.npy")
        np.testing.assert_allclose(found, np.concatenate([mean, np.exp(0.5 * logvar)]), rtol=1e-4, atol=1e-4)


def test_fast_dit_extracts_one_scaled_draw_of_what_we_encode(squares: list[Path], vae: Any, tmp_path: Path) -> None:
    loop = fast_dit(squares, [7, 8, 9], SIDE_PX, vae=vae, out=tmp_path, workers=0)
    encoder = ImageEncoder(VAE, CPU)
    assert next(loop) == 0  # a loader that starts draws too
    for i, path in list(enumerate(squares))[1:]:
        torch.manual_seed(i)
        assert next(loop) == i
        drawn = np.load(tmp_path / "features" / f"{i}.npy")[0]
        assert np.load(tmp_path / "labels" / f"{i}.npy").tolist() == [7 + i]
        torch.manual_seed(i)
        is_flipped = torch.rand(1).item() < 0.5
        pixels = pixels_of(path)[:, :, ::-1] if is_flipped else pixels_of(path)
        mean, logvar = np.split(encoder.encode(pixels)[0], 2)
        noise = torch.randn(1, *mean.shape)[0].numpy()
        np.testing.assert_allclose(drawn, SCALE * (mean + np.exp(0.5 * logvar) * noise), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [(40, 56), (129, 64), (200, 300), (32, 32)])
def test_the_peers_crop_is_the_published_one(size: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    picture(1, *size).save(path)
    ours = decode_picture(path.read_bytes(), bucket=(SIDE_PX, SIDE_PX), crop="adm")[0]
    with Image.open(path) as file:
        assert np.array_equal(np.array(adm_square(file.convert("RGB"), SIDE_PX)), ours)


def test_pixart_pads_what_we_leave_out(tmp_path: Path) -> None:
    folder = local_folder(TEXT.model)
    assert folder is not None
    model, tokenizer = load_text(folder, CPU)
    assert isinstance(model, T5EncoderModel)
    captions = ["a red circle", "a big blue square above a tiny green circle"]
    assert pixart_captions(captions, model=model, tokenizer=tokenizer, out=tmp_path) > 0
    encoder = CaptionEncoder(TEXT, CaptionTokenizer(TEXT), CPU)
    for i, caption in enumerate(captions):
        with np.load(tmp_path / f"{i}.npz") as found:
            feature, mask = found["caption_feature"], found["attention_mask"]
        ours = encoder.encode([caption]).token_rows()[0]
        assert feature.shape == (1, PIXART_TOKENS, encoder.width)
        assert mask.sum() == len(ours)
        np.testing.assert_allclose(feature[0, : len(ours)], ours, rtol=2e-3, atol=2e-3)


def test_a_sample_is_spread_over_the_source_and_goes_round(caption_folder: Path, tmp_path: Path) -> None:
    source = list_source(caption_folder).records
    few = write_sample(caption_folder, tmp_path / "few", 3)
    assert [record.captions for record in few] == [source[i].captions for i in (0, 4, 8)]
    many = write_sample(caption_folder, tmp_path / "many", 30)
    data = [(tmp_path / "many" / record.path).read_bytes() for record in many]
    assert data[:14] == [(caption_folder / record.path).read_bytes() for record in source]
    assert data[14:28] == data[:14]
    assert len({record.key for record in many}) == 30


def test_random_encoders_are_made_once_and_are_the_real_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(inputs.TEXTS, "t5-tiny", (16, 32, 1, 2))
    monkeypatch.setattr(inputs, "T5_VOCABULARY", 22)
    tokenizer = local_folder("shipped:t5")
    folder = Path(text_model("random:t5-tiny", tokenizer, tmp_path, CPU))
    before = (folder / "model.safetensors").read_bytes()
    assert text_model("random:t5-tiny", tokenizer, tmp_path, CPU) == str(folder)
    assert (folder / "model.safetensors").read_bytes() == before
    section = TextSection(kind="t5", model=str(folder))
    assert CaptionEncoder(section, CaptionTokenizer(section), CPU).encode(["a red circle"]).token_rows().shape[2] == 16
    assert len(AutoTokenizer.from_pretrained(folder)) == 22

    small = inputs.VAES["sd"] | {"block_out_channels": (4, 4, 4, 4), "norm_num_groups": 4}
    monkeypatch.setitem(inputs.VAES, "tiny", small)
    assert ImageEncoder(VaeSection(model=vae_model("random:tiny", tmp_path)), CPU).has_posterior
    for wrong in ("random:none", "random:"):
        with pytest.raises(RecipeError, match="random:sd"):
            vae_model(wrong, tmp_path)
        with pytest.raises(RecipeError, match="random:t5-xxl"):
            text_model(wrong, tokenizer, tmp_path, CPU)
    with pytest.raises(RecipeError, match="--tokenizer"):
        text_model("random:t5-xxl", None, tmp_path, CPU)


def test_a_steady_rate_leaves_out_the_first_and_measures_enough() -> None:
    assert steady_rate(iter(range(100)), 0.0) > 0
    seen = []
    steady_rate((seen.append(i) or i for i in range(100)), 0.0)
    assert seen == [0, 1, 2, 3, 4]


FIGURES = {
    "rates": {
        "bare encoder": [10.0, 20.0, 10.0],
        "bare decode": [100.0, 100.0, 100.0],
        "leandit": [9.6, 19.0, 9.0],
        "PixArt": [1.0, 2.0, 2.0],
        "fast-DiT": [2.0, 4.0, 3.0],
        "leandit captions": [40.0, 40.0, 40.0],
        "PixArt captions": [10.0, 11.0, 9.0],
    },
    "encode_share": [0.99, 0.97, 0.98],
    "memory_mb": {"encoder": 1000.0, "run": 1104.8576},
    "captions": {"padded": 1000, "float16": 190.0, "int8": 110.0, "padding_share": 0.01},
}


def test_ratios_are_of_the_same_round() -> None:
    found = ratios_of(FIGURES, on_cpu=False)
    assert found["end to end, of the bare encoder"] == pytest.approx([0.96, 0.95, 0.9])
    assert found["end to end, of the slower of encoder and decode"] == pytest.approx([0.96, 0.95, 0.9])
    assert found["images/s, of PixArt's loop"] == pytest.approx([9.6, 9.5, 4.5])
    assert found["time in which the encode stage is busy, of end to end"] == [0.99, 0.97, 0.98]
    assert found["images/s, of fast-DiT's loop"] == pytest.approx([4.8, 4.75, 3.0])
    assert found["captions/s, of PixArt's loop"] == pytest.approx([4, 40 / 11, 40 / 9])
    in_bytes = [values for name, values in found.items() if name.startswith("bytes")]
    assert in_bytes == [[pytest.approx(1000 / 190)], [pytest.approx(1000 / 110)]]
    assert found["padding computed, of all tokens"] == [0.01]
    assert found["host memory beyond the running encoder, MiB"] == [pytest.approx(100)]
    assert "end to end, of what these cores do of both" not in found
    together = ratios_of(FIGURES, on_cpu=True)["end to end, of what these cores do of both"]
    assert together[0] == pytest.approx(9.6 * (1 / 10 + 1 / 100))


def test_the_bottleneck_is_named() -> None:
    assert bottleneck(FIGURES["rates"], on_cpu=False) == ""
    assert "share the cores" in bottleneck(FIGURES["rates"], on_cpu=True)
    slow = FIGURES["rates"] | {"bare decode": [5.0, 5.0, 5.0]}
    for on_cpu in (False, True):
        said = bottleneck(slow, on_cpu=on_cpu)
        assert said == "decoding cannot keep up: 5.0 images/s, the encoder does 10.0"


def test_rounds_alternate_and_keep_their_ratios() -> None:
    turns = list(alternating_rounds(["a", "b", "c"], 3))
    assert [number for number, _ in turns] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert "".join(cell for _, cell in turns) == "abccbaabc"
    assert ratios([2.0, 6.0, 1.0], [1.0, 2.0, 4.0]) == [2.0, 3.0, 0.25]
    assert median_and_range([2.0, 3.0, 0.25], "{:.2f}x") == "2.00x (0.25x to 3.00x)"
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


def test_the_whole_benchmark_runs_and_reports(
    caption_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, users = tmp_path / "scratch", ("store", "sample", "peer")
    for name in users:  # the user's own, which are not touched
        (scratch / name).mkdir(parents=True)
        (scratch / name / "precious").write_text(name)
    monkeypatch.setattr("leandit.tools.bench.encode.precompute.peak_mb", measure)  # a second less for each
    calls: list[tuple[str, int, int]] = []
    request = PrecomputeRequest(
        str(caption_folder),
        scratch,
        CPU,
        vae="shipped:vae",
        text="shipped:t5",
        records=6,
        rounds=1,
        seconds=0.01,
        overrides=("images.resolution=32", "vae.batch_size=4", "vae.dtype=float32"),
    )
    result = run(request, lambda *call: calls.append(call))
    assert json.loads(json.dumps(result)) == result
    assert [len(values) for values in result["rates"].values()] == [1] * 7
    assert min(min(values) for values in result["rates"].values()) > 0
    assert (result["records"], result["buckets"]) == (6, ["32x32"])
    assert result["captions"]["padded"] == 300 * 64 * 2
    count, tokens = result["captions"]["num_captions"], result["captions"]["tokens_per_caption"]
    least = 1 << 16  # what a store writes at least: the chunk that its few tokens share
    assert result["captions"]["float16"] * count > least > tokens * count * 128
    assert result["captions"]["int8"] * count > least
    assert result["captions"]["int8"] != result["captions"]["float16"]
    assert result["memory_mb"]["encoder"] > 0
    assert set(result["stages"][0]) == {"read", "decode", "encode", "write"}
    assert calls[-4:] == [("memory", 2, 2), *(("captions on disk", number, 2) for number in range(3))]
    assert [(scratch / name / "precious").read_text() for name in users] == list(users)
    assert sorted(path.name for path in scratch.iterdir()) == ["bench-precompute", *sorted(users)]
    lines = render(result).splitlines()
    assert len(result["ratios"]) == 11
    assert all(any(line.startswith(name) for line in lines) for name in [*result["rates"], *result["ratios"]])
    assert lines[-1].startswith("decoding ")  # it shares the cores, or cannot keep up


def test_a_folder_that_no_benchmark_made_is_refused(class_folder: Path, tmp_path: Path) -> None:
    for name in ("precompute", "plan"):
        precious = tmp_path / f"bench-{name}" / "store" / "precious"
        precious.parent.mkdir(parents=True)
        precious.write_text("mine")
    before = tree_digest(tmp_path)
    with pytest.raises(RecipeError, match="'bench-plan' that no benchmark made"):
        plan.run(tmp_path, 10, "manifest", captions=False)
    with pytest.raises(RecipeError, match="'bench-precompute' that no benchmark made"):
        run(PrecomputeRequest(str(class_folder), tmp_path, CPU, vae="shipped:vae", records=2), no_progress)
    assert tree_digest(tmp_path) == before


def test_only_what_lies_in_its_own_folder_is_removed(tmp_path: Path) -> None:
    own = benchmark_folder(tmp_path, "bench-x")
    (own / "store").mkdir()
    (own / "store" / "shard").write_text("old")
    assert benchmark_folder(tmp_path, "bench-x") == own  # again, with what is in it
    assert list(fresh_folder(own, "store").iterdir()) == []
    assert not fresh_folder(own, "store", make=False).exists()
    with pytest.raises(AssertionError, match="is not the folder of a benchmark"):
        fresh_folder(tmp_path, "bench-x")
    assert own.is_dir()


def test_bytes_a_caption_are_those_of_the_files(caption_store: LatentStore) -> None:
    files = [path for path in (caption_store.path / "captions").rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(caption_store.path)): path.stat().st_size for path in files}
    nulls = [size for name, size in sizes.items() if name.startswith("captions/null/")]
    assert len(nulls) == 2
    assert {"captions/embeddings/c/0/0", "captions/offsets/c/0", "captions/lengths/c/0"} <= sizes.keys()
    expected = (sum(sizes.values()) - sum(nulls)) / len(caption_store.captions)
    assert caption_bytes_on_disk(caption_store.path) == expected


def test_captions_that_are_not_there_cannot_be_measured(class_folder: Path, tmp_path: Path) -> None:
    request = PrecomputeRequest(str(class_folder), tmp_path, CPU, vae="shipped:vae", text="shipped:t5", records=2)
    with pytest.raises(RecipeError, match="has no captions"):
        run(request, lambda stage, done, total: None)


def test_the_size_of_a_batch_must_be_said(class_folder: Path, tmp_path: Path) -> None:
    request = PrecomputeRequest(
        str(class_folder), tmp_path, CPU, vae="shipped:vae", records=2, overrides=["vae.batch_size=0"]
    )
    with pytest.raises(RecipeError, match=r"vae\.batch_size 0"):
        run(request, lambda stage, done, total: None)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is known on Linux")
@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_memory_of_a_process_of_its_own_is_measured(fresh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it is forked, which saves the import of all libraries."""
    if not fresh:
        monkeypatch.setattr("subprocess.run", lambda command, **_: run_forked(command[1:]))
    recipe = label_recipe().model_dump()
    peak = peak_mb({"recipe": recipe, "device": "cpu", "batch": [8, 64, 64]})
    assert 50 < peak < 4000  # of Python with torch, of MB


@pytest.mark.slow  # a fresh process that loads all libraries
def test_a_failed_measurement_of_memory_says_why() -> None:
    said = r"bench precompute, memory: a measurement failed with exit code 1: (.|\n)*resolution"
    with pytest.raises(ResourceError, match=said):
        peak_mb({"recipe": {"images": {"resolution": 1}}, "device": "cpu", "batch": [1, 8, 8]})
