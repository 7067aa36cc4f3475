"""``leandit sample``: it finds classes, captions, buckets and decoders, or says why not."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from making import CPU, caption_recipe, encode, label_recipe, no_progress, train_recipe
from noise_store import make_store
from PIL import Image
from runs import SPEC
from tiny_autoencoders import save_autoencoder
from torch._dynamo.testing import CompileCounterWithBackend

from leandit.datasets.revisions.local import encoder_section
from leandit.datasets.store import LatentStore
from leandit.errors import EncoderError, LeanditError, RecipeError, RunError
from leandit.precompute.encoders.model_files import local_folder
from leandit.recipe import to_toml
from leandit.tools.cli.preflight import check_evaluation, check_subjects
from leandit.tools.sample.request import SampleRequest
from leandit.tools.sample.sample import sample_grid, sample_set
from leandit.tools.sample.sampler import check_request, open_sampler
from leandit.tools.sample.subjects import Captions
from leandit.train.sampling.snapshot import load_snapshot
from leandit.train.weights.published import official_bytes

pytestmark = pytest.mark.usefixtures("tiny_models")
Draw = Callable[..., dict]


@pytest.fixture
def go(tmp_path: Path) -> Draw:
    """Sample a grid into a folder of the test."""

    def run(path: Path, **options: Any) -> dict:
        return sample_grid(path, SampleRequest(**options), out=tmp_path / "out", device=CPU)

    return run


def grid_pixels(result: dict) -> np.ndarray:
    return np.asarray(Image.open(result["grid"])).astype(int)


def test_sampling_twice_gives_the_same_image_and_another_seed_or_size_another(go: Draw, runs: Any) -> None:
    grids = []
    for seed in (0, 0, 1):
        result = go(runs.labels, labels=["0", "2"], steps=3, seed=seed)
        grids.append(Path(result["grid"]).read_bytes())
    assert grids[0] == grids[1] != grids[2]
    assert (result["samples"], result["warning"]) == (["0: n000", "2: n002"], None)
    for bucket in ("64x32", "96x64"):  # other sizes than those of the store
        assert go(runs.labels, labels=["1"], steps=2, bucket=bucket)["bucket"] == bucket


def test_labels_and_captions_are_as_requested_or_spread(go: Draw, runs: Any, caption_store: LatentStore) -> None:
    named = go(runs.labels, labels=["N002", "0", "1"], count=2, steps=1)
    assert named["samples"] == ["2: n002"] * 2 + ["0: n000"] * 2 + ["1: n001"] * 2
    captions = caption_store.captions["text"].to_pylist()
    assert go(runs.captions, captions=captions[:2], count=3, steps=1)["samples"] == [
        *([captions[0]] * 3),
        *([captions[1]] * 3),
    ]
    assert go(runs.labels, count=3, steps=1)["samples"] == ["0: n000", "1: n001", "2: n002"]
    assert go(runs.captions, count=2, steps=1)["samples"] == [captions[0], captions[-1]]
    mixed = ["a tiny yellow square", "a red circle", "a purple triangle and a cyan square"]  # also one of the store
    assert go(runs.captions, captions=mixed, steps=2)["samples"] == mixed


def test_captions_of_the_store_equal_those_encoded_live(runs: Any, caption_store: LatentStore, tmp_path: Path) -> None:
    moved = shutil.copytree(runs.captions, tmp_path / "elsewhere/run")  # from here the run does not find its store
    snapshot, texts = load_snapshot(runs.captions, CPU), caption_store.captions["text"].to_pylist()[:4]
    sources = Captions(snapshot, runs.captions, None, None, CPU), Captions(snapshot, moved, None, "shipped:t5", CPU)
    one, other = (captions.conditioning(captions.embed(texts)).valid_captions for captions in sources)
    assert one.lengths == other.lengths
    torch.testing.assert_close(one.tokens, other.tokens, rtol=2e-3, atol=2e-3)  # stored as float16
    assert not torch.equal(one.tokens, other.tokens)  # not both read from the store


def test_captions_come_from_any_store_of_the_run_that_still_exists(tmp_path: Path) -> None:
    for name, lengths in (("few", [2, 3]), ("many", [4, 5, 6, 7])):
        make_store(tmp_path / name, {"32x32": 8}, token_counts=lengths, text_width=16)
    run = tmp_path / "run"
    run.mkdir()

    few, many = (LatentStore(tmp_path / name) for name in ("few", "many"))

    def captions_of(*names: str, weights: str = "0", root_hash: str | None = None) -> Captions:
        stores = [{"path": f"../{name}", "revision": 1, "root_hash": root_hash} for name in names]
        (run / "run.json").write_text(json.dumps({"stores": stores, "recipe": {}, "spec": SPEC}))
        section = encoder_section(few.spec, "text", few.path)
        made = {"weights_sha256": weights * 64, "model": section}
        snapshot: Any = SimpleNamespace(state={"text_encoder": made}, spec=SimpleNamespace(reference=""))
        return Captions(snapshot, run, None, None, CPU)

    captions = captions_of("few", "many", "gone")
    expected = [many.caption_embedding(3), few.caption_embedding(1), many.caption_embedding(3)]
    for found, embedding in zip(captions.embed(["noise 3", "noise 1", "noise 3"]), expected, strict=True):
        assert np.array_equal(found[""].embeddings.numpy(), embedding.astype(np.float32))
    assert captions.store.path.samefile(run / "../few")  # the first that has it
    with pytest.raises(RunError, match=r"store '.*few': its captions come from another text encoder"):
        captions_of("few", weights="1")
    with pytest.raises(RunError, match="its store is missing"):
        _ = captions_of("gone").store
    others = captions_of("few", "many", root_hash=many.root_hash)  # few is another store
    assert others.store.path.samefile(tmp_path / "many")
    assert "few' is not the one that run" in others.warnings[0]


def test_captions_that_were_encoded_otherwise_are_refused(
    go: Draw, runs: Any, caption_folder: Path, tmp_path: Path
) -> None:
    encode(caption_recipe("text.max_tokens=8"), caption_folder, tmp_path / "store")
    with pytest.raises(RunError, match=r"encoded with text\.max_tokens 8, those of the model with \d+. Check --store"):
        go(runs.captions, captions=["a red circle"], store=tmp_path / "store")
    encode(caption_recipe("text.batch_size=2", "text.padding_side=auto"), caption_folder, tmp_path / "same")
    go(runs.captions, captions=["a red circle"], store=tmp_path / "same", steps=1)


def test_a_caption_that_is_cut_off_is_warned_of(go: Draw, runs: Any) -> None:
    assert "the model reads" in go(runs.captions, captions=["word " * 400], steps=1)["warning"]


@pytest.mark.parametrize(
    ("which", "options", "words"),
    [
        ("labels", {"labels": ["3"]}, "label: no class '3'.*0 to 2"),
        ("labels", {"labels": ["m001"]}, "--label: no class 'm001'. Did you mean 'n001'"),
        ("labels", {"guidance": -1.0}, "--guidance -1: expected a number from 0 to 100"),
        ("labels", {"guided_channels": 5}, "--guided-channels 5: the latents have 4"),
        ("labels", {"captions": ["a red circle"]}, "--caption: model 'DiT-S/4' takes class labels"),
        ("captions", {"labels": ["1"]}, "--label: model 'pixart-tiny' takes captions"),
        ("labels", {"bucket": "30x32"}, "30x32.*multiples"),
        ("labels", {"bucket": "big"}, "big.*HEIGHTxWIDTH"),
        ("labels", {"diffusion": "constant"}, "--diffusion, --last-step: only --sampler sde"),
        ("labels", {"shift": 3.0}, "--shift 3: only flow matching"),
    ],
)
def test_what_the_model_cannot_draw_is_refused(which: str, options: dict, words: str, go: Draw, runs: Any) -> None:
    with pytest.raises(RecipeError, match=words):
        go(getattr(runs, which), **options)
    if options.keys() & {"labels", "captions"}:  # by its folder alone, before torch is loaded
        with pytest.raises(RecipeError, match=words):
            check_subjects(getattr(runs, which), options.get("labels", []), options.get("captions", []))


def test_requests_that_cannot_be_met_are_refused(go: Draw, runs: Any, tmp_path: Path) -> None:
    for text in ("1", "a,b", "0.5,0.2", "0,2", "nan,1", "0,,1"):
        with pytest.raises(RecipeError, match="--guidance-times"):
            SampleRequest(guidance_times=text)
    assert SampleRequest(guidance_times="0.1,0.8").interval == (0.1, 0.8)
    how: dict[str, Any] = {"against": None, "clip": "clip.file", "features": "inception", "out": tmp_path}
    with pytest.raises(RecipeError, match=r"--clip: run .* generates classes"):
        check_evaluation(runs.labels, captions=None, **how)
    check_evaluation(runs.captions, captions=None, **how)
    with pytest.raises(LeanditError, match="nowhere"):
        go(runs.captions, captions=["a red circle"], steps=1, store=tmp_path / "nowhere")
    with pytest.raises(RunError, match="no snapshot"):
        go(tmp_path)
    (tmp_path / "snapshot-4").mkdir()
    for content in ("{", "[]", '{"spec": {"caption_width": 0}}'):  # what is damaged is found later
        (tmp_path / "snapshot-4/state.json").write_text(content)
        check_subjects(tmp_path, ["lion"], [])


def test_guidance_without_null_and_latents_that_are_not_finite_are_refused(
    runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = load_snapshot(runs.labels, CPU)
    unguided = dataclasses.replace(snapshot, state=snapshot.state | {"drop": 0.0})
    with pytest.raises(RecipeError, match=r"trained with conditioning\.drop = 0"):
        check_request(unguided, SampleRequest(guidance=4.0), "ddim")
    check_request(unguided, SampleRequest(guidance=1.0), "ddim")
    sampler = open_sampler(runs.labels, SampleRequest(labels=["2", "0"], count=2, steps=2, guidance=1.0), CPU)
    drawn = torch.zeros(4, sampler.snapshot.spec.channels, 4, 4)
    drawn[1, 0, 2, 3] = torch.nan
    monkeypatch.setattr("leandit.tools.sample.sampler.draw_latents", lambda *_, **__: drawn)
    with pytest.raises(RunError, match=r"snapshot-\d+': the latents of image 2 are not finite"):
        list(sampler.draw([0, 2, 1, 3]))


def test_another_vae_is_warned_of_or_refused(go: Draw, runs: Any, tmp_path: Path) -> None:
    blocks: Any = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    other, wide = (
        str(save_autoencoder(tmp_path / f"{n}", "kl", latent_channels=n, block_out_channels=(8,) * 4, **blocks))
        for n in (4, 8)
    )
    assert "not the VAE that the store was made with" in go(runs.labels, labels=["0"], steps=1, vae=other)["warning"]
    same = shutil.copytree(str(local_folder("shipped:vae")), tmp_path / "same")
    assert go(runs.labels, labels=["0"], steps=1, vae=str(same))["warning"] is None
    words = r"decodes 8 channels of 1/\d+ of the pixels, the latents of snapshot .* have 4 of"
    with pytest.raises(EncoderError, match=words):
        go(runs.labels, labels=["0"], steps=1, vae=wide)


@pytest.mark.parametrize(
    ("kind", "interval"), [pytest.param("labels", "0,1", marks=pytest.mark.integration), ("captions", "0.3,1")]
)
def test_images_of_one_size_compile_each_kind_of_block_once_and_are_those_of_eager_blocks(
    kind: str, interval: str, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter, real = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: real(f, **how | {"backend": counter}))
    request = SampleRequest(count=7, batch=3, steps=4, guidance=2.0, guidance_times=interval)
    drawn = []
    torch._dynamo.reset()
    for compiled in (False, True):
        out, asked = tmp_path / str(compiled), dataclasses.replace(request, compiled=compiled)
        made = sample_set(getattr(runs, kind), asked, out=out, device=CPU, progress=no_progress)
        assert made["drawn"] == 7
        drawn.append(np.stack([np.asarray(Image.open(path)) for path in sorted(out.glob("*.png"))]).astype(int))
    torch._dynamo.reset()
    assert counter.frame_count == 1
    assert np.abs(drawn[0] - drawn[1]).max() <= 2


def recipes(folder: Path, recipe: Any, encoders: Any) -> dict[str, str]:
    for name, section in (("train.toml", recipe), ("precompute.toml", encoders)):
        (folder / name).write_text(to_toml(section))
    return {"recipe": str(folder / "train.toml"), "encoders": str(folder / "precompute.toml")}


def test_published_checkpoints_are_drawn_from_without_a_run(go: Draw, runs: Any, tmp_path: Path) -> None:
    weights = load_snapshot(runs.labels, CPU).model.state_dict()
    (tmp_path / "DiT.safetensors").write_bytes(official_bytes(weights, ".safetensors"))
    names = recipes(tmp_path, train_recipe("dit-s-4", "model.num_classes=3"), label_recipe())
    given: dict[str, Any] = {"labels": ["2", "0"], "steps": 2, "bucket": "32x32"}
    expected, result = grid_pixels(go(runs.labels, **given)), go(tmp_path / "DiT.safetensors", **names, **given)
    assert (result["snapshot"], result["warning"]) == ("DiT.safetensors", None)
    assert np.array_equal(grid_pixels(result)[:32], expected[:32])  # their names, below, are others
    model: Any = load_snapshot(runs.captions, CPU).model
    model.net.save_pretrained(tmp_path / "PixArt/transformer")
    names = recipes(tmp_path, train_recipe("pixart-tiny"), caption_recipe())
    given = {"captions": ["a tiny yellow square", "a red circle"], "steps": 2, "guidance": 2.0}
    expected = grid_pixels(go(runs.captions, **given, bucket="64x64"))
    result = go(tmp_path / "PixArt", **names, **given)
    assert (result["bucket"], result["warning"]) == ("64x64", None)  # of three, the square one
    assert expected.std() > 10
    assert np.abs(grid_pixels(result) - expected).max() <= 6  # the store's null caption is float16, here it is float32


def test_a_published_checkpoint_needs_both_recipes_and_classes(go: Draw, runs: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--recipe.*--encoders"):
        go(runs.labels, recipe="dit-xl-2-256")
    with pytest.raises(RecipeError, match="--weights raw: only a run has them"):
        go(runs.labels, recipe="dit-xl-2-256", encoders="imagenet-256", weights="raw")
    with pytest.raises(RecipeError, match=r"model\.num_classes"):
        go(runs.labels, **recipes(tmp_path, train_recipe("dit-s-4"), label_recipe()))
