"""DiT^DH: the published shapes, names and function; from weights of the published layout to a run and back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from making import CPU, no_progress, shake, train_recipe
from PIL import Image
from runs import bits, run_to
from tiny_autoencoders import save_autoencoder
from torch import Tensor

from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError, RunError
from leandit.precompute.config import load as load_precompute
from leandit.precompute.pipeline import precompute
from leandit.tools.export.export import export
from leandit.tools.sample.request import SampleRequest
from leandit.tools.sample.sample import sample_grid
from leandit.train.config import load as load_train
from leandit.train.loop import StopRequest, train
from leandit.train.models import dit_dh
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioning
from leandit.train.models.dit import SIZES
from leandit.train.models.dit_dh import DiTDH
from leandit.train.models.spec import ModelSpec
from leandit.train.sampling.guided import Solver, draw_latents
from leandit.train.sampling.snapshot import load_snapshot

SPEC = ModelSpec(name="DiTDH-S/1", channels=5, out_channels=5, num_classes=3, caption_width=0, base_size=4)


def reference(weights: dict[str, Tensor], depth: int, heads: tuple[int, int], x: Tensor, t: float, y: int) -> Tensor:
    """The paper's formulas and its code's conventions in plain arithmetic, for one image (C, H, W); t = 1 is noise."""

    def linear(name: str, v: Tensor) -> Tensor:
        return v @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def silu(v: Tensor) -> Tensor:
        return v / (1 + torch.exp(-v))

    def rms(name: str, v: Tensor) -> Tensor:
        return v / ((v**2).mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    def turn(v: Tensor) -> Tensor:
        """Neighbors are a complex number; the first half of a head turns with the row, the second with the column."""
        count, half = v.shape[1] // 4, v.shape[1] // 2
        turned = v.clone()
        for token, (row, column) in enumerate(places):
            for start, at in ((0, row), (half, column)):
                for i in range(count):
                    angle = at * 10_000 ** (-i / count)
                    a, b = v[token, start + 2 * i], v[token, start + 2 * i + 1]
                    turned[token, start + 2 * i] = a * math.cos(angle) - b * math.sin(angle)
                    turned[token, start + 2 * i + 1] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    def block(name: str, v: Tensor, c: Tensor, num_heads: int) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = linear(f"{name}.adaLN_modulation.1", silu(c)).chunk(6, -1)
        q, k, value = linear(f"{name}.attn.qkv", rms(f"{name}.norm1", v) * (1 + scale_a) + shift_a).chunk(3, -1)
        size, out = v.shape[1] // num_heads, []
        for h in range(num_heads):
            part = slice(h * size, (h + 1) * size)
            shares = (turn(q[:, part]) @ turn(k[:, part]).T / math.sqrt(size)).softmax(1)
            out.append(shares @ value[:, part])
        v = v + gate_a * linear(f"{name}.attn.proj", torch.cat(out, 1))
        gate, value = linear(f"{name}.mlp.w12", rms(f"{name}.norm2", v) * (1 + scale_m) + shift_m).chunk(2, -1)
        return v + gate_m * linear(f"{name}.mlp.w3", silu(gate) * value)

    rows, columns = x.shape[1:]
    places = [(row, column) for row in range(rows) for column in range(columns)]
    tokens = x.flatten(1).T
    angles = 2 * math.pi * t * weights["t_embedder.W"]
    time = linear("t_embedder.mlp.2", silu(linear("t_embedder.mlp.0", torch.cat([angles.sin(), angles.cos()]))))
    c = silu(time + weights["y_embedder.embedding_table.weight"][y])
    kernel = weights["s_embedder.proj.weight"].flatten(1)
    s = tokens @ kernel.T + weights["s_embedder.proj.bias"] + weights["pos_embed"][0]
    for i in range(depth):
        s = block(f"blocks.{i}", s, c, heads[0])
    s = linear("s_projector", silu(time + s))
    head = tokens @ weights["x_embedder.proj.weight"].flatten(1).T + weights["x_embedder.proj.bias"]
    for i in range(depth, sum(name.endswith("attn.qkv.weight") for name in weights)):
        head = block(f"blocks.{i}", head, s, heads[1])
    shift, scale = linear("final_layer.adaLN_modulation.1", silu(s)).chunk(2, -1)
    return linear("final_layer.linear", rms("final_layer.norm_final", head) * (1 + scale) + shift).T.reshape(x.shape)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> DiTDH:
    """In float64, with weights that are not zero."""
    monkeypatch.setitem(SIZES, "S", (3, 24, 3))
    monkeypatch.setattr(dit_dh, "HEAD", (2, 32, 2))
    return shake(build_model(SPEC, seed=0)).double()


def test_the_output_and_all_gradients_are_those_of_the_formulas_and_a_new_model_gives_zero(small: DiTDH) -> None:
    x = torch.randn((2, 5, 4, 4), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    times, labels = torch.tensor([3.0, 800.0], dtype=torch.float64), torch.tensor([0, 3])
    weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in small.state_dict().items()}
    expected = torch.stack(
        [reference(weights, 3, (3, 2), *image) for image in zip(x, (times / 1000).tolist(), labels, strict=True)]
    )
    found = small(x, times, Conditioning(labels=labels))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # frequencies and tables are float32
    x32, given = torch.randn(2, 5, 6, 4), Conditioning(labels=labels)
    assert not build_model(SPEC, seed=0)(x32, times.float(), given).any()
    assert small(x32.double(), times, given).shape == x32.shape  # other grids share the positions
    torch.testing.assert_close(small.position_table(8, 8)[0, ::2][:4], small.pos_embed[0, :4])  # pyright: ignore
    pull = torch.randn(found.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (found * pull).sum().backward()
    (expected * pull).sum().backward()
    for name, parameter in small.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-4, atol=1e-4, msg=name)


def test_the_published_size_has_its_names_shapes_and_number_of_parameters() -> None:
    sizes = {"channels": 768, "out_channels": 768, "num_classes": 1000, "base_size": 16}
    with torch.device("meta"):
        model = build_model(SPEC.model_copy(update={"name": "DiTDH-XL/1", **sizes}), seed=0)
    shapes, (depth, width, _) = {name: tuple(t.shape) for name, t in model.state_dict().items()}, SIZES["XL"]
    head, first = f"blocks.{depth}", {"s_embedder.proj.weight": (width, 768, 1, 1), "pos_embed": (1, 256, width)}
    expected = {"blocks.0.mlp.w12.weight": (2 * (8 * width // 3), width), f"{head}.mlp.w12.weight": (2 * 5461, 2048)}
    expected |= {f"{head}.adaLN_modulation.1.bias": (6 * 2048,), "x_embedder.proj.weight": (2048, 768, 1, 1)}
    expected |= {"s_projector.weight": (2048, width), "t_embedder.W": (256,), "t_embedder.mlp.0.weight": (width, 512)}
    assert first.items() | expected.items() <= shapes.items()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(838.4, rel=1e-4)  # "839 M"


@pytest.mark.usefixtures("tiny_models")
def test_a_run_from_published_weights_resumes_draws_is_exported(label_store: LatentStore, tmp_path: Path) -> None:
    def go(run: str, steps: int, *settings: str) -> Path:
        more = (f"run.steps={steps}", "schedule.kind=linear", "run.checkpoint_every=2", *settings)
        run_to(train_recipe("dit-dh-s", *more), label_store, tmp_path / run)
        return tmp_path / run

    spec = load_snapshot(go("first", 1), CPU).spec
    published = shake(build_model(spec, seed=3)).state_dict()
    tables = {f"{part}_feat_rope.freqs_{wave}": torch.zeros(3) for part in ("enc", "dec") for wave in ("cos", "sin")}
    torch.save({"ema": published | tables}, tmp_path / "stage2_model.pt")
    begun = load_snapshot(go("begun", 1, f"model.init_from={tmp_path / 'stage2_model.pt'}", "optimizer.lr=1e-12"), CPU)
    for name, tensor in begun.model.state_dict().items():
        torch.testing.assert_close(tensor, published[name], msg=name)
    go("parts", 2, "run.ema_decay=0.5")
    whole = go("whole", 2, "run.ema_decay=0.5")
    assert bits(whole, 2) == bits(tmp_path / "parts", 2)
    snapshot = load_snapshot(whole, CPU)
    labels = snapshot.conditioner(torch.tensor([0, 1]), {})
    assert draw_latents(snapshot, labels, size=(4, 4), seed=0, solver=Solver(steps=2)).isfinite().all()
    export(whole, tmp_path / "out", layout="official")
    with pytest.raises(RunError, match="diffusers has no class for it"):
        export(whole, tmp_path / "diffusers", layout="diffusers")


@pytest.mark.usefixtures("tiny_models")
def test_from_images_through_a_representation_autoencoder_to_images(class_folder: Path, tmp_path: Path) -> None:
    vae = save_autoencoder(tmp_path / "vae", "rae")
    store, run = tmp_path / "store", tmp_path / "run"
    recipe = load_precompute("imagenet-256-rae", [f"vae.model={vae}", "images.resolution=64", "vae.min_psnr=0"])
    precompute(recipe, source_path=class_folder, store_path=store, device=CPU, progress=no_progress)
    assert LatentStore(store).latents("64x64").shape == (15, 64, 4, 4)
    settings = ["model.channels=64", "model.num_classes=0", "model.name=DiTDH-S/1", "run.steps=1", "run.global_batch=8"]
    trained = load_train("rae-dit-dh-xl-256", [*settings, "run.compile=false"])
    train(trained, store_path=store, run=run, device=CPU, report=print, stop=StopRequest())
    sample_grid(run, SampleRequest(labels=["0"], steps=2), out=tmp_path / "out", device=CPU)
    with Image.open(tmp_path / "out/grid.png") as image:
        assert min(image.size) >= 64
    request = SampleRequest(labels=["0"], steps=2, bucket="128x64")
    with pytest.raises(RecipeError, match="AutoencoderRAE encodes and decodes squares of 64 px alone, got 128x64"):
        sample_grid(run, request, out=tmp_path / "other", device=CPU)
    assert not (tmp_path / "other").exists()
