"""FLOPs of every family at the lengths of its captions, and with adapters, against those that run."""

from __future__ import annotations

from typing import Any

import pytest
from families import FAMILY_SPECS, JOINED_TOKENS, inputs_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from leandit.train.metrics.flops import forward_flops, mean_train_flops, train_flops
from leandit.train.models.build import FAMILIES, build_model
from leandit.train.models.spec import AdapterSpec

pytestmark = pytest.mark.usefixtures("tiny_models")
CAPTIONED = [family for family, spec in FAMILY_SPECS.items() if spec.takes_text and not spec.texts]
LENGTHS = (5, 33, 70)  # tokens of captions, none a multiple of what a model pads them to


def counted(family: str, model: Any, length: int, *, backward: bool) -> int:
    """FLOPs of a real forward of one image, and of its backward."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        output = model(*inputs_of(FAMILY_SPECS[family], length))
        if backward:
            output.square().mean().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", CAPTIONED)
def test_captions_of_every_family_count_at_their_own_length(family: str) -> None:
    spec = FAMILY_SPECS[family]
    model = build_model(spec, seed=0)
    flops = {length: train_flops(spec, (8, 8), length) for length in LENGTHS}
    assert len(set(flops.values())) == len(LENGTHS)
    if not spec.projectors:
        forwards = [counted(family, model, length, backward=False) for length in LENGTHS]
        assert [forward_flops(spec, (8, 8), length) for length in LENGTHS] == forwards
        assert list(flops.values()) == [3 * forward for forward in forwards]
    assert mean_train_flops(spec, (8, 8), LENGTHS) == pytest.approx(sum(flops.values()) / len(LENGTHS), rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_every_family_cost_what_their_forward_and_backward_compute(family: str) -> None:
    adapter = AdapterSpec(rank=2, alpha=2, targets=FAMILIES[family].adapted)
    spec = FAMILY_SPECS[family].model_copy(update={"adapter": adapter})
    model = build_model(spec, seed=0)
    for length in (JOINED_TOKENS,) if spec.texts else LENGTHS:
        assert train_flops(spec, (8, 8), length) == counted(family, model, length, backward=True)
