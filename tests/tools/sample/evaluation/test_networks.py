"""What a network sees of an image, and where its weights come from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from making import CPU
from PIL import Image
from safetensors.torch import save_file
from tiny_models import make_dinov2
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection, Dinov2Model

from leandit.errors import EncoderError, RecipeError
from leandit.tools.sample.evaluation.inception import Inception, Mixed
from leandit.tools.sample.evaluation.networks import INCEPTION_FILES, input_side_px, open_network, squares


def image(height: int = 40, width: int = 56, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(("height", "width"), [(40, 56), (200, 97), (24, 24)])
def test_the_antialiased_resize_is_that_of_clean_fid(height: int, width: int) -> None:
    pixels = image(height, width)
    planes = [Image.fromarray(pixels[..., i].astype(np.float32)) for i in range(3)]
    expected = [np.asarray(plane.resize((24, 24), Image.Resampling.BICUBIC)).clip(0, 255) for plane in planes]
    assert squares([pixels], 24, CPU)[0].numpy() == pytest.approx(np.stack(expected), abs=2e-3)


def test_the_resize_of_tensorflow_takes_no_mean_of_what_it_skips() -> None:
    pixels = image(8, 8)
    halved = squares([pixels], 4, CPU, resize="tensorflow")[0].numpy()
    assert np.array_equal(halved, pixels[::2, ::2].transpose(2, 0, 1))  # every second pixel as it is
    doubled = squares([pixels], 16, CPU, resize="tensorflow")[0].numpy()
    assert np.array_equal(doubled[:, ::2, ::2], pixels.transpose(2, 0, 1))
    between = (pixels[:, 0].astype(float) + pixels[:, 1]) / 2
    assert pytest.approx(between) == doubled[:, ::2, 1].T
    assert np.array_equal(doubled[:, :, 15], doubled[:, :, 14])  # the edge is repeated


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, as torch-fidelity's file has them: with a classifier, which does not count."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Inception()
    tensors = {}
    for key, value in model.state_dict().items():
        if key.endswith("conv.weight"):
            tensors[key] = torch.randn(value.shape) * (2 / value[0].numel()) ** 0.5
        elif not key.endswith("num_batches_tracked"):
            tensors[key] = torch.ones(value.shape) if "var" in key or "weight" in key else torch.zeros(value.shape)
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(tensors | {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}, path)
    return path


def test_inception_has_the_parameters_of_the_published_files() -> None:
    with torch.device("meta"):
        state = Inception().state_dict()
    weights = {key: value.shape for key, value in state.items() if not key.endswith("num_batches_tracked")}
    # Counted in torch-fidelity 0.4.0's network without its classifier; with others the published weights do not load.
    assert len(weights) == 94 * 5
    assert sum(shape.numel() for shape in weights.values()) == 21_820_000
    assert weights["Mixed_5b.branch3x3dbl_3.conv.weight"] == (96, 96, 3, 3)
    assert weights["Mixed_6a.branch3x3.conv.weight"] == (384, 288, 3, 3)
    assert weights["Mixed_6c.branch7x7dbl_2.conv.weight"] == (160, 160, 7, 1)
    assert weights["Mixed_7a.branch7x7x3_4.bn.running_var"] == (192,)
    assert weights["Mixed_7c.branch3x3dbl_3b.conv.weight"] == (384, 384, 3, 1)


def test_inception_gives_a_row_for_each_image_whatever_the_batch(inception_file: Path) -> None:
    network = open_network(str(inception_file), None, CPU)
    images = [image(40, 56), image(64, 64, 1)]
    features = network.features(images)
    assert (features.shape, features.dtype) == ((2, 2048), np.float32)
    assert np.isfinite(features).all()
    assert features.std() > 0.01
    assert network.features(images[1:])[0] == pytest.approx(features[1], rel=1e-3, abs=1e-3)
    assert network.description["resize"] == "antialiased"
    other = open_network(str(inception_file), "tensorflow", CPU)
    assert np.abs(other.features(images) - features).max() > 1e-3
    assert other.description["resize"] == "tensorflow"


def test_the_pools_of_inception_leave_out_the_padding() -> None:
    block = Mixed(4, {}, pool_channels=4).eval()
    with torch.no_grad():
        block.branch_pool.conv.weight.copy_(torch.eye(4)[:, :, None, None])
        pooled = block(torch.ones(1, 4, 5, 5))
    assert pooled == pytest.approx(np.full((1, 4, 5, 5), (1 + 1e-3) ** -0.5))  # corners have the mean of four, not nine


def test_inception_is_found_in_its_cache(inception_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(EncoderError, match=f"there is no file .*{INCEPTION_FILES[0]}.* --features FILE"):
        open_network("inception", None, CPU)
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    (tmp_path / "hub/checkpoints" / INCEPTION_FILES[1]).symlink_to(inception_file)
    assert open_network("inception", None, CPU).description["network"] == "inception"


def test_another_model_than_inception_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pth")
    save_file({"Conv2d_1a_3x3.conv.weight": torch.zeros(32, 3, 5, 5)}, tmp_path / "other.safetensors")
    torch.save([torch.zeros(3)], tmp_path / "list.pth")
    (tmp_path / "no.pth").write_bytes(b"nothing")
    for name, words in (
        ("other.pth", r"'Conv2d_1a_3x3\.conv\.weight' is nothing, expected \(32, 3, 3, 3\)"),
        ("other.safetensors", r"is \(32, 3, 5, 5\), expected \(32, 3, 3, 3\)"),
        ("list.pth", "is nothing, expected"),
        ("no.pth", r"no\.pth.*Fetch the file again"),
    ):
        with pytest.raises(EncoderError, match=words):
            open_network(str(tmp_path / name), None, CPU)


def test_of_dinov2_the_class_token_of_the_normalised_image_counts(tmp_path: Path) -> None:
    folder = make_dinov2(tmp_path / "dinov2")
    network, pixels = open_network(str(folder), None, CPU), image()
    mean, std = (np.array(numbers)[:, None, None] for numbers in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    batch = (squares([pixels], 56, CPU).numpy() / 255 - mean) / std
    model = Dinov2Model.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(batch).float()).last_hidden_state[:, 0]
    assert network.features([pixels]) == pytest.approx(expected.numpy(), abs=1e-5)
    assert (network.is_clip, network.description["side_px"]) == (False, 56)


def test_of_clip_the_projected_embedding_counts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPVisionConfig(**sizes, projection_dim=6, image_size=32, patch_size=16)
    model = CLIPVisionModelWithProjection(config).eval()
    model.save_pretrained(tmp_path)
    said = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "crop_size": {"height": 32, "width": 32}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    network = open_network(str(tmp_path), None, CPU)
    with torch.no_grad():
        expected = model(squares([image()], 32, CPU) / 127.5 - 1).image_embeds
    assert network.features([image()]) == pytest.approx(expected.numpy(), abs=1e-5)
    assert network.is_clip
    for said, side in (({"crop_size": 224, "size": {"shortest_edge": 256}}, 224), ({}, 518)):
        assert input_side_px(said, 518, "m") == side
    with pytest.raises(EncoderError, match=r"m: the size .* expected one side"):
        input_side_px({"size": {"height": 2, "width": 3}}, 518, "m")
    with pytest.raises(RecipeError, match="--resize tensorflow: only Inception has it"):
        open_network(str(tmp_path), "tensorflow", CPU)
