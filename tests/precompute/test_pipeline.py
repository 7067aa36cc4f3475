"""Stage 1 as a whole: the right numbers, the same bytes whatever crashes in between, nothing lost or overwritten."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from image_files import adm_by_hand, bucket_by_hand
from making import (
    CPU,
    caption_recipe,
    label_recipe,
    make_caption_folder,
    make_class_folder,
    no_progress,
    read_metadata,
    smooth_image,
    tree_digest,
    write_file,
)
from PIL import Image
from stores import content

from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, SourceError, StoreError
from leandit.precompute import pipeline
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.encoders.model_files import local_folder
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.precompute.pipeline import Report
from leandit.tools.plan.dry_run import describe_precompute

Encode = Callable[[PrecomputeRecipe, Path, Path], Report]
FIRST = "revisions/000001"


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 captioned images in three buckets."""
    return make_caption_folder(tmp_path_factory.mktemp("few") / "images", count=6)


def moments_by_hand(images: list[np.ndarray], batch_size: int) -> np.ndarray:
    vae = diffusers.AutoencoderKL.from_pretrained(local_folder("shipped:vae")).eval()
    encoded = []
    for start in range(0, len(images), batch_size):
        batch = torch.from_numpy(np.stack(images[start : start + batch_size]))
        with torch.no_grad():
            posterior = vae.encode(batch.permute(0, 3, 1, 2).float() / 127.5 - 1).latent_dist
        encoded.append(torch.cat([posterior.mean, posterior.logvar], 1).numpy().astype(np.float16))
    return np.concatenate(encoded)


def test_the_latents_and_flipped_latents_of_a_label_store_equal_an_independent_computation(
    encode: Encode, class_folder: Path, tmp_path: Path
) -> None:
    encode(label_recipe("vae.flip=true"), class_folder, tmp_path / "store")
    store, files = LatentStore(tmp_path / "store"), sorted(class_folder.glob("*/*.png"))
    images = [adm_by_hand(Image.open(path), 32) for path in files]
    assert np.array_equal(store.latents("32x32").read(0, 15), moments_by_hand(images, 8))
    flipped = moments_by_hand([image[:, ::-1] for image in images], 8)
    assert np.array_equal(store.latents("32x32", flipped=True).read(0, 15), flipped)
    table = store.records
    assert table["key"].to_pylist() == [path.relative_to(class_folder).as_posix() for path in files]
    assert table["label"].to_pylist() == [int(path.parent.name[1:]) for path in files]
    assert table["row"].to_pylist() == list(range(15))
    assert store.spec.classes == ["n000", "n001", "n002"]


def test_the_latents_of_a_caption_store_equal_an_independent_computation(
    caption_store: LatentStore, caption_folder: Path
) -> None:
    for i, bucket in enumerate([(64, 64), (48, 80), (80, 48)]):
        files = [caption_folder / f"images/{n}.png" for n in range(i, 14, 3)]
        wanted = moments_by_hand([bucket_by_hand(Image.open(path).convert("RGB"), bucket) for path in files], 8)
        assert np.array_equal(caption_store.latents("{}x{}".format(*bucket)).read(0, len(files)), wanted)


def test_caption_embeddings_equal_transformers_called_directly_and_every_record_finds_its_own(
    caption_store: LatentStore, caption_folder: Path
) -> None:
    folder = local_folder("shipped:t5")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.T5EncoderModel.from_pretrained(folder).eval()
    captions = caption_store.captions.to_pylist()
    ids = [tokenizer(c["text"])["input_ids"] for c in captions]
    assert [c["num_tokens"] for c in captions] == sorted(len(tokens) for tokens in ids)
    for _, same_length in groupby(range(len(ids)), key=lambda i: len(ids[i])):
        rows = list(same_length)
        for start in range(0, len(rows), 8):
            batch = rows[start : start + 8]
            with torch.no_grad():
                wanted = model(input_ids=torch.tensor([ids[i] for i in batch])).last_hidden_state.numpy()
            for i, embedding in zip(batch, wanted.astype(np.float16), strict=True):
                assert np.array_equal(caption_store.caption_embedding(i), embedding)
    padded = tokenizer("", padding="max_length", max_length=16, return_tensors="pt")
    with torch.no_grad():
        null = model(**padded).last_hidden_state[0].numpy()
    assert np.array_equal(caption_store.null_caption, null.astype(np.float16))
    texts = [caption["text"] for caption in captions]
    rows = zip(read_metadata(caption_folder), caption_store.records["caption_ids"].to_pylist(), strict=True)
    assert all(row["captions"] == [texts[c] for c in own] for row, own in rows)
    assert len(set(texts)) == len(texts)


