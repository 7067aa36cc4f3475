"""``leandit evaluate``: what it measures, of runs, stores, folders and .npz files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import CPU, no_progress, smooth_image, train_recipe
from PIL import Image
from runs import run_to
from tiny_models import CLIP_TEXTS, TinyClip, make_clip, make_dinov2
from typer.testing import CliRunner

from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, EncoderError, RecipeError, SourceError
from leandit.tools.cli.commands import app
from leandit.tools.inspection.report.run import report_run
from leandit.tools.sample.evaluation.distances import frechet_distance
from leandit.tools.sample.evaluation.evaluate import evaluate, rows_of
from leandit.tools.sample.evaluation.images import folder_images
from leandit.tools.sample.request import EvaluateRequest, SampleRequest

WIDTH = 256
DISTANCES = ("frechet", "kid", "precision", "recall", "density", "coverage")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision model, two halves of one kind of images, and noise."""
    root, random = tmp_path_factory.mktemp("evaluation"), np.random.default_rng(0)
    make_dinov2(root / "dinov2", width=16, deviation=0.2)
    for name in ("one/deep", "other/deep", "noise"):
        (root / name).mkdir(parents=True)
    for seed in range(80):
        folder = root / ("one" if seed % 2 else "other") / ("deep" if seed % 3 else "")
        smooth_image(seed, 64, 64 + 8 * (seed % 3)).save(folder / f"{seed:03}.png")
    for i in range(40):
        Image.fromarray(random.integers(0, 256, (64, 64, 3), np.uint8)).save(root / f"noise/{i:03}.png")
    return root


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> TinyClip:
    return make_clip(tmp_path_factory.mktemp("clip"))


def measured(target: Path, against: Path | None, here: Path, **options: Any) -> dict:
    request = EvaluateRequest(target, against, **({"features": str(here / "dinov2")} | options))
    return evaluate(request, device=CPU, progress=no_progress)


def pixels_of(folder: Path) -> list[np.ndarray]:
    paths = sorted(folder.rglob("*.png"), key=lambda path: path.relative_to(folder).as_posix())
    return [np.asarray(Image.open(path).convert("RGB")) for path in paths]


def numbers(result: dict) -> dict:
    return {name: result[name] for name in DISTANCES}


def test_a_set_is_nearest_to_itself_then_to_its_other_half_then_to_noise(here: Path) -> None:
    itself, half, noise = (measured(here / name, here / "one", here) for name in ("one", "other", "noise"))
    assert itself["frechet"] == pytest.approx(0, abs=1e-9)
    assert 0 < 3 * half["frechet"] < noise["frechet"]
    assert abs(half["kid"]) < noise["kid"] / 3
    assert (itself["precision"], itself["recall"], itself["coverage"]) == (1, 1, 1)
    assert half["recall"] > noise["recall"]
    assert half["coverage"] > noise["coverage"]
    assert (half["images"]["kind"], half["images"]["count"], half["reference"]["count"]) == ("folder", 40, 40)
    assert (half["features"]["class"], half["cmmd"]) == ("Dinov2Model", None)


def test_an_npz_is_as_its_folder_a_crop_makes_squares_and_fewer_are_spread(here: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "noise.npz", arr_0=np.stack(pixels_of(here / "noise")))
    folder = measured(here / "noise", here / "one", here)
    packed = measured(tmp_path / "noise.npz", here / "one", here)
    assert numbers(packed) == numbers(folder)
    assert packed["images"]["kind"] == "npz"
    read = folder_images(here / "one", 32).read
    assert {one.shape for one in next(read([np.arange(40)]))} == {(32, 32, 3)}
    assert numbers(measured(here / "noise", here / "one", here, crop_px=32)) != numbers(folder)
    fewer = measured(here / "other", here / "one", here, most=20)
    assert (fewer["reference"]["count"], fewer["reference"]["of"]) == (20, 40)


