"""Image features: equal to REPA's computation written out here, for each kind of model, and clear errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from making import CPU, drop_files, encode, label_recipe, set_json, smooth_image
from PIL import Image

from leandit.datasets.format.token_dtypes import measure_quality, narrow
from leandit.datasets.loader import make_loader
from leandit.datasets.store import LatentStore
from leandit.errors import EncoderError, RecipeError
from leandit.precompute.config import FeatureSection
from leandit.precompute.encoders.vision.features import FeatureEncoder
from leandit.precompute.images.pixels import crop_image, variant_draws

IMAGES_PX, NUM_BLOCKS, NUM_REGISTERS = 64, 3, 3
MEAN, STD = [0.48, 0.45, 0.4], [0.22, 0.23, 0.26]
VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "image_size": 70,
    "patch_size": 14,
    "initializer_range": 0.3,
}
TOWER = VIT | {"intermediate_size": 48}
TEXT = TOWER | {"vocab_size": 9, "max_position_embeddings": 4, "num_hidden_layers": 1}
Build = Callable[[], Any]
MODELS: dict[str, Build] = {
    "dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**VIT)),
    "dinov2 with registers": lambda: transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**VIT, num_register_tokens=NUM_REGISTERS)
    ),
    "dinov3": lambda: transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(  # several frequencies in each head
            **TOWER | {"patch_size": 16, "num_attention_heads": 2}, num_register_tokens=NUM_REGISTERS
        )
    ),
    "siglip": lambda: transformers.SiglipModel(transformers.SiglipConfig(vision_config=TOWER, text_config=TEXT)),
    "siglip vision": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**TOWER)),
    "clip": lambda: transformers.CLIPModel(transformers.CLIPConfig(vision_config=TOWER, text_config=TEXT)),
    "clip vision": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER)),
}
BUCKETS = [(64, 64), (48, 80), (80, 48)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of random models, saved as on the hub."""
    folders = {}
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model, folder = build(), tmp_path_factory.mktemp("teacher")
        with torch.no_grad():  # zeros and ones would hide a norm or a token that is left out
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
        folders[name] = folder
    return folders


