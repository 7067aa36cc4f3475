"""Which attention kernel a run takes: the model's own calls are counted, the fastest comes first, the sums stay."""

from __future__ import annotations

import pytest
import torch
from making import train_recipe

from leandit.datasets.store import LatentStore
from leandit.train.models.spec import ModelSpec
from leandit.train.parallel.engine import TorchEngine
from leandit.train.run.state import prepare
from leandit.train.step import attention_kernels
from leandit.train.step.attention_kernels import Call, attention_calls, fastest_kernels
from leandit.train.step.train_step import train_step

CUDA = torch.device("cuda")


def spec(name: str, **more: object) -> ModelSpec:
    base = {"channels": 4, "out_channels": 8, "num_classes": 10, "caption_width": 0, "base_size": 32}
    return ModelSpec.model_validate({"name": name} | base | more)


def test_a_dit_has_a_call_in_each_block() -> None:
    assert attention_calls(spec("DiT-S/2"), (32, 32), 0) == {Call(6, 256, 256, 64): 12}
    assert attention_calls(spec("DiT-XL/2"), (64, 32), 0) == {Call(16, 512, 512, 72): 28}


def test_calls_under_a_mask_are_not_counted() -> None:
    found = attention_calls(spec("pixart-tiny", num_classes=0, caption_width=64), (32, 32), 20)
    assert found == {Call(4, 256, 256, 32): 6}


def test_the_fastest_comes_first_and_what_fails_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"cudnn": 0.3, "flash": None, "efficient": 0.2}
    monkeypatch.setattr(attention_kernels, "_seconds", lambda name, *_: seconds[name])
    assert fastest_kernels({}, 1, torch.bfloat16, CUDA) == ["efficient", "cudnn", "flash"]


@pytest.mark.parametrize("mode", ["none", "blocks", "selective"])
@pytest.mark.usefixtures("tiny_models")
def test_what_is_recomputed_takes_the_kernel_that_the_forward_took(
    mode: str, label_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the kernels is on a CPU, so a preference for them is one for another kernel than torch's first."""
    gradients = []
    monkeypatch.setattr(TorchEngine, "update", lambda self, *_, **__: (gradients_of(self, gradients), torch.zeros(())))
    for kernels in ([], ["cudnn"]):
        recipe = train_recipe("dit-s-4", f"run.activation_checkpointing={mode}")
        state = prepare(recipe, [label_store], torch.device("cpu"), print)
        state.attention_kernels = kernels
        train_step(state, next(iter(state.loader)))
    torch.testing.assert_close(gradients[0], gradients[1])


def gradients_of(engine: TorchEngine, seen: list[list[torch.Tensor]]) -> torch.Tensor:
    seen.append([p.grad.clone() for p in engine.model.parameters() if p.grad is not None])
    return torch.zeros(())
