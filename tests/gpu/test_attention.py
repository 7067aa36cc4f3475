"""Attention on a GPU: captions without their padding give what padded ones give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from leandit.datasets.batches.captions import Captions
from leandit.train.models import cross_attention
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioning
from leandit.train.models.cross_attention import Packed, Padded, has_varlen
from leandit.train.models.spec import ModelSpec

LENGTHS = (77, 1, 300, 128, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [32, 64, 72, 112])  # of a head, as the models have them
def test_packed_captions_are_attended_to_as_padded_ones(dtype: torch.dtype, width: int, gpu: torch.device) -> None:
    generator = torch.Generator(gpu).manual_seed(0)
    lengths = torch.tensor(LENGTHS, device=gpu)
    mask = torch.arange(max(LENGTHS), device=gpu) < lengths[:, None]
    offsets = torch.nn.functional.pad(lengths.cumsum(0).int(), (1, 0))
    q = torch.randn(len(LENGTHS), 64, 4, width, generator=generator, device=gpu)
    both = torch.randn(2, len(LENGTHS), max(LENGTHS), 4, width, generator=generator, device=gpu)
    found = []
    for kind in (torch.float32, dtype):
        x, (k, v) = q.to(kind).requires_grad_(), (one.to(kind).requires_grad_() for one in both)
        if kind == torch.float32:
            attended = Padded(mask[:, None, None]).attend(x, k, v)
        else:
            attended = Packed(offsets, 512).attend(x, k[mask], v[mask])
        gradients = torch.autograd.grad(attended.float().square().sum(), (x, k, v))
        found.append([attended, *gradients])
    for packed, padded in zip(found[1], found[0], strict=True):
        assert packed.isfinite().all()
        torch.testing.assert_close(packed.float(), padded, rtol=0.02, atol=0.02 * padded.abs().max().item())


@pytest.mark.parametrize("name", ["DiT-S/2", "pixart-tiny", "sana-tiny"])
@pytest.mark.usefixtures("tiny_models")
def test_a_model_gives_the_same_for_both(name: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec(name=name, channels=4, out_channels=4, num_classes=0, caption_width=8, base_size=8)
    model: Any = build_model(spec, seed=0).to(gpu)
    generator = torch.Generator(gpu).manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, device=gpu)
    captions = Captions.packed(torch.randn(sum(LENGTHS), 8, generator=generator, device=gpu), LENGTHS)
    x = torch.randn(len(LENGTHS), 4, 8, 8, generator=generator, device=gpu)
    t, found, kinds = torch.linspace(10, 990, len(LENGTHS), device=gpu), list[list[Tensor]](), []
    for packed in (True, False):
        if not packed:
            monkeypatch.setattr(cross_attention, "has_varlen", lambda *_: False)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            kinds.append(has_varlen(captions.tokens, 16))
            output = model(x, t, Conditioning(captions=captions)).float()
        output.square().mean().backward()
        found.append([output, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert kinds[0], "no variable-length attention on this GPU"
    packed, padded = ([one[0], torch.cat([gradient.flatten() for gradient in one[1:]])] for one in found)
    for one, other in zip(packed, padded, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()
