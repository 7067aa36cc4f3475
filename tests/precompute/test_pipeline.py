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
from faults import without_seal
from image_files import adm_by_hand, bucket_by_hand
from making import (
    CPU,
    caption_recipe,
    label_recipe,
    make_caption_folder,
    make_class_folder,
    no_progress,
    smooth_image,
    store_digest,
    tree_digest,
    write_file,
)
from PIL import Image
from stores import content

from leandit.datasets.disk.files import TEMPORARY_PREFIX
from leandit.datasets.errors import DamageError, SourceError, StoreError
from leandit.datasets.format.zarr_shard import CODECS
from leandit.datasets.store import LatentStore
from leandit.precompute import pipeline
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.encoders.model_files import local_folder
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.precompute.pipeline import Report
from leandit.precompute.planning import planner
from leandit.tools.plan.dry_run import describe_precompute

Encode = Callable[[PrecomputeRecipe, Path, Path], Report]
FIRST = "revisions/000001"


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards from few images."""
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 4)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 captioned images in three buckets."""
    return make_caption_folder(tmp_path_factory.mktemp("few") / "images", count=6)


def assert_same_tree(found: Path, wanted: Path) -> None:
    here, there = store_digest(found), store_digest(wanted)
    assert sorted(here) == sorted(there)
    assert [name for name in there if here[name] != there[name]] == []


def moments_by_hand(images: list[np.ndarray], batch_size: int) -> np.ndarray:
    vae = diffusers.AutoencoderKL.from_pretrained(local_folder("shipped:vae")).eval()
    encoded = []
    for start in range(0, len(images), batch_size):
        batch = torch.from_numpy(np.stack(images[start : start + batch_size]))
        with torch.no_grad():
            posterior = vae.encode(batch.permute(0, 3, 1, 2).float() / 127.5 - 1).latent_dist
        encoded.append(torch.cat([posterior.mean, posterior.logvar], 1).numpy().astype(np.float16))
    return np.concatenate(encoded)


def test_the_latents_of_a_label_store_equal_an_independent_computation(
    label_store: LatentStore, class_folder: Path
) -> None:
    files = sorted(class_folder.glob("*/*.png"))
    wanted = moments_by_hand([adm_by_hand(Image.open(path), 32) for path in files], 8)
    assert np.array_equal(label_store.latents("32x32").read(0, 15), wanted)
    table = label_store.records
    assert table["key"].to_pylist() == [path.relative_to(class_folder).as_posix() for path in files]
    assert table["label"].to_pylist() == [int(path.parent.name[1:]) for path in files]
    assert table["row"].to_pylist() == list(range(15))
    assert label_store.spec.classes == ["n000", "n001", "n002"]


def test_the_latents_of_a_caption_store_equal_an_independent_computation(
    caption_store: LatentStore, caption_folder: Path
) -> None:
    for i, bucket in enumerate(["64x64", "48x80", "80x48"]):
        files = [caption_folder / f"images/{n}.png" for n in range(i, 14, 3)]
        height, width = map(int, bucket.split("x"))
        wanted = moments_by_hand(
            [bucket_by_hand(Image.open(path).convert("RGB"), (height, width)) for path in files], 8
        )
        assert np.array_equal(caption_store.latents(bucket).read(0, len(files)), wanted)


def test_the_caption_embeddings_equal_transformers_called_directly(caption_store: LatentStore) -> None:
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


def test_every_record_finds_its_own_captions(caption_store: LatentStore) -> None:
    texts = caption_store.captions["text"].to_pylist()
    shapes = ("circle", "square", "triangle")
    for i, row in enumerate(caption_store.records.to_pylist()):
        wanted = [f"a red {shapes[i % 3]}", f"a big blue {shapes[i % 3]} above a tiny green {shapes[i % 2]}"]
        assert [texts[c] for c in row["caption_ids"]] == wanted
    assert len(set(texts)) == len(texts)


