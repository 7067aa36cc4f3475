"""A caption whose embedding is not finite in float32 either: its records are rejected, the rest is whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import flip
from making import CAPTION_RECIPE, Leandit, add_image, encode, make_caption_folder, smooth_image, tree_digest
from safetensors.torch import load_file, save_file
from stores import small_shards
from transformers import AutoTokenizer

from leandit.datasets.loader import make_loader
from leandit.datasets.store import LatentStore
from leandit.precompute.config import load

Run = Callable[..., tuple[int, Any, str]]
BROKEN = "triangle"  # four of the fourteen records of the folder have it in both captions
SHIPPED = Path(__file__).parents[2] / "precompute/demo_encoders/t5"


@pytest.fixture(autouse=True)
def _several_shards() -> Iterator[None]:
    with small_shards():
        yield


def break_word(folder: Path, word: str) -> Path:
    """Save the shipped text encoder with an embedding of NaN for a word that the colors and shapes of captions have."""
    shutil.copytree(SHIPPED, folder)
    tensors, tokenizer = load_file(folder / "model.safetensors"), AutoTokenizer.from_pretrained(folder)
    ids = set(tokenizer(f"a {word}")["input_ids"]) - set(tokenizer("a big green circle")["input_ids"])
    assert ids
    tensors["shared.weight"][sorted(ids)] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def broken_t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return break_word(tmp_path_factory.mktemp("t5") / "t5", BROKEN)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_caption_folder(tmp_path_factory.mktemp("source") / "images")


def settings(t5: Path, *more: str) -> list[str]:
    """The demo's recipe with this text encoder, as options of the command."""
    small = (*CAPTION_RECIPE, f"text.model={t5}", *more)
    return ["demo", "--device", "cpu", *(word for one in small for word in ("--set", one))]


@pytest.fixture
def run(leandit: Leandit) -> Run:
    """Exit code, JSON and messages of a command, run in this process, whose shards are small."""

    def command(*words: object) -> tuple[int, Any, str]:
        done = leandit(*words, *(["--json"] if words[0] in ("inspect", "verify") else []))
        return done.code, json.loads(done.out) if done.out.startswith("{") else {}, done.err

    return command