def test_broken_images_are_rejected_and_their_neighbours_keep_their_bits(
    encode: Encode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 4)
    fine = make_class_folder(tmp_path / "fine", classes=2)
    broken = Path(shutil.copytree(fine, tmp_path / "broken"))
    cut = broken / "n000/2.png"
    cut.write_bytes(cut.read_bytes()[:-200])
    (broken / "n001/9.png").write_text("not an image")  # seen when the header is read, so it gets no row
    manifest = encode(label_recipe(), broken, tmp_path / "store").manifest
    assert (manifest.num_planned, manifest.num_stored, manifest.num_rejected) == (11, 9, 2)
    encode(label_recipe(), fine, tmp_path / "reference")
    store, wanted = LatentStore(tmp_path / "store"), content(LatentStore(tmp_path / "reference"))
    rejected = [row for row in store.records.to_pylist() if row["status"] == "rejected"]
    assert [(row["key"], row["stage"], row["reason"], row["row"], row["checksum"]) for row in rejected] == [
        ("n000/2.png", "decode", "truncated", 2, None),
        ("n001/9.png", "scan", "not_an_image", -1, None),
    ]
    assert np.isnan(store.latents("32x32")[2]).all()
    assert {key: found for key, found in content(store).items() if key in wanted and key != "n000/2.png"} == {
        key: found for key, found in wanted.items() if key != "n000/2.png"
    }
    assert store.index("32x32").rows.tolist() == [0, 1, *range(3, 10)]


@pytest.mark.parametrize("how", ["text", "truncated"])
def test_a_source_in_which_all_is_broken_is_an_error_and_seals_nothing(
    how: str, encode: Encode, tmp_path: Path
) -> None:
    source = make_class_folder(tmp_path / "train", classes=2, per_class=2)
    for path in source.rglob("*.png"):
        path.write_bytes(b"text" if how == "text" else path.read_bytes()[:-200])
    with pytest.raises(SourceError, match=r"[34] of 4 records are rejected.*max_reject_share"):
        encode(label_recipe(), source, tmp_path / "store")
    with pytest.raises(SourceError, match=r"all 4 records are rejected|none of 4 records could be stored"):
        encode(label_recipe("source.max_reject_share=1"), source, tmp_path / "store")
    assert not (tmp_path / "store" / FIRST / "manifest.json").exists()