def test_the_flipped_latents_are_those_of_the_flipped_images(
    encode: Encode, class_folder: Path, tmp_path: Path
) -> None:
    encode(label_recipe("vae.flip=true"), class_folder, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    files = sorted(class_folder.glob("*/*.png"))
    wanted = moments_by_hand([adm_by_hand(Image.open(path), 32)[:, ::-1] for path in files], 8)
    assert np.array_equal(store.flipped_latents("32x32").read(0, 15), wanted)


def test_a_kept_mean_is_the_first_half_of_the_moments(
    encode: Encode, class_folder: Path, tmp_path: Path, label_store: LatentStore
) -> None:
    encode(label_recipe("vae.keep=mean"), class_folder, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert store.spec.latent.kind == "mean"
    assert np.array_equal(store.latents("32x32").read(0, 15), label_store.latents("32x32").read(0, 15)[:, :4])


def test_a_moved_store_and_a_moved_source_are_still_the_same(encode: Encode, few: Path, tmp_path: Path) -> None:
    encode(caption_recipe(), few, tmp_path / "a")
    shutil.copytree(few, tmp_path / "moved")  # keeps the times
    (tmp_path / "a").rename(tmp_path / "b")
    assert encode(caption_recipe(), tmp_path / "moved", tmp_path / "b").num_encoded == 0


def test_the_first_plan_stays_when_two_are_written_at_once(
    encode: Encode, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another coordinator plans while this one does: its temporary is seen at the start, its plan at the end."""
    store, freeze = tmp_path / "store", planner.freeze_plan
    temporary = store / FIRST / f"{TEMPORARY_PREFIX}elsewhere@1-1@plan"

    def is_kept(root: Path, plan: Any) -> Any:
        frozen = freeze(root, plan)
        shutil.copytree(root / FIRST / "plan", temporary)
        return frozen

    def comes_second(root: Path, plan: Any) -> Any:
        temporary.rename(store / FIRST / "plan")
        return freeze(root, plan)

    with monkeypatch.context() as patch:
        patch.setattr(planner, "freeze_plan", is_kept)
        encode(caption_recipe(), few, tmp_path / "whole")
    monkeypatch.setattr(planner, "freeze_plan", comes_second)
    assert encode(caption_recipe(), few, store).num_encoded == 6
    assert_same_tree(store, tmp_path / "whole")


@pytest.mark.usefixtures("small_shards")
def test_broken_images_are_rejected_and_their_neighbours_keep_their_bits(encode: Encode, tmp_path: Path) -> None:
    fine = make_class_folder(tmp_path / "fine", classes=2)
    broken = Path(shutil.copytree(fine, tmp_path / "broken"))
    cut = broken / "n000/2.png"
    cut.write_bytes(cut.read_bytes()[:-200])
    (broken / "n001/9.png").write_text("not an image")  # seen when the header is read, so it gets no row
    report = encode(label_recipe(), broken, tmp_path / "store")
    manifest = report.manifest
    assert (manifest.num_planned, manifest.num_stored, manifest.num_rejected) == (11, 9, 2)
    encode(label_recipe(), fine, tmp_path / "reference")
    store, reference = LatentStore(tmp_path / "store"), LatentStore(tmp_path / "reference")

    rejected = {row["key"]: row for row in store.records.to_pylist() if row["status"] == "rejected"}
    why = {key: (row["stage"], row["reason"], row["row"]) for key, row in rejected.items()}
    assert why == {"n000/2.png": ("decode", "truncated", 2), "n001/9.png": ("scan", "not_an_image", -1)}
    assert all(row["checksum"] is None and row["detail"] for row in rejected.values())

    found, wanted = store.latents("32x32").read(0, 10), reference.latents("32x32").read(0, 10)
    assert np.isnan(found[2]).all()
    others = [i for i in range(10) if i != 2]
    assert np.array_equal(found[others], wanted[others])
    sums, wanted_sums = store.records["checksum"].to_pylist(), reference.records["checksum"].to_pylist()
    assert [sums[i] for i in others] == [wanted_sums[i] for i in others]
    assert store.index("32x32").rows.tolist() == others


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


@pytest.mark.parametrize(
    "theirs",
    [
        {"": "mine"},
        {"notes.txt": "mine"},
        {"buckets/mine.txt": "mine", "plan/mine.txt": "mine"},
        {"zarr.json": '{"zarr_format": 3, "node_type": "group", "attributes": {}}', "buckets/x": "mine"},
        {"zarr.json": '{"attributes": {"leandit": {"format_version": 99}}}', "buckets/x": "mine"},
    ],
    ids=["a file in its place", "a file", "folders of the same names", "another zarr group", "a later format"],
)
def test_a_foreign_folder_is_refused_and_untouched(
    theirs: dict[str, str], encode: Encode, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "load_encoders", lambda *_: pytest.fail("encoders are loaded too early"))
    for name, text in theirs.items():
        write_file(tmp_path / "store" / name, text)
    before = tree_digest(tmp_path)
    with pytest.raises(StoreError, match="store"):
        encode(caption_recipe(), few, tmp_path / "store")
    assert tree_digest(tmp_path) == before


def test_a_store_among_the_class_folders_is_refused_because_it_would_be_a_class(
    encode: Encode, class_folder: Path, few: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(class_folder, tmp_path / "source")
    before = tree_digest(source)
    for store in (source / "a-store", source / "n000" / "store"):
        with pytest.raises(SourceError, match=r"it is inside source .* Give a --store elsewhere"):
            encode(label_recipe(), source, store)
    assert tree_digest(source) == before
    beside = shutil.copytree(few, tmp_path / "few")  # of a table, only what it names is read
    for again in (False, True):
        assert encode(caption_recipe(), beside, beside / "store").manifest.revision == 1, again


def test_an_empty_folder_becomes_a_store(encode: Encode, few: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    assert encode(caption_recipe(), few, tmp_path / "store").manifest.num_stored == 6


@pytest.mark.parametrize(
    ("damage", "step"),
    [("gone", 5), ("cut", 5), *(pytest.param(how, 1, marks=pytest.mark.slow) for how in ("gone", "cut"))],
)
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
        after = tree_digest(store)
        assert {path: content for path, content in after.items() if path != name} == {
            path: content for path, content in before.items() if path != name
        }, name
        assert after.get(name) in (before.get(name), (whole / name).read_bytes()), name
        shutil.rmtree(store)


@pytest.mark.parametrize("name", ["plan.json", "records.parquet", "captions.parquet"])
def test_a_damaged_plan_is_refused_and_nothing_is_changed(name: str, encode: Encode, few: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    without_seal(lambda: encode(caption_recipe(), few, store))
    data = bytearray((store / FIRST / "plan" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (store / FIRST / "plan" / name).write_bytes(data)
    before = tree_digest(store)
    with pytest.raises(DamageError, match=r"plan.*(damaged|not JSON|not valid JSON|does not match its own sha256)"):
        encode(caption_recipe(), few, store)
    assert tree_digest(store) == before


@pytest.mark.parametrize("codec", [name for name in CODECS if name != "none"])
def test_every_codec_gives_the_same_numbers_through_the_same_calls(
    codec: str, encode: Encode, few: Path, tmp_path: Path
) -> None:
    encode(caption_recipe(), few, tmp_path / "none")
    encode(caption_recipe(f"store.codec={codec}"), few, tmp_path / codec)
    plain, packed = LatentStore(tmp_path / "none"), LatentStore(tmp_path / codec)
    assert (content(packed), packed.captions) == (content(plain), plain.captions)
    for bucket, rows in plain.buckets.items():
        assert np.array_equal(packed.latents(bucket).read(0, rows), plain.latents(bucket).read(0, rows))
        order = np.array([rows - 1, 0, 0])
        assert np.array_equal(packed.latents(bucket).take(order), plain.latents(bucket).take(order))
    assert np.array_equal(packed.null_caption, plain.null_caption)


@pytest.mark.parametrize("heals", [True, False], ids=["heals in float32", "never heals"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6], ids=["nan", "inf", "beyond float16"])
def test_nonfinite_output_is_tried_again_in_float32_and_then_rejected(
    bad: float, heals: bool, encode: Encode, class_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, retried = ImageEncoder._forward, []
    marked = adm_by_hand(Image.open(class_folder / "n001/2.png"), 32)  # row 7

    def failing(self: ImageEncoder, pixels: np.ndarray) -> np.ndarray:
        moments = forward(self, pixels).copy()
        alone = len(pixels) == 1
        if alone:
            retried.append(self._dtype)
        for i, image_pixels in enumerate(pixels):
            if np.array_equal(image_pixels, marked) and not (alone and heals):
                moments[i, 0, 0, 0] = bad
        return moments

    encode(label_recipe(), class_folder, tmp_path / "reference")
    monkeypatch.setattr(ImageEncoder, "_forward", failing)
    manifest = encode(label_recipe(), class_folder, tmp_path / "store").manifest
    store, reference = LatentStore(tmp_path / "store"), LatentStore(tmp_path / "reference")
    assert retried == [torch.float32]
    assert (manifest.num_stored, manifest.num_rejected) == ((15, 0) if heals else (14, 1))
    record = store.record("n001/2.png")
    assert record.row == 7
    found, wanted = store.latents("32x32").read(0, 15), reference.latents("32x32").read(0, 15)
    if heals:
        assert record.status == "stored"
        assert np.allclose(found[7].astype(float), wanted[7].astype(float), atol=1e-2)
    else:
        assert (record.status, record.stage, record.reason) == ("rejected", "encode", "nonfinite")
        assert np.isnan(found[7]).all()
    others = [i for i in range(15) if i != 7]
    assert np.array_equal(found[others], wanted[others])


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
