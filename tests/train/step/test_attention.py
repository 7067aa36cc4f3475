"""Which attention kernel a run takes: the model's own calls are counted, the fastest comes first, the sums stay."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from making import train_recipe
from torch.nn.attention import _registry
from torch.nn.functional import scaled_dot_product_attention

from leandit.datasets.errors import ResourceError
from leandit.datasets.store import LatentStore
from leandit.train.models.spec import ModelSpec
from leandit.train.parallel.engine import TorchEngine
from leandit.train.run import resume
from leandit.train.run.resume import tuned_for
from leandit.train.run.state import prepare
from leandit.train.step import attention_kernels
from leandit.train.step.attention_kernels import (
    Call,
    attention_calls,
    fastest_kernels,
    has_flash3,
    install_flash,
    kernel_seconds,
    preferred,
)
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
    seconds = {"cudnn": 0.3, "flash": None, "efficient": 0.2}  # and no package of FlashAttention-3
    monkeypatch.setattr(attention_kernels, "_seconds", lambda name, *_: seconds[name])
    assert fastest_kernels({}, 1, torch.bfloat16, CUDA) == ["efficient", "cudnn", "flash", "flash3"]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A GPU with the package of FlashAttention-3, of which only what torch's registry does is there: a log of it."""
    log = []

    def register() -> SimpleNamespace:
        log.append("activated")
        return SimpleNamespace(remove=lambda: log.append("removed"))

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    monkeypatch.setattr(attention_kernels, "find_spec", lambda name: name == "flash_attn_interface")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    yield log
    install_flash([])


def test_flash3_needs_its_package_and_a_hopper(hopper: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_flash3(CUDA)
    assert not has_flash3(torch.device("cpu"))
    for attribute, owner, value in (
        ("find_spec", attention_kernels, lambda _: None),
        ("get_device_capability", torch.cuda, lambda _: (10, 0)),
        ("list_flash_attention_impls", torch.nn.attention, lambda: ["FA4"]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value)
            assert not has_flash3(CUDA)
    assert not hopper


def test_flash3_is_active_while_it_is_timed_and_no_longer(hopper: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []
    current = torch.nn.attention.current_flash_attention_impl
    monkeypatch.setattr(attention_kernels, "_seconds", lambda name, *_: timed.append((name, current())) or 0.1)
    assert set(kernel_seconds({}, 1, torch.bfloat16, CUDA).values()) == {0.1}
    assert timed == [("cudnn", None), ("flash", None), ("flash3", "FA3"), ("efficient", None)]
    assert current() is None
    assert hopper == ["activated", "removed"]


def test_a_package_that_does_not_load_is_left_out_with_a_warning_and_refused_where_it_was_chosen(
    hopper: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def register() -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    monkeypatch.setattr(attention_kernels, "_seconds", lambda *_: 0.1)
    assert kernel_seconds({}, 1, torch.bfloat16, CUDA)["flash3"] is None
    assert "undefined symbol" in caplog.text
    with pytest.raises(ResourceError, match=r"flash3.*flash_attn_interface.*undefined symbol.*remove it"):
        install_flash(["flash3", "flash"])


@pytest.mark.parametrize(
    ("names", "installed"),
    [
        (["flash3", "cudnn", "flash", "efficient"], "FA3"),
        (["cudnn", "flash3", "flash", "efficient"], "FA3"),  # for captions that are packed
        (["flash", "flash3", "cudnn", "efficient"], None),
        ([], None),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_the_faster_version_of_flash_attention_is_installed(names: list[str], installed: str | None) -> None:
    install_flash(["flash3"])  # of a run before, in the same process
    install_flash(names)
    assert torch.nn.attention.current_flash_attention_impl() == installed
    with preferred(names):  # names torch's backend once, or torch would refuse it
        assert scaled_dot_product_attention(*[torch.ones(1, 1, 2, 8)] * 3).sum() == 16


@pytest.mark.usefixtures("tiny_models")
def test_kernels_are_measured_again_where_flash3_comes_or_goes(
    label_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = prepare(train_recipe("dit-s-4"), [label_store], torch.device("cpu"), print)
    without = tuned_for(state)
    monkeypatch.setattr(resume, "has_flash3", lambda _: True)
    assert tuned_for(state) == without | {"flash3": True}


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