def test_a_foreign_folder_is_refused_and_untouched(
    encode: Encode, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "load_encoders", lambda *_: pytest.fail("encoders are loaded too early"))
    write_file(tmp_path / "file", "mine")
    write_file(tmp_path / "names/buckets/mine.txt", "mine")
    write_file(tmp_path / "group/zarr.json", '{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    write_file(tmp_path / "later/zarr.json", '{"attributes": {"leandit": {"format_version": 99}}}')
    before = tree_digest(tmp_path)
    for name in ("file", "names", "group", "later"):
        with pytest.raises(StoreError, match="store"):
            encode(caption_recipe(), few, tmp_path / name)
    assert tree_digest(tmp_path) == before


def test_a_store_among_the_class_folders_is_refused_because_it_would_be_a_class(
    encode: Encode, class_folder: Path, few: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(class_folder, tmp_path / "source")
    before = tree_digest(source)
    for store in (source / "a-store", source / "n000" / "store"):
        with pytest.raises(SourceError, match=r"it is inside source .* Pass a --store elsewhere"):
            encode(label_recipe(), source, store)
    assert tree_digest(source) == before
    beside = shutil.copytree(few, tmp_path / "few")  # of a table, only what it names is read
    for again in (False, True):
        (beside / "store").mkdir(exist_ok=True)  # an empty folder becomes a store
        assert encode(caption_recipe(), beside, beside / "store").manifest.revision == 1, again


@pytest.mark.parametrize(("damage", "step"), [("gone", 5), ("cut", 5), pytest.param("cut", 1, marks=pytest.mark.slow)])
def test_whatever_file_a_sealed_store_loses_the_same_command_encodes_nothing_and_names_the_repair(
    damage: str, step: int, encode: Encode, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, store = tmp_path / "whole", tmp_path / "store"
    encode(caption_recipe(), few, whole)
    monkeypatch.setattr(ImageEncoder, "encode", lambda *_: pytest.fail("encoded again"))
    names = list(tree_digest(whole))
    for name in names[::step] if damage == "gone" else names[step // 2 :: step]:
        shutil.copytree(whole, store)
        if damage == "gone":
            (store / name).unlink()
        else:
            (store / name).write_bytes((store / name).read_bytes()[:-3])
        before = tree_digest(store)
        unread = name.endswith("zarr.json") or "/twin/" in name or name.endswith("local.json")
        if unread:
            encode(caption_recipe(), few, store)
        else:
            with pytest.raises(DamageError, match=r"verify .*--repair"):
                encode(caption_recipe(), few, store)
        after, old = tree_digest(store), before.get(name)
        assert after.pop(name, None) in (old, (whole / name).read_bytes()), name
        before.pop(name, None)
        assert after == before, name
        shutil.rmtree(store)


def test_output_that_is_not_finite_or_beyond_float16_is_rejected_and_the_others_keep_their_bits(
    encode: Encode, class_folder: Path, tmp_path: Path, label_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, bad = ImageEncoder.encode, {2: np.nan, 7: np.inf, 13: 1e6}
    files = sorted(class_folder.glob("*/*.png"))
    numbers = {adm_by_hand(Image.open(path), 32).tobytes(): i for i, path in enumerate(files)}

    def failing(self: ImageEncoder, pixels: np.ndarray) -> np.ndarray:
        moments = forward(self, pixels).copy()
        for i, image in enumerate(pixels):
            moments[i, 0, 0, 0] = bad.get(numbers.get(image.tobytes(), -1), moments[i, 0, 0, 0])
        return moments

    monkeypatch.setattr(ImageEncoder, "encode", failing)
    encode(label_recipe("source.max_reject_share=1"), class_folder, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    found, wanted = store.latents("32x32").read(0, 15), label_store.latents("32x32").read(0, 15)
    for i, row in enumerate(store.records.to_pylist()):
        assert (row["row"], row["reason"]) == (i, "nonfinite" if i in bad else None)
        assert np.isnan(found[i]).all() if i in bad else np.array_equal(found[i], wanted[i])


def test_a_run_and_a_dry_run_warn_once_of_buckets_that_crop_much(tmp_path: Path) -> None:
    smooth_image(0, 64, 64).save(tmp_path / "a.png")
    images = ["images.crop=bucket", "images.buckets=area", "images.resolution=64", "source.labels=none"]
    few, more = (label_recipe(*images, f"images.step_px={step}") for step in (32, 16))
    notes: list[str] = []
    how: dict[str, Any] = {"source_path": tmp_path, "device": CPU, "progress": no_progress, "say": notes.append}
    pipeline.precompute(few, store_path=tmp_path / ".few", **how)
    assert notes == [*few.images.warnings()]
    assert "at 64 px" in notes[0]
    pipeline.precompute(more, store_path=tmp_path / ".more", **how)
    assert len(notes) == 1
    assert describe_precompute(few, None, CPU).text.count(f"warning             {notes[0]}") == 1
    assert "warning  " not in describe_precompute(more, None, CPU).text
