"""A change of what a store was made from is refused by name, or exactly what it touches is encoded."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest
from making import (
    add_image,
    caption_recipe,
    lasting_digest,
    make_caption_folder,
    read_metadata,
    set_json,
    smooth_image,
    tree_digest,
    write_metadata,
)
from PIL import Image

from leandit.datasets.store import LatentStore
from leandit.errors import FingerprintMismatch
from leandit.precompute import pipeline
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.encoders import loading, model_files
from leandit.precompute.encoders import vae as encoders_module
from leandit.precompute.encoders.loading import load_encoders
from leandit.precompute.encoders.model_files import local_folder
from leandit.precompute.encoders.text import encoder as text
from leandit.precompute.images import pixels
from leandit.precompute.pipeline import Report

pytestmark = pytest.mark.usefixtures("quick")
Encode = Callable[[PrecomputeRecipe, Path, Path], Report]
ORIENTATION_TAG = 0x0112


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Captioned images, among them one BMP (its size never changes) and one JPEG; and their store."""
    source = make_caption_folder(tmp_path_factory.mktemp("captioned") / "source", count=4)
    add_image(source, "images/4.bmp", smooth_image(20, 60, 100), caption="image 4")
    add_image(source, "images/5.jpg", smooth_image(21, 60, 100), caption="image 5")
    making.encode(caption_recipe(), source, source.parent / "store")
    return source, source.parent / "store"


def rewrite(source: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    change(rows := read_metadata(source))
    write_metadata(source, rows)


# What the store's own description holds: refused, naming the field.


def encoder_with(name: str, change: Callable[[Path], Any]) -> Callable[[Path, pytest.MonkeyPatch], list[str]]:
    """A copy of a shipped encoder with something changed in its folder."""

    def override(folder: Path, _: pytest.MonkeyPatch) -> list[str]:
        shipped = local_folder(f"shipped:{name}")
        copied = shutil.copytree(shipped, folder / name)
        change(copied)
        return [f"{'text' if name == 't5' else name}.model={copied}"]

    return override


def flip_bit(file: str) -> Callable[[Path], Any]:
    """Flip the lowest bit of the last number of a file."""

    def change(folder: Path) -> None:
        path = folder / file
        content = bytearray(path.read_bytes())
        content[-2 if "t5" in folder.name else -4] ^= 1
        path.write_bytes(content)

    return change


def recipe_with(*overrides: str) -> Callable[[Path, pytest.MonkeyPatch], list[str]]:
    return lambda _folder, _patch: list(overrides)


def code_with(owner: Any, name: str, value: Any) -> Callable[[Path, pytest.MonkeyPatch], list[str]]:
    """Another release of this package, or of a library, does something in another way."""

    def override(_: Path, patch: pytest.MonkeyPatch) -> list[str]:
        patch.setattr(owner, name, value)
        patch.setattr(pipeline, "load_encoders", load_encoders)
        return []

    return override


def major_99(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "99")


SHA = "'[0-9a-f]{64}'"
VAE_WEIGHTS, T5_WEIGHTS = "diffusion_pytorch_model.safetensors", "model.safetensors"
CHANGED: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], list[str]], str]] = {
    "one bit of the VAE": (encoder_with("vae", flip_bit(VAE_WEIGHTS)), f"vae.weights_sha256 is {SHA} in"),
    "one bit of the T5": (encoder_with("t5", flip_bit(T5_WEIGHTS)), f"text_encoder.weights_sha256 is {SHA} in"),
    "the VAE's config": (
        encoder_with("vae", set_json("config.json", force_upcast=False)),
        "vae.config.force_upcast is True in the store, False now",
    ),
    "the VAE's scale": (encoder_with("vae", set_json("config.json", scaling_factor=0.5)), "latent.scale is "),
    "the VAE's shift": (encoder_with("vae", set_json("config.json", latents_mean=[0.0] * 4)), "latent.shift is "),
    "the T5's config": (
        encoder_with("t5", set_json("config.json", layer_norm_epsilon=1e-5)),
        "text_encoder.config.layer_norm_epsilon is 1e-06 in the store, 1e-05 now",
    ),
    "the tokenizer": (
        encoder_with("t5", set_json("tokenizer.json", normalizer={"type": "Lowercase"})),
        f"text_encoder.tokenizer_sha256 is {SHA} in",
    ),
    "arithmetic": (code_with(encoders_module, "arithmetic", lambda *_: "bfloat16"), "vae.dtype is 'float32' in"),
    "keep the mean": (recipe_with("vae.keep=mean"), "latent.kind is 'mean_logvar' in the store, 'mean' now"),
    "flip": (recipe_with("vae.flip=true"), "latent.flip is False in the store, True now"),
    "resolution": (recipe_with("images.resolution=128"), "images.resolution_px is 64 in the store, 128 now"),
    "buckets": (recipe_with('images.buckets=["64x64"]'), "images.buckets is "),
    "batch of images": (recipe_with("vae.batch_size=4"), "latent.batch_size is 8 in the store, 4 now"),
    "max_tokens": (recipe_with("text.max_tokens=12"), "text.max_tokens is 16 in the store, 12 now"),
    "no text": (recipe_with("text.kind=none"), "[text] is in the store, not in the recipe"),
    "template": (code_with(text, "TEMPLATE", "a photo of {caption}"), "text.template is '{caption}' in"),
    "crop": (
        recipe_with("images.crop=adm", "images.buckets=square"),
        "images.crop is 'bucket' in the store, 'adm' now",
    ),
    "color": (
        recipe_with("images.color=as_stored"),
        "images.colour is 'exif orientation; white under alpha; 16-bit grey scaled; inverted inks in every CMYK JPEG; "
        "colour profiles to sRGB, perceptual' in the store, 'exif orientation; white under alpha; 16-bit grey scaled; "
        "inverted inks in every CMYK JPEG; no colour profile' now",
    ),
    "handling of colors": (code_with(pixels, "COLOUR", "as in an older release"), "images.colour is "),
    "store dtype": (recipe_with("store.dtype=float32"), "latent.dtype is 'float16' in the store, 'float32' now"),
    "shard size": (recipe_with("store.shard_mib=2"), "shard_mib is 1 in the store, 2 now"),
    "codec": (recipe_with("store.codec=blosc"), "codec is 'none' in the store, 'blosc' now"),
    "Pillow": (code_with(loading, "library_majors", major_99), "images.libraries.pillow is "),
    "torch": (code_with(model_files, "library_majors", major_99), "vae.libraries.torch is "),
}


