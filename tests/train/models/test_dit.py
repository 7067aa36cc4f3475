"""Our DiT: the published parameters, the published function, a start as identity, and tokens that skip blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dit_reference import PUBLISHED, reference
from torch import Tensor, nn

from leandit.datasets.batches.captions import Captions
from leandit.train.models.conditioning import Conditioning, Extras, ModelOutput
from leandit.train.models.dit import PATCHES, SIZES, DiT
from leandit.train.models.layers import time_features
from leandit.train.models.spec import DiTOptions, ModelSpec, ProjectorSpec

DEPTH, WIDTH = 5, 24


@pytest.fixture(autouse=True)
def _sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "T", (DEPTH, WIDTH, 3))


def build(name: str, **more: Any) -> DiT:
    sizes = {"channels": 4, "out_channels": 8, "num_classes": 5, "caption_width": 0, "base_size": 8}
    return DiT(ModelSpec(name=name, **(sizes | more)))


def tiny(**more: Any) -> DiT:
    """In float64, with weights that are not zero."""
    model = build("DiT-T/2", **more).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def expected_parameters(size: str, patch: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published checkpoint of the 256 px models (the keys of facebookresearch/DiT)."""
    depth, e, _ = SIZES[size]
    shapes = {"t_embedder.mlp.0": (e, 256), "t_embedder.mlp.2": (e, e), "final_layer.adaLN_modulation.1": (2 * e, e)}
    shapes |= {"x_embedder.proj": (e, 4, patch, patch), "final_layer.linear": (patch * patch * 8, e)}
    for i in range(depth):
        layers = {"attn.qkv": (3 * e, e), "attn.proj": (e, e), "adaLN_modulation.1": (6 * e, e)}
        layers |= {"mlp.fc1": (4 * e, e), "mlp.fc2": (e, 4 * e)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in layers.items()}
    named = {f"{name}.weight": shape for name, shape in shapes.items()}
    named |= {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
    return named | {"y_embedder.embedding_table.weight": (1001, e), "pos_embed": (1, (32 // patch) ** 2, e)}


@pytest.mark.parametrize(
    ("size", "trainable"), [("S", 32_865_056), ("B", 130_315_808), ("L", 457_840_672), ("XL", 674_834_720)]
)
def test_parameters_are_those_of_the_published_checkpoints(size: str, trainable: int) -> None:
    for patch in PATCHES:
        with torch.device("meta"):
            model = build(f"DiT-{size}/{patch}", num_classes=1000, base_size=32)
        found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        assert found == expected_parameters(size, patch)
        assert patch != 2 or sum(p.numel() for p in model.parameters()) == trainable


X = torch.randn((3, 4, 16, 16), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
T = torch.tensor([3.0, 500.0, 999.0], dtype=torch.float64)
LABELS = Conditioning(labels=torch.tensor([0, 4, 5]))
TOKENS = torch.randn((11, 10), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
CAPTIONS = Conditioning(captions=Captions.packed(TOKENS, (4, 1, 6)))


@pytest.fixture
def exact_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time features in float64, so that the rest of the model can be compared to 1e-10."""

    def exact(t: Tensor) -> Tensor:
        frequencies = torch.tensor([10_000 ** (-i / 128) for i in range(128)], dtype=torch.float64)
        angles = t.double()[:, None] * frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=1)

    monkeypatch.setattr("leandit.train.models.layers.time_features", exact)


OPTIONS = {
    "published": PUBLISHED,
    "both": DiTOptions(positions="both"),
    "share": DiTOptions(time="share"),
    "to_data": DiTOptions(time="to_data"),
    "all": DiTOptions(qk_norm=True, norm="rms", mlp="swiglu", positions="rope", value_residual=True),
}


@pytest.mark.usefixtures("exact_times")
@pytest.mark.parametrize("captioned", [False, True], ids=["label", "caption"])
@pytest.mark.parametrize(
    ("name", "size"),
    [*(("published", size) for size in ((8, 8), (12, 8), (16, 16))), *((name, (4, 12)) for name in OPTIONS)],
)
def test_the_output_and_all_gradients_are_those_of_the_formulas(
    name: str, size: tuple[int, int], captioned: bool
) -> None:
    options, x = OPTIONS[name], X[:, :, : size[0], : size[1]]
    model = tiny(caption_width=10 if captioned else 0, options=options)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    given: Any = TOKENS.split((4, 1, 6)) if captioned else LABELS.labels
    theirs = reference(weights, heads=3, base=4, x=x, t=T, y=given, options=options)
    ours = model(x, T, CAPTIONS if captioned else LABELS)
    assert theirs.abs().max() > 0.1  # else there is nothing to compare
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    pull = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (ours * pull).sum().backward()
    (theirs * pull).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-12, name
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_new_model_puts_out_exactly_zero_and_its_blocks_are_identity(options: DiTOptions) -> None:
    model = build("DiT-T/2", caption_width=10, num_classes=0, options=options).double()
    seen = blocks_seen(model)
    assert model(X, T, CAPTIONS).abs().max() == 0
    assert all(torch.equal(tokens, seen[0]) for tokens in seen)


def test_time_features_are_cosines_then_sines_over_128_frequencies() -> None:
    t = torch.tensor([0.0, 0.5, 37.0, 999.0])
    waves = [[f(float(v) * 10_000 ** (-i / 128)) for f in (math.cos, math.sin) for i in range(128)] for v in t]
    torch.testing.assert_close(time_features(t), torch.tensor(waves), rtol=0, atol=2e-4)  # float32 angles up to 999


# ------------------------------------------------------------------------------ tokens that skip, class token, features

KEPT = torch.tensor([[0, 3, 5, 9, 15], [1, 2, 4, 8, 11]])
IMAGES = X[:2, :, :8, :8], T[:2], Conditioning(labels=torch.tensor([0, 4]))
NUM = 16  # tokens
ROUTABLE = {"sincos": PUBLISHED, "rope": DiTOptions(positions="rope", qk_norm=True, value_residual=True)}
PROJECTED = {"dino": ProjectorSpec(block=3, width=7, feature_width=6)}
WITH_CLASS = {"dino": ProjectorSpec(block=3, width=7, feature_width=6, has_class=True)}


def forward(model: DiT, extras: Extras) -> ModelOutput:
    return model(*IMAGES, extras)


def blocks_seen(model: DiT) -> list[Tensor]:
    """The input of each block, as a later forward has it."""
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _module, given: seen.append(given[0].detach().clone()))
    return seen


@pytest.mark.parametrize("options", ROUTABLE.values(), ids=ROUTABLE)
def test_skipped_tokens_come_back_unchanged_and_kept_ones_see_each_other_alone(options: DiTOptions) -> None:
    model, whole = tiny(options=options), tiny(options=options)
    plain = model(*IMAGES)
    model.routed = (2, 4)
    everything = torch.arange(NUM).expand(2, -1)
    torch.testing.assert_close(forward(model, Extras(kept=everything)).output, plain, rtol=1e-12, atol=1e-12)
    seen, outputs = blocks_seen(model), blocks_seen(whole)
    whole(*IMAGES)
    forward(model, Extras(kept=KEPT))
    assert [tokens.shape[1] for tokens in seen] == [NUM, 5, 5, 5, NUM]
    skipped = torch.ones(2, NUM, dtype=torch.bool).scatter(1, KEPT, False)
    assert not (seen[4] == seen[0]).all()
    assert torch.equal(seen[4][skipped], outputs[1][skipped])
    assert torch.equal(seen[1], outputs[1].gather(1, KEPT[:, :, None].expand(-1, -1, WIDTH)))
    assert torch.equal(model(*IMAGES), plain)  # drawing keeps all


def test_fused_tokens_are_those_before_and_after_with_a_mask_for_skipped_ones() -> None:
    model, whole, after = tiny(fused=(2, 4)), tiny(fused=(2, 4)), list[Tensor]()
    seen, outputs = blocks_seen(model), blocks_seen(whole)
    model.blocks[3].register_forward_hook(lambda _module, _given, found: after.append(found))
    forward(model, Extras(kept=KEPT))
    whole(*IMAGES)
    expected = model.fusion.mask.expand(2, NUM, WIDTH).clone()
    for image in range(2):
        expected[image, KEPT[image]] = after[0][image]
    torch.testing.assert_close(seen[4], model.fusion.proj(torch.cat([outputs[1], expected], dim=2)))
    forward(model, Extras(kept=KEPT, without_path=torch.tensor([False, True])))
    assert torch.equal(seen[9][0], seen[4][0])
    alone = torch.cat([outputs[1][1], model.fusion.mask.expand(NUM, -1)], dim=1)
    torch.testing.assert_close(seen[9][1], model.fusion.proj(alone))


def test_a_projector_sees_the_output_of_its_block() -> None:
    model = tiny(projectors=PROJECTED)
    seen = blocks_seen(model)
    found = forward(model, Extras(projected=None, watched=3))
    torch.testing.assert_close(found.projected["dino"], model.projectors["dino"](seen[3]))
    assert torch.equal(found.watched, seen[3])
    torch.testing.assert_close(found.output, model(*IMAGES))
    conv = tiny(projectors={name: one.model_copy(update={"kind": "conv"}) for name, one in PROJECTED.items()})
    seen, rows = blocks_seen(conv), forward(conv, Extras(projected=None)).projected["dino"]
    grid, layer = seen[3].mT.unflatten(2, (4, 4)), conv.projectors["dino"]
    expected = nn.functional.conv2d(grid, layer.weight, layer.bias, padding=1)
    torch.testing.assert_close(rows, expected.flatten(2).mT)
    assert forward(model, Extras()).projected == {}
    for one in (model, conv):
        assert forward(one, Extras(projected=1)).projected["dino"].shape == (2, 1, 6)


@pytest.mark.parametrize("options", ROUTABLE.values(), ids=ROUTABLE)
@pytest.mark.parametrize("kept", [None, KEPT], ids=["all", "routed"])
def test_a_class_token_goes_through_all_blocks_and_gives_its_velocity(options: DiTOptions, kept: Tensor | None) -> None:
    model, num_kept = tiny(options=options, projectors=WITH_CLASS), NUM if kept is None else 5
    model.routed = (2, 4)
    seen, token = blocks_seen(model), X[:2, 0, 0, :6]
    found = forward(model, Extras(class_token=token, kept=kept, projected=None))
    assert [tokens.shape[1] for tokens in seen] == [1 + NUM, *[1 + num_kept] * 3, 1 + NUM]
    torch.testing.assert_close(seen[0][:, 0], model.class_token.norm(model.class_token.embed(token)))
    assert found.class_velocity.shape == (2, 6)
    assert found.projected["dino"].shape == (2, 1 + num_kept, 6)
    assert not torch.equal(forward(model, Extras(class_token=token + 1, kept=kept)).output, found.output)
    with pytest.raises(ValueError, match="class token"):
        model(*IMAGES)


def test_with_everything_added_a_model_begins_at_zero_and_every_parameter_has_a_gradient() -> None:
    added: dict[str, Any] = {"projectors": WITH_CLASS, "fused": (2, 4)}
    extras = Extras(class_token=torch.ones(2, 6, dtype=torch.float64), kept=KEPT, projected=1)
    new, model = forward(build("DiT-T/2", **added).double(), extras), tiny(**added)
    assert not new.output.any()
    assert not new.class_velocity.any()
    found: Any = forward(model, extras)
    (found.output.sum() + found.class_velocity.sum() + 0 * found.projected["dino"].sum()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
