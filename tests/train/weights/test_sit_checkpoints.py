"""Published checkpoints of SiT and LightningDiT give the same velocities here, by independent code for theirs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dit_reference import reference
from torch import Tensor

from leandit.errors import RunError
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioning
from leandit.train.models.dit import SIZES
from leandit.train.models.layers import DiTOptions
from leandit.train.models.spec import ModelSpec
from leandit.train.weights.init_from import initial_weights

CLASSES, CHANNELS = 3, 4
DEPTH, WIDTH, HEADS = 3, 96, 2  # of a small "S"; int(8 / 3 * WIDTH) is a multiple of 64, as of the published sizes
SIZES_OF = {"channels": CHANNELS, "out_channels": CHANNELS, "num_classes": CLASSES, "caption_width": 0}
SIT = ModelSpec(name="DiT-S/2", base_size=8, options=DiTOptions(time="to_data"), **SIZES_OF)
LIKE_LIGHTNING = DiTOptions(time="to_data", norm="rms", mlp="swiglu", positions="both")
LIGHTNING = ModelSpec(name="DiT-S/1", base_size=4, options=LIKE_LIGHTNING, **SIZES_OF)


def with_options(spec: ModelSpec, **options: Any) -> ModelSpec:
    return spec.model_copy(update={"options": spec.options.model_copy(update=options)})


LIGHTNING_LAYER = with_options(LIGHTNING, norm="layer")  # use_rmsnorm = false


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "S", (DEPTH, WIDTH, HEADS))


def published(spec: ModelSpec, *, lightning: bool, qk_norm: bool = False) -> dict[str, Tensor]:
    """Random weights in the published layout, of both models with 2C outputs or C."""
    patch = int(spec.name[-1])
    outputs = patch * patch * CHANNELS * (1 if lightning else 2)
    shapes = {"x_embedder.proj": (WIDTH, CHANNELS, patch, patch), "final_layer.linear": (outputs, WIDTH)}
    shapes |= {"t_embedder.mlp.0": (WIDTH, 256), "t_embedder.mlp.2": (WIDTH, WIDTH)}
    shapes["final_layer.adaLN_modulation.1"] = (2 * WIDTH, WIDTH)
    hidden = int(2 / 3 * 4 * WIDTH)
    plain = {"mlp.fc1": (4 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 4 * WIDTH)}
    layers = {"mlp.w12": (2 * hidden, WIDTH), "mlp.w3": (WIDTH, hidden)} if lightning else plain
    layers |= {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH), "adaLN_modulation.1": (6 * WIDTH, WIDTH)}
    shapes |= {f"blocks.{i}.{name}": shape for i in range(DEPTH) for name, shape in layers.items()}
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    weights = {"y_embedder.embedding_table.weight": random(CLASSES + 1, WIDTH, scale=0.5)}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = random(*shape, scale=0.5 / math.sqrt(math.prod(shape[1:])))
        weights[f"{name}.bias"] = random(shape[0], scale=0.2)
    side = spec.base_size // patch
    weights["pos_embed"] = positions(side)[None]
    if lightning:
        if spec.options.norm == "rms":
            gains = [f"blocks.{i}.{norm}" for i in range(DEPTH) for norm in ("norm1", "norm2")]
            weights |= {f"{name}.weight": 1 + random(WIDTH, scale=0.3) for name in [*gains, "final_layer.norm_final"]}
        angles = neighbour_angles(side)
        weights |= {"feat_rope.freqs_cos": angles.cos().float(), "feat_rope.freqs_sin": angles.sin().float()}
    if qk_norm:
        gains = [f"blocks.{i}.attn.{letter}_norm.weight" for i in range(DEPTH) for letter in "qk"]
        weights |= {name: 1 + random(WIDTH // HEADS, scale=0.3) for name in gains}
    return weights


def positions(side: int) -> Tensor:
    """(T, E): sines and cosines of the column, then of the row."""
    grid = torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()
    frequencies = 10_000 ** -(torch.arange(WIDTH // 4).double() / (WIDTH // 4))
    parts = [grid[:, axis, None] * frequencies for axis in (1, 0)]
    return torch.cat([wave for angles in parts for wave in (angles.sin(), angles.cos())], dim=1).float()


def neighbour_angles(side: int) -> Tensor:
    """(T, d): angles of LightningDiT, each for two neighbours; the row's half, then the column's."""
    pairs = WIDTH // HEADS // 4
    frequencies = 10_000 ** -(torch.arange(pairs).double() / pairs)
    grid = torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()
    halves = [(grid[:, axis, None] * frequencies).repeat_interleave(2, dim=1) for axis in (0, 1)]
    return torch.cat(halves, dim=1)


@pytest.mark.parametrize(
    ("spec", "lightning", "qk_norm"),
    [(SIT, False, False), (LIGHTNING, True, False), (LIGHTNING, True, True), (LIGHTNING_LAYER, True, False)],
    ids=["SiT", "LightningDiT", "LightningDiT with QK-norm", "LightningDiT with layer norms"],
)
@torch.no_grad()
def test_a_checkpoint_gives_its_velocity(spec: ModelSpec, lightning: bool, qk_norm: bool, tmp_path: Path) -> None:
    spec = with_options(spec, qk_norm=qk_norm)
    weights = published(spec, lightning=lightning, qk_norm=qk_norm)
    torch.save({"ema": {f"module.{name}": tensor for name, tensor in weights.items()}}, tmp_path / "published.pt")
    model = build_model(spec, seed=0)
    model.load_state_dict(initial_weights(str(tmp_path / "published.pt"), model, spec)[0])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((4, CHANNELS, spec.base_size, spec.base_size), generator=generator)
    t, y = torch.tensor([0.0, 0.3, 0.8, 1.0]), torch.tensor([0, 1, 2, CLASSES])
    side, times = spec.base_size // int(spec.name[-1]), (1 - t) * 1000  # here both run from data to noise
    doubled = {name: tensor.double() for name, tensor in weights.items()}
    theirs = reference(doubled, HEADS, side, x.double(), times.double(), y, spec.options, by_neighbors=lightning)
    ours = model(x, times, Conditioning(labels=y))
    assert theirs.abs().max() > 0.5
    torch.testing.assert_close(ours.double(), theirs[:, :CHANNELS], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("learned", "norm", "positions"),
    [(LIGHTNING, "rms", "rope"), (LIGHTNING, "layer", "both"), (LIGHTNING_LAYER, "rms", "both")],
)
def test_another_lightningdit_is_refused(learned: ModelSpec, norm: str, positions: str, tmp_path: Path) -> None:
    weights, path = published(learned, lightning=True), tmp_path / "published.pt"
    torch.save(weights, path)
    spec = with_options(LIGHTNING, norm=norm, positions=positions)
    with pytest.raises(RunError, match=rf"LightningDiT.*model\.norm={learned.options.norm} .*model\.positions=both"):
        initial_weights(str(path), build_model(spec, seed=0), spec)
    for name in [name for name in weights if name.startswith("blocks.") and "adaLN" in name]:
        weights[name] = weights[name][: 4 * WIDTH].clone()
    torch.save(weights, path)
    with pytest.raises(RunError, match=r"wo_shift = true.* 4 vectors.*Only blocks with 6"):
        initial_weights(str(path), build_model(learned, seed=0), learned)