@pytest.mark.parametrize("change", CHANGED)
def test_another_encoder_setting_or_library_is_refused_by_name_and_nothing_is_changed(
    change: str, captioned: tuple[Path, Path], encode: Encode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source, store), (prepare, named) = captioned, CHANGED[change]
    before, recipe = tree_digest(store), caption_recipe(*prepare(tmp_path, monkeypatch))
    named = named if SHA in named else re.escape(named)
    with pytest.raises(FingerprintMismatch, match=rf"(?s)Nothing was changed.*use another --store.*{named}"):
        encode(recipe, source, store)
    assert tree_digest(store) == before


def test_what_changes_no_byte_is_not_refused(captioned: tuple[Path, Path], encode: Encode, tmp_path: Path) -> None:
    # How the source is read, and where the same encoder lies.
    source, store = captioned
    before, shipped = tree_digest(store), local_folder("shipped:vae")
    elsewhere = shutil.copytree(shipped, tmp_path / "vae")
    set_json("config.json", _diffusers_version="9.9")(elsewhere)
    for override in ("source.check=content", "source.max_reject_share=0.5", f"vae.model={elsewhere}"):
        assert encode(caption_recipe(override), source, store).num_encoded == 0
    assert tree_digest(store) == before


# What the source holds: exactly the records that it touches are encoded again.


def replace_image(name: str, seed: int, height_px: int, width_px: int, *, keep_time: bool = False) -> Any:
    def change(source: Path) -> None:
        path = source / name
        times = path.stat()
        smooth_image(seed, height_px, width_px).save(path)
        if keep_time:
            assert (path.stat().st_size == times.st_size) == (path.suffix == ".bmp")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return change