def test_the_statistics_of_a_reference_are_computed_once(here: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.npz"
    first = measured(here / "other", here / "one", here, keep=kept)
    content = kept.read_bytes()
    shutil.copytree(here / "one", tmp_path / "one")
    for path in (tmp_path / "one").rglob("*.png"):  # of the same names and sizes: the file is not decoded again
        path.write_bytes(bytes(path.stat().st_size))
    again = measured(here / "other", tmp_path / "one", here, keep=kept)
    assert numbers(again) == numbers(first)
    assert kept.read_bytes() == content
    by_file = measured(here / "other", kept, here)
    assert numbers(by_file) == numbers(first)
    assert by_file["reference"]["statistics"] == str(kept)
    make_dinov2(tmp_path / "wide", width=24)
    wide = {"features": str(tmp_path / "wide")}
    for against, options, words in (
        (kept, {"most": 5}, "--against-num 5.* statistics.*Leave it out"),
        (kept, {"keep": tmp_path / "k.npz"}, "--keep-statistics.* statistics.*Leave it out"),
        (kept, wide, r"kept\.npz': its statistics are of network .* Use another file, or the same network"),
        (here / "noise", {"keep": kept}, r"kept\.npz': its statistics are of images .* Use another file"),
    ):
        with pytest.raises(RecipeError, match=words):
            measured(here / "other", against, here, **options)


class PixelNetwork:
    """A network that is called Inception: some numbers of an image."""

    is_clip = False

    def __init__(self, resize: str = "antialiased") -> None:
        self.description = {"network": "inception", "side_px": 32, "resize": resize}

    def features(self, images: list[np.ndarray]) -> np.ndarray:
        return np.stack([one[:32, :32].reshape(-1)[:WIDTH] / np.float32(255) for one in images])


def test_adms_batches_have_statistics_of_others(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "leandit.tools.sample.evaluation.evaluate.open_network"
    monkeypatch.setattr(module, lambda *_: PixelNetwork())
    shown = np.stack(pixels_of(here / "noise"))
    mean, covariance = np.full(WIDTH, 0.5), np.eye(WIDTH) / 12
    np.savez(tmp_path / "adm.npz", arr_0=shown, mu=mean, sigma=covariance)
    found = measured(here / "noise", tmp_path / "adm.npz", here)
    for _ in range(2):  # computed, then read
        kept = measured(here / "noise", tmp_path / "adm.npz", here, keep=tmp_path / "kept.npz")
        assert numbers(kept) == numbers(found)
    rows = PixelNetwork().features(list(shown)).astype(float)
    expected = frechet_distance(rows.mean(axis=0), np.cov(rows.T), mean, covariance)
    assert found["frechet"] == pytest.approx(expected, rel=1e-6)
    assert (found["precision"], found["recall"]) == (1, 1)  # of the images in the file
    assert any("use --resize tensorflow" in note for note in found["notes"])
    assert any("40 images for 256 features" in note for note in found["notes"])
    of_two_sides = measured(here / "noise", here / "noise", here)["notes"]
    assert [note.partition(" for ")[0] for note in of_two_sides if "too large" in note] == [
        "40 images and 40 of the reference"
    ]
    assert [note[-4:] for note in of_two_sides if "precision, recall" in note] == ["0.08"]

    np.savez(tmp_path / "mu.npz", mu=mean, sigma=covariance)
    alone = measured(here / "noise", tmp_path / "mu.npz", here)
    assert alone["frechet"] == found["frechet"]
    assert "precision" not in alone
    assert any("only the Fréchet distance" in note for note in alone["notes"])
    np.savez(tmp_path / "small.npz", mu=mean[:9], sigma=covariance[:9, :9])
    with pytest.raises(SourceError, match=r"256 features, the reference 9\. Expected both of the same network"):
        measured(here / "noise", tmp_path / "small.npz", here)


def test_a_store_is_decoded_or_its_source_images_are_read(
    label_store: LatentStore,
    class_folder: Path,
    caption_store: LatentStore,
    caption_folder: Path,
    here: Path,
    tmp_path: Path,
) -> None:
    source = measured(class_folder, label_store.path, here, crop_px=32, source=[str(class_folder)])
    assert source["reference"]["kind"] == "store, source images"
    assert source["frechet"] == pytest.approx(0, abs=1e-9)  # ADM's crop to 32 px is that of the store
    assert source["precision"] == 1
    decoded = measured(class_folder, label_store.path, here, crop_px=32)
    assert decoded["reference"]["kind"] == "store, decoded by its VAE"
    assert decoded["frechet"] > 1e-4  # the error of the VAE
    assert any("the error of the VAE is not counted" in note for note in decoded["notes"])
    both = measured(label_store.path, label_store.path, here, source=[str(class_folder)])  # of the reference alone
    assert (both["images"], both["reference"]) == (decoded["reference"], source["reference"])
    copy = shutil.copytree(class_folder, tmp_path / "train")
    (copy / "n001/3.png").unlink()
    with pytest.raises(SourceError, match=r"1 of its records are not in the source, the first is 'n001/3\.png'"):
        measured(class_folder, label_store.path, here, source=[str(copy)])
    for source in ([], [str(caption_folder)]):  # of several buckets
        found = measured(caption_folder, caption_store.path, here, source=source)
        assert (found["reference"]["count"], found["images"]["count"]) == (14, 14)


@pytest.mark.usefixtures("tiny_models")
def test_a_run_is_drawn_and_measured(label_store: LatentStore, here: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run_to(train_recipe("dit-s-4", "run.steps=2"), label_store, run)
    draw = SampleRequest(count=8, steps=2, guidance=1.0, seed=3)
    found = measured(run, label_store.path, here, draw=draw, out=out)
    assert dict(rows_of(found))["drawn with"] == "averaged weights, ddim, 2 steps, guidance 1"
    assert "81% of the averaged weights is still the initial weights" in found["notes"][0]  # 0.9 ** 2
    raw = measured(run, label_store.path, here, draw=replace(draw, weights="raw"), out=tmp_path / "raw")
    assert raw["images"]["weights"] == "raw"
    assert not any("began with" in note for note in raw["notes"])
    assert raw["frechet"] != found["frechet"]
    assert len(list(out.glob("0*.png"))) == 8
    assert numbers(measured(out, label_store.path, here)) == numbers(found)
    with open(run / "evaluations.jsonl", "a") as file:
        file.write('{"images": {')  # of a command that was killed
    fewer = measured(run, label_store.path, here, draw=replace(draw, count=6), out=out)
    assert fewer["images"]["count"] == 6
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert lines == [found, raw, fewer]
    how = {"kind": "run", "snapshot": "snapshot-2", "step": 2, "sampler": "ddim", "steps": 2, "guidance": 1.0}
    how |= {"interval": [0.0, 1.0], "seed": 3, "count": 8}
    assert lines[0]["images"] | how == lines[0]["images"]
    assert len(lines[0]["images"]["weights_xxh3_128"]) == 32
    assert lines[0]["reference"]["count"] == len(label_store)
    report_run(run, tmp_path / "run.html")
    assert (tmp_path / "run.html").read_text().count(f"{found['frechet']:.5g}") == 1


def test_the_clip_score_is_that_of_transformers(clip: TinyClip, here: Path, tmp_path: Path) -> None:
    captions = [CLIP_TEXTS[i % 2] for i in range(40)]
    (tmp_path / "captions.json").write_text(json.dumps({"samples": captions}))
    options = {"clip": str(clip.folder), "captions": tmp_path / "captions.json"}
    found = measured(here / "noise", None, here, **options)
    expected = [clip.score(pixels, text) for pixels, text in zip(pixels_of(here / "noise"), captions, strict=True)]
    assert found["clip_score"] == pytest.approx(np.mean(expected), rel=1e-3)
    assert np.mean(expected) > 1
    assert found["notes"] == []
    assert [name for name, _ in rows_of(found)] == ["images", "clip_score"]

    both = measured(here / "noise", here / "one", here, features=str(clip.folder), **options)
    assert both["clip_score"] == found["clip_score"]
    assert both["cmmd"] > 0
    assert measured(here / "one", here / "one", here, features=str(clip.folder))["cmmd"] == 0


def test_captions_are_found_by_name_and_long_ones_are_cut(clip: TinyClip, here: Path, tmp_path: Path) -> None:
    names = folder_images(here / "one").names
    lines = [{"file_name": name, "text": "a cat " * 100 if i == 5 else "a cat"} for i, name in enumerate(names)]
    (tmp_path / "captions.jsonl").write_text("\n".join(map(json.dumps, reversed(lines))))
    options: dict[str, Any] = {"clip": str(clip.folder), "captions": tmp_path / "captions.jsonl"}
    found = measured(here / "one", None, here, **options)
    assert found["notes"] == ["1 caption longer than CLIP reads: truncated"]
    for name, content, words in (
        ("a.jsonl", "\n".join(map(json.dumps, lines[:-2])), f"none for image '{names[-2]}', and 1 others"),
        ("a.jsonl", '{"file_name": 3}', "line 1: expected an object with file_name and text"),
        ("a.json", json.dumps({"samples": ["3"] * 40}), r"its 'samples' are classes\. Expected captions"),
        ("a.json", json.dumps({"samples": ["a cat"]}), "1 'samples' for 40 images"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(SourceError, match=words):
            measured(here / "one", None, here, clip=str(clip.folder), captions=tmp_path / name)
    with pytest.raises(RecipeError, match=r"has neither samples\.json nor metadata\.jsonl"):
        measured(here / "one", None, here, clip=str(clip.folder))


def test_images_named_by_number_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    """Of a set of a million images and more, 1000000.png is after 999999.png, and so are the captions."""
    for number in (1_000_000, 11, 2, 999_999):
        (tmp_path / f"{number}.png").write_bytes(b"")
    assert folder_images(tmp_path).names == ["2.png", "11.png", "999999.png", "1000000.png"]


def test_useless_options_are_refused(here: Path, tmp_path: Path) -> None:
    images = tmp_path / "noise.npz"
    np.savez(images, arr_0=np.zeros((8, 8, 8, 3), np.uint8))
    for against, option, value, words in (
        (None, "source", ["a"], "--source: it applies only to a reference"),
        (None, "most", 3, "--against-num: it applies only to a reference"),
        (None, "keep", Path("k.npz"), "--keep-statistics: it applies only to a reference"),
        (here / "one", "captions", Path("c.json"), "--captions: they are for the CLIP score"),
        (images, "crop_px", 8, "--crop: it crops folders"),
        (here / "one", "source", ["a"], "--source: it is for stores"),
    ):
        with pytest.raises(RecipeError, match=words):
            measured(images, against, here, **{option: value})


def test_what_cannot_be_measured_is_named(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "five").mkdir()
    for i in range(5):
        smooth_image(i).save(tmp_path / f"five/{i}.png")
    for name, arrays in {
        "grey": {"arr_0": np.zeros((4, 8, 8), np.uint8)},
        "other": {"x": np.zeros(3)},
        "told": {"leandit": np.frombuffer(b'{"network": 3}', np.uint8)},
        "mu": {"mu": np.zeros(3), "sigma": np.zeros((3, 3))},
    }.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
    for kind, target, against, words in (
        (SourceError, tmp_path / "empty", here / "one", "it holds no images"),
        (SourceError, here / "one", tmp_path / "nothing", "there is no such file"),
        (SourceError, tmp_path / "five", here / "one", "expected more than 5 of each"),
        (DamageError, tmp_path / "grey.npz", here / "one", r"arr_0 is \(4, 8, 8\) uint8"),
        (SourceError, tmp_path / "other.npz", here / "one", "neither images nor statistics"),
        (DamageError, here / "one", tmp_path / "told.npz", "does not say which"),
        (SourceError, here / "one", tmp_path / "mu.npz", "which are of Inception"),
    ):
        with pytest.raises(kind, match=words):
            measured(target, against, here)
    broken = PixelNetwork()
    broken.features = lambda images: np.where(np.arange(len(images)) == 3, np.nan, 1)[:, None].repeat(9, 1)
    monkeypatch.setattr("leandit.tools.sample.evaluation.evaluate.open_network", lambda *_: broken)
    with pytest.raises(EncoderError, match="not finite for image 3 of the set"):
        measured(here / "noise", here / "one", here)
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = CliRunner().invoke(app, ["evaluate", str(here / "noise"), "--against", str(here / "one")])
    assert "expected one process. Draw in several with 'leandit sample" in str(ended.exception)