@pytest.fixture
def dinov2(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a DINOv2 that a test may break."""
    return Path(shutil.copytree(saved["dinov2"], tmp_path / "dinov2"))


def encoder_of(folder: Path, **more: Any) -> FeatureEncoder:
    return FeatureEncoder(FeatureSection(**{"model": str(folder)} | more), IMAGES_PX, CPU, name="teacher")


def pixels(height_px: int, width_px: int, count: int = 2) -> np.ndarray:
    return np.stack([np.asarray(smooth_image(i, height_px, width_px)) for i in range(count)])


def resize_matrix(before: int, after: int, sharpness: float, *, antialias: bool) -> np.ndarray:
    """(after, before) weights of a cubic resize, by its definition (Keys 1981), pixel centres at halves."""
    shrink = max(before / after, 1.0) if antialias else 1.0
    matrix = np.zeros((after, before))
    for i in range(after):
        centre = (i + 0.5) * before / after - 0.5
        first, last = int(np.floor(centre - 2 * shrink)), int(np.ceil(centre + 2 * shrink))
        for j in range(first, last + 1):
            x, a = abs(j - centre) / shrink, sharpness
            weight = (
                (a + 2) * x**3 - (a + 3) * x**2 + 1 if x <= 1 else a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0
            )
            if 0 <= j < before:
                matrix[i, j] += weight
            elif not antialias:  # the border is repeated
                matrix[i, min(max(j, 0), before - 1)] += weight
    return matrix / matrix.sum(1, keepdims=True)


def prepared(batch: np.ndarray, size_px: tuple[int, int]) -> torch.Tensor:
    """REPA's pixels: normalised, then resized without antialiasing; (B, 3, *size_px)."""
    normalised = (batch / 255 - np.array(MEAN)) / np.array(STD)
    down, across = (resize_matrix(b, a, -0.75, antialias=False) for b, a in zip(batch.shape[1:3], size_px, strict=True))
    return torch.from_numpy(np.einsum("ih,jw,bhwc->bcij", down, across, normalised)).float()


def positions(trained: torch.Tensor, num_prefix: int, grid: tuple[int, int]) -> torch.Tensor:
    """timm's resample_abs_pos_embed, of (num_prefix + 25, D)."""
    side = 5
    square = trained[num_prefix:].double().numpy().reshape(side, side, -1)
    down, across = (resize_matrix(side, after, -0.5, antialias=True) for after in grid)
    other = np.einsum("ih,jw,hwd->ijd", down, across, square).reshape(grid[0] * grid[1], -1)
    return torch.cat([trained[:num_prefix], torch.from_numpy(other).float()])


@torch.no_grad()
def reference(name: str, folder: Path, batch: np.ndarray, grid: tuple[int, int]) -> tuple[list[torch.Tensor], int]:
    """Hidden states (B, tokens, D), the output last, and the tokens before the patches; block by block."""
    kind, _, part = name.partition(" ")
    side = 16 if kind == "dinov3" else 14
    images = prepared(batch, (grid[0] * side, grid[1] * side))
    model = {**MODELS, "siglip": MODELS["siglip vision"], "clip": MODELS["clip vision"]}[name]()
    model = type(model).from_pretrained(folder).eval()
    if kind == "dinov3":  # rotary positions need nothing
        output = model(images, output_hidden_states=True)
        return [*output.hidden_states, output.last_hidden_state], 1 + NUM_REGISTERS
    embeddings = model.embeddings
    if kind == "dinov2":
        tokens = embeddings.patch_embeddings.projection(images).flatten(2).mT
        tokens = torch.cat([embeddings.cls_token.expand(len(batch), -1, -1), tokens], 1)
        tokens = tokens + positions(embeddings.position_embeddings[0], 1, grid)
        if part:
            registers = embeddings.register_tokens.expand(len(batch), -1, -1)
            tokens = torch.cat([tokens[:, :1], registers, tokens[:, 1:]], 1)
        blocks, norm, num_prefix = model.encoder.layer, model.layernorm, 1 + NUM_REGISTERS * bool(part)
    else:
        tokens = embeddings.patch_embedding(images).flatten(2).mT
        num_prefix = int(kind == "clip")
        if kind == "clip":
            tokens = torch.cat([embeddings.class_embedding.expand(len(batch), 1, -1), tokens], 1)
        tokens = tokens + positions(embeddings.position_embedding.weight, num_prefix, grid)
        if kind == "clip":
            tokens = model.pre_layrnorm(tokens)
        # CLIP has no norm after its last block, as in REPA; another is for the projection of its class token alone.
        blocks, norm = model.encoder.layers, torch.nn.Identity() if kind == "clip" else model.post_layernorm
    states = [tokens]
    for block in blocks:
        states.append(block(states[-1], None))
    return [*states, norm(states[-1])], num_prefix


def assert_close(found: np.ndarray, wanted: torch.Tensor) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("name", "bucket", "layer"),
    [
        *((name, BUCKETS[-1], -1) for name in MODELS),
        *(("dinov2", bucket, layer) for bucket, layer in zip(BUCKETS, (-1, 0, 1), strict=True)),
        *((name, BUCKETS[0], NUM_BLOCKS - 1) for name in ("dinov2 with registers", "dinov3", "clip")),
    ],
)
def test_patches_and_class_tokens_are_repas_for_every_model_bucket_and_layer(
    name: str, bucket: tuple[int, int], layer: int, saved: dict[str, Path]
) -> None:
    parts = ["patches"] if "siglip" in name else ["both", "patches", "cls"]
    encoders = {output: encoder_of(saved[name], layer=layer, output=output) for output in parts}
    spec, grid, batch = encoders["patches"].spec(), (bucket[0] // 16, bucket[1] // 16), pixels(*bucket)
    assert spec.grid(*bucket) == grid
    assert (spec.patch_px, spec.resolution_px) == ((16, 64) if name == "dinov3" else (14, 56))
    assert (spec.output, spec.layer, spec.width, spec.images_px, spec.dtype) == ("patches", layer, 32, 64, "float16")
    states, num_prefix = reference(name, saved[name], batch, grid)
    patches, cls = states[layer][:, num_prefix:], states[layer][:, 0]
    wanted = {"both": (patches, cls), "patches": (patches,), "cls": (cls,)}
    for output, encoder in encoders.items():
        for found, tokens in zip(encoder.encode(batch), wanted[output], strict=True):
            assert_close(found, tokens)


def test_the_embedding_of_a_clip_is_that_of_transformers_and_stored_as_a_class_token(saved: dict[str, Path]) -> None:
    encoder = encoder_of(saved["clip"], output="embedding", resolution=70)
    model = transformers.CLIPVisionModelWithProjection.from_pretrained(saved["clip"]).eval()
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (MEAN, STD))
    batch = pixels(64, 64)
    inputs = (torch.from_numpy(batch).permute(0, 3, 1, 2) / 255 - mean) / std
    wanted = model(torch.nn.functional.interpolate(inputs, (70, 70), mode="bicubic")).image_embeds.detach().numpy()
    (found,) = encoder.encode(batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert (encoder.spec().output, encoder.spec().width) == ("cls", found.shape[1])
    assert encoder.identity.class_name == "CLIPVisionModelWithProjection"
    with pytest.raises(RecipeError, match="only a CLIP has it"):
        encoder_of(saved["dinov2"], output="embedding")


@pytest.mark.parametrize("name", ["dinov2", "dinov3"])
def test_encoding_in_float32_leaves_the_arithmetic_as_it_was(
    name: str, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu = "leandit.precompute.encoders.vision.features.arithmetic"
    monkeypatch.setattr(as_on_a_gpu, lambda dtype, device: dtype)
    low, high = encoder_of(saved[name], encoder_dtype="bfloat16", output="both"), encoder_of(saved[name], output="both")
    batch = pixels(48, 80, 3)
    before, exact = low.encode(batch), high.encode(batch)
    assert not np.array_equal(before[0], exact[0])
    with low.in_float32():
        again = low.encode(batch)
    for found, wanted in zip(again, exact, strict=True):
        assert (found.dtype, found.shape) == (np.float32, wanted.shape)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)  # with the weights of the file
    for found, wanted in zip(low.encode(batch), before, strict=True):
        np.testing.assert_array_equal(found, wanted)
    with high.in_float32():
        np.testing.assert_array_equal(high.encode(batch)[0], exact[0])


def test_tokens_of_a_further_crop_are_of_that_crop_and_a_batch_draws_one_view_for_both(
    saved: dict[str, Path], class_folder: Path, tmp_path: Path
) -> None:
    of_teacher = f"features.teacher.model={saved['dinov2']}"
    encode(label_recipe("images.variants=2", "vae.flip=true", of_teacher), class_folder, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    encoder = FeatureEncoder(FeatureSection(model=str(saved["dinov2"])), 32, CPU)
    rows_of_tokens = dict[bytes, np.ndarray]()  # by those of latents
    for variant, flipped in product(range(2), (False, True)):
        (tokens,) = store.feature("teacher", "32x32").arrays("patches", variant=variant, flipped=flipped)
        latents = store.latents("32x32", variant=variant, flipped=flipped)
        for row, key in enumerate(store.records["key"].to_pylist()):
            draw = variant_draws(key, 2, 1.25)[0] if variant else None
            crop = crop_image(Image.open(class_folder / key).convert("RGB"), (32, 32), "adm", variant=draw)
            crop = np.ascontiguousarray(crop[:, ::-1] if flipped else crop)
            np.testing.assert_allclose(tokens[row], encoder.encode(crop[None])[0][0], rtol=0.01, atol=0.01)
            rows_of_tokens[latents[row].tobytes()] = tokens[row]
    for batch in make_loader(store, global_batch=5, features=["teacher"]):
        assert batch.features["teacher"].stored_patches is not None
        for row, tokens in zip(batch.stored.numpy(), batch.features["teacher"].stored_patches.numpy(), strict=True):
            np.testing.assert_array_equal(tokens, rows_of_tokens[row.tobytes()])


def not_square(folder: Path) -> None:
    torch.manual_seed(0)
    transformers.Dinov2Model(transformers.Dinov2Config(**VIT | {"image_size": [70, 56]})).save_pretrained(folder)


PREPROCESSOR = "preprocessor_config.json"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another kind": (set_json("config.json", model_type="siglip2"), "siglip2.*expected one of"),
    "no preprocessor": (drop_files(PREPROCESSOR), "there is no 'preprocessor_config.json'"),
    "no mean": (set_json(PREPROCESSOR, image_mean=None), "'image_mean' of its preprocessor_config.json is None"),
    "std of zero": (set_json(PREPROCESSOR, image_std=[1, 0, 1]), "expected numbers above 0"),
    "other pixels": (set_json(PREPROCESSOR, rescale_factor=0.0078), "'rescale_factor'.*expected 1/255"),
    "raw pixels": (set_json(PREPROCESSOR, do_normalize=False), "'do_normalize'.*is False, expected true"),
    "patch of two": (set_json("config.json", patch_size=[14, 14]), "patches of .14, 14. px"),
    "a grid that is not square": (not_square, "21 positions do not form a square"),
}


@pytest.mark.parametrize(("spoil", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_model_that_cannot_be_used_is_one_clear_error(
    spoil: Callable[[Path], Any], message: str, dinov2: Path
) -> None:
    spoil(dinov2)
    with pytest.raises(EncoderError, match=rf"features\.teacher\.model '.*dinov2.*{message}"):
        encoder_of(dinov2)


@pytest.mark.parametrize(
    ("name", "choice", "message"),
    [
        ("dinov2", {"layer": 4}, r"features\.teacher\.layer 4: Dinov2Model .* has 3 blocks, expected 0 to 3, or -1"),
        ("siglip", {"output": "cls"}, r"features\.teacher\.output 'cls': .* no class token.*output = \"patches\""),
        ("siglip", {"output": "both"}, "no class token"),
        ("dinov2", {"resolution": 897}, r"features\.teacher\.resolution 897: more patches.*Expected 896 or less"),
    ],
)
def test_a_choice_that_the_model_does_not_have_is_refused(
    name: str, choice: dict[str, Any], message: str, saved: dict[str, Path]
) -> None:
    with pytest.raises(RecipeError, match=message):
        encoder_of(saved[name], **choice)


@pytest.mark.parametrize(("factor", "median"), [(5, 0.99998), (10, 0.99996), (20, 0.9999), (100, 0.9977)])
def test_int8_bears_a_channel_that_is_much_larger_than_the_others(factor: int, median: float) -> None:
    tokens = np.random.default_rng(0).standard_normal((256, 1, 768)).astype(np.float32)
    tokens[..., 7] = factor  # a massive activation
    cosines = [measure_quality(row, narrow(row, "int8"), "int8").min_cosine for row in tokens]
    assert 1 - np.median(cosines) == pytest.approx(1 - median, rel=0.2)  # the figures of docs/features.md