def set_row(number: int, **values: Any) -> Callable[[Path], Any]:
    return lambda source: rewrite(source, lambda rows: rows[number].update(values))


def rotate(source: Path) -> None:
    """Say in the EXIF that the image lies on its side; its pixels stay."""
    path = source / "images/5.jpg"
    with Image.open(path) as image:
        exif = image.getexif()
        exif[ORIENTATION_TAG] = 6
        image.save(path, exif=exif, quality="keep")


def rename(source: Path) -> None:
    (source / "images/2.png").rename(source / "images/9.png")
    rewrite(source, lambda rows: rows[2].update(file_name="images/9.png"))


def rewrite_files(source: Path) -> None:
    lines = [json.dumps({"licence": "none"} | dict(reversed(row.items()))) for row in read_metadata(source)]
    (source / "metadata.jsonl").write_text("\n\n".join(lines))
    for path in [source / "metadata.jsonl", *(source / "images").iterdir()]:
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(5, 5))


# name -> (change, keys encoded again, texts encoded, a revision is made)
SOURCES: dict[str, tuple[Callable[[Path], Any], set[str], set[str], bool]] = {
    "other image of the same size": (replace_image("images/4.bmp", 40, 60, 100), {"images/4.bmp"}, set(), True),
    "and of the same time": (  # the recipe below checks the content
        replace_image("images/4.bmp", 40, 60, 100, keep_time=True),
        {"images/4.bmp"},
        set(),
        True,
    ),
    "other size of the same time": (
        replace_image("images/0.png", 40, 100, 60, keep_time=True),
        {"images/0.png"},
        set(),
        True,
    ),
    "other shape": (replace_image("images/0.png", 40, 100, 60), {"images/0.png"}, set(), True),
    "other EXIF orientation": (rotate, {"images/5.jpg"}, set(), True),
    "other caption": (set_row(4, caption="a new one"), set(), {"a new one"}, True),
    "one caption more": (set_row(4, captions=["image 4", "and more"]), set(), {"and more"}, True),
    "a caption of another": (set_row(4, caption="image 5"), set(), set(), True),
    "other label": (set_row(1, label=2), set(), set(), True),
    "no caption any more": (set_row(4, caption=""), set(), set(), True),
    "renamed": (rename, {"images/9.png"}, set(), True),
    "listed in another order": (lambda source: rewrite(source, list.reverse), set(), set(), False),
    "written anew": (rewrite_files, set(), set(), False),
}


@pytest.mark.parametrize("change", SOURCES)
def test_of_a_changed_source_exactly_what_changed_is_encoded(
    change: str, captioned: tuple[Path, Path], encode: Encode, tmp_path: Path, seen: Any
) -> None:
    alter, keys, texts, grows = SOURCES[change]
    source, path = shutil.copytree(captioned[0], tmp_path / "source"), shutil.copytree(captioned[1], tmp_path / "store")
    before = lasting_digest(path)
    alter(source)
    recipe = caption_recipe("source.check=content") if change == "and of the same time" else caption_recipe()
    report = encode(recipe, source, path)
    assert (seen.images, report.num_encoded, sorted(seen.texts)) == (len(keys), len(keys), sorted(texts))

    after, whole = lasting_digest(path), tree_digest(path)
    assert {name: after.get(name) == content for name, content in before.items()} == dict.fromkeys(before, True)
    assert (len(after) > len(before)) == grows
    store, old = LatentStore(path), LatentStore(path, revision=1)
    assert store.revision == (2 if grows else 1)
    rows = store.records.to_pylist()
    assert {row["key"] for row in rows if row["revision"] == 2 and row["status"] == "stored"} == keys
    for row in rows:
        if row["revision"] == 1:
            here, there = store.record(row["key"]), old.record(row["key"])
            assert np.array_equal(store.latents(here.bucket)[here.row], old.latents(here.bucket)[there.row])
    assert encode(recipe, source, path).manifest == report.manifest  # and then it is up to date
    assert tree_digest(path) == whole