@pytest.fixture(scope="module")
def rejected(source: Path, broken_t5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("rejected") / "store"
    with small_shards():
        encode(load("demo", [*CAPTION_RECIPE, f"text.model={broken_t5}"]), source, store)
    return store


def test_its_records_are_rejected_and_the_others_are_as_without_it(
    rejected: Path, source: Path, tmp_path: Path, run: Run
) -> None:
    code, facts, _ = run("inspect", rejected)
    assert code == 0
    assert (facts["num_planned"], facts["num_stored"], facts["num_rejected"], facts["complete"]) == (14, 10, 4, True)
    records = LatentStore(rejected).records.to_pylist()
    refused = [one for one in records if one["status"] == "rejected"]
    assert {(one["stage"], one["reason"]) for one in refused} == {("encode", "nonfinite_caption")}
    assert all("T5EncoderModel in float32 gave NaN" in one["detail"] and BROKEN in one["detail"] for one in refused)
    assert all(one["checksum"] is None for one in refused)
    assert run("precompute", "--source", source, "--store", tmp_path / "good", *settings(SHIPPED))[0] == 0
    good, store = LatentStore(tmp_path / "good"), LatentStore(rejected)
    kept = [one for one in good.records.to_pylist() if one["key"] not in {one["key"] for one in refused}]
    assert [one["checksum"] for one in kept] == [one["checksum"] for one in records if one["status"] == "stored"]
    for one in kept:
        for i in range(len(one["caption_ids"])):
            assert np.array_equal(store.caption(store.record(one["key"]), i), good.caption(good.record(one["key"]), i))
    ids = [i for i, text in enumerate(store.captions["text"].to_pylist()) if BROKEN in text]
    assert ids
    assert all(np.isnan(store.caption_embedding(i)).all() for i in ids)  # never zeros
    assert store.find_captions([f"a red {BROKEN}", "a red circle"])[0] is None
    for batch, _ in zip(make_loader(store, global_batch=4, seed=0), range(6), strict=False):
        assert torch.isfinite(batch.latents).all()
        assert torch.isfinite(batch.captions).all()


def test_verify_deep_and_repair_know_it(rejected: Path, source: Path, tmp_path: Path, run: Run) -> None:
    store = tmp_path / "store"
    shutil.copytree(rejected, store)
    before = tree_digest(store)
    code, found, _ = run("verify", store, "--deep", "--source", source, "--device", "cpu")
    assert (code, found["findings"]) == (0, [])
    for path in [*store.glob("captions/embeddings/c/*/0"), *store.glob("buckets/*/moments/c/*/0/0/0")]:
        flip(path, path.stat().st_size // 3)
    code, found, _ = run("verify", store)
    assert code == 4
    assert len(found["findings"]) > 2
    code, found, _ = run("verify", store, "--repair", "--source", source, "--device", "cpu")
    assert (code, found["findings"]) == (0, [])
    assert tree_digest(store) == before


def test_a_later_record_with_the_caption_is_rejected_and_a_compact_store_is_whole(
    rejected: Path, source: Path, broken_t5: Path, tmp_path: Path, run: Run
) -> None:
    shutil.copytree(rejected, tmp_path / "store")
    shutil.copytree(source, tmp_path / "more")
    for name, caption in (("new", f"a red {BROKEN}"), ("fine", "a red circle")):
        add_image(tmp_path / "more", f"images/{name}.png", smooth_image(77), captions=[caption])
    words = ["precompute", "--source", tmp_path / "more", "--store", tmp_path / "store", *settings(broken_t5)]
    code, _, err = run(*words)
    assert code == 0, err
    new = LatentStore(tmp_path / "store").record("images/new.png")
    assert (new.status, new.reason) == ("rejected", "nonfinite_caption")
    assert LatentStore(tmp_path / "store").record("images/fine.png").status == "stored"
    code, _, err = run("compact", tmp_path / "store", "--out", tmp_path / "compacted")
    assert code == 0, err
    assert run("verify", tmp_path / "compacted")[0] == 0
    _, facts, _ = run("inspect", tmp_path / "compacted")
    assert (facts["num_planned"], facts["num_stored"], facts["num_rejected"]) == (16, 11, 5)


def test_an_added_text_encoder_rejects_records_that_were_stored(
    source: Path, broken_t5: Path, tmp_path: Path, run: Run
) -> None:
    words = ["precompute", "--source", source, "--store", tmp_path / "store", *settings(SHIPPED)]
    assert run(*words)[0] == 0
    second = [f"text.second.{one}" for one in ("kind=t5", f"model={broken_t5}", "max_tokens=16")]
    code, _, err = run(*words, *(word for one in second for word in ("--set", one)))
    assert code == 0, err
    refused = [one for one in LatentStore(tmp_path / "store").records.to_pylist() if one["status"] == "rejected"]
    assert len(refused) == 4
    assert {one["reason"] for one in refused} == {"nonfinite_caption"}
    assert run("verify", tmp_path / "store")[0] == 0


@pytest.mark.parametrize(
    ("word", "setting", "words"),
    [
        (BROKEN, "source.max_rejects_in_a_row=1", "1 records or captions in a row are rejected"),
        ("red", "source.max_rejects_in_a_row=100", "of 14 records are rejected"),
    ],
)
def test_too_many_of_them_stop_the_run(
    word: str, setting: str, words: str, source: Path, tmp_path: Path, run: Run
) -> None:
    encoder, store = break_word(tmp_path / "t5", word), tmp_path / "store"
    code, _, err = run("precompute", "--source", source, "--store", store, *settings(encoder, setting))
    assert code == 3
    assert words in err
    assert "nonfinite_caption" in err
    assert run("inspect", store)[1]["complete"] is False


def test_a_null_caption_that_is_not_finite_stops_the_run(source: Path, tmp_path: Path, run: Run) -> None:
    shutil.copytree(SHIPPED, tmp_path / "t5")
    weights = tmp_path / "t5/model.safetensors"
    tensors = load_file(weights)
    save_file({name: one * torch.nan for name, one in tensors.items()}, weights, {"format": "pt"})
    words = ["precompute", "--source", source, "--store", tmp_path / "store", "--set", "source.max_reject_share=1"]
    code, _, err = run(*words, *settings(tmp_path / "t5"))
    assert code == 3
    assert "T5EncoderModel in float32 gave NaN or infinity for the caption ''" in err
