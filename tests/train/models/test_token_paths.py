"""Tokens that skip blocks, the class token and the projectors: what each token sees, and plain models do not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leandit.train.models.conditioning import Extras, ModelOutput
from leandit.train.models.dit import DiT
from leandit.train.models.layers import DiTOptions
from leandit.train.models.spec import ProjectorSpec

DEPTH, WIDTH, TOKENS = 5, 24, 16
OPTIONS = {"sincos": DiTOptions(), "rope": DiTOptions(positions="rope", qk_norm=True)}


def new(**more: Any) -> DiT:
    sizes = {"depth": DEPTH, "width": WIDTH, "heads": 3, "patch": 2, "channels": 4, "out_channels": 4}
    return DiT(**sizes, num_classes=5, base_size=8, **more).double()


def tiny(options: DiTOptions = OPTIONS["sincos"], **more: Any) -> DiT:
    model = new(options=options, **more)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn((2, 4, 8, 8), generator=generator, dtype=torch.float64),
        torch.tensor([3.0, 700.0]),
        torch.tensor([0, 4]),
    )


def forward(model: DiT, extras: Extras) -> ModelOutput:
    found = model(*inputs(), extras=extras)
    assert isinstance(found, ModelOutput)
    return found


KEPT = torch.tensor([[0, 3, 5, 9, 15], [1, 2, 4, 8, 11]])


def blocks_seen(model: DiT) -> list[Tensor]:
    """The input of each block, as a later forward has it."""
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _module, given: seen.append(given[0].detach().clone()))
    return seen


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_skipped_tokens_come_back_unchanged_and_kept_ones_see_each_other_alone(options: DiTOptions) -> None:
    model = tiny(options)
    model.routed = (2, 4)
    seen = blocks_seen(model)
    forward(model, Extras(kept=KEPT))
    assert [tokens.shape[1] for tokens in seen] == [TOKENS, 5, 5, 5, TOKENS]
    before, after = seen[1], seen[4]
    skipped = torch.ones(2, TOKENS, dtype=torch.bool).scatter(1, KEPT, False)
    assert not (after == seen[0]).all()
    whole = tiny(options)  # without routing, to see what the first block puts out
    outputs = blocks_seen(whole)
    whole(*inputs())
    assert torch.equal(after[skipped], outputs[1][skipped])
    assert torch.equal(before, outputs[1].gather(1, KEPT[:, :, None].expand(-1, -1, WIDTH)))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_with_all_tokens_kept_routing_changes_nothing(options: DiTOptions) -> None:
    model = tiny(options)
    plain = model(*inputs())
    model.routed = (2, 4)
    everything = torch.arange(TOKENS).expand(2, -1)
    torch.testing.assert_close(forward(model, Extras(kept=everything)).output, plain, rtol=1e-12, atol=1e-12)
    assert torch.equal(model(*inputs()), plain)  # drawing keeps all


def test_fused_tokens_are_those_before_and_after_with_a_mask_for_skipped_ones() -> None:
    model = tiny(fused=(2, 4))
    seen, after = blocks_seen(model), list[Tensor]()
    model.blocks[3].register_forward_hook(lambda _module, _given, found: after.append(found))
    assert model.fusion is not None
    forward(model, Extras(kept=KEPT))
    whole = tiny(fused=(2, 4))
    outputs = blocks_seen(whole)
    whole(*inputs())
    expected = model.fusion.mask.expand(2, TOKENS, WIDTH).clone()
    for image in range(2):
        expected[image, KEPT[image]] = after[0][image]
    joined = torch.cat([outputs[1], expected], dim=2)
    torch.testing.assert_close(seen[4], nn.functional.linear(joined, model.fusion.proj.weight, model.fusion.proj.bias))


def test_a_projector_sees_the_output_of_its_block() -> None:
    spec = ProjectorSpec(block=2, width=7, feature_width=6)
    model = tiny(projectors={"dino": spec})
    seen = blocks_seen(model)
    found = forward(model, Extras(projected=None, watched=2))
    assert found.projected["dino"].shape == (2, TOKENS, 6)
    torch.testing.assert_close(found.projected["dino"], model.projectors["dino"](seen[2]))
    assert found.watched is not None
    assert torch.equal(found.watched, seen[2])
    assert forward(model, Extras()).projected == {}
    assert forward(model, Extras(projected=1)).projected["dino"].shape == (2, 1, 6)
    torch.testing.assert_close(found.output, model(*inputs()))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kept", [None, KEPT], ids=["all", "routed"])
def test_a_class_token_goes_through_all_blocks_and_gives_its_velocity(options: DiTOptions, kept: Tensor | None) -> None:
    spec = ProjectorSpec(block=3, width=7, feature_width=6, has_class=True)
    model = tiny(options, projectors={"dino": spec})
    model.routed = (2, 4)
    seen = blocks_seen(model)
    token = torch.randn((2, 6), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = forward(model, Extras(class_token=token, kept=kept, projected=None))
    num_kept = TOKENS if kept is None else 5
    assert [tokens.shape[1] for tokens in seen] == [1 + TOKENS, *[1 + num_kept] * 3, 1 + TOKENS]
    assert model.class_token is not None
    embedded = model.class_token.norm(model.class_token.embed(token))
    torch.testing.assert_close(seen[0][:, 0], embedded)
    assert found.class_velocity is not None
    assert found.class_velocity.shape == (2, 6)
    assert found.projected["dino"].shape == (2, 1 + num_kept, 6)
    other = forward(model, Extras(class_token=token + 1, kept=kept))
    assert not torch.equal(other.output, found.output)  # image tokens see it
    with pytest.raises(ValueError, match="class token"):
        model(*inputs())


def test_a_new_model_puts_out_zero_with_everything_added() -> None:
    spec = ProjectorSpec(block=3, width=7, feature_width=6, has_class=True)
    model = new(projectors={"dino": spec}, fused=(2, 4))
    found = forward(model, Extras(class_token=torch.ones(2, 6, dtype=torch.float64), kept=KEPT))
    assert found.output.abs().max() == 0
    assert found.class_velocity is not None
    assert found.class_velocity.abs().max() == 0


@pytest.mark.parametrize("kept", [None, KEPT], ids=["all", "routed"])
def test_every_parameter_has_a_gradient_at_every_step(kept: Tensor | None) -> None:
    spec = ProjectorSpec(block=3, width=7, feature_width=6, has_class=True)
    model = tiny(projectors={"dino": spec}, fused=(2, 4))
    found = forward(model, Extras(class_token=torch.ones(2, 6, dtype=torch.float64), kept=kept, projected=1))
    assert found.class_velocity is not None
    (found.output.sum() + found.class_velocity.sum() + 0 * found.projected["dino"].sum()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
