"""Settings of torch for a GPU; what a GPU does with them is in ``tests/gpu``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leandit.train.config import load
from leandit.train.step.gpu import choose_kernels, expand_segments


def test_segments_expand_unless_the_user_or_cuda_was_first(monkeypatch: pytest.MonkeyPatch) -> None:
    empty: dict[str, str] = {}
    assert expand_segments(empty)
    assert empty == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        chosen = {name: "max_split_size_mb:64"}
        assert not expand_segments(chosen)
        assert chosen == {name: "max_split_size_mb:64"}
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    started: dict[str, str] = {}
    assert not expand_segments(started)
    assert not started


@pytest.fixture
def backends() -> Iterator[tuple[Any, Any]]:
    """Those of matrix products and of convolutions, as before at the end."""
    both = torch.backends.cuda.matmul, torch.backends.cudnn
    before = *(backend.allow_tf32 for backend in both), torch.backends.cudnn.benchmark
    yield both
    both[0].allow_tf32, both[1].allow_tf32, both[1].benchmark = before


@pytest.mark.parametrize(("model", "timed"), [("sana-1600m", True), ("DiT-XL/2", False), ("pixart-sigma", False)])
def test_convolutions_are_timed_where_a_model_has_them_in_its_blocks(
    model: str, timed: bool, backends: tuple[Any, Any]
) -> None:
    torch.backends.cudnn.benchmark = not timed
    spec: Any = SimpleNamespace(name=model)
    for precision in ("bf16", "tf32"):
        choose_kernels(load("dit-s-2-256", [f"run.precision={precision}"]), spec)
        assert torch.backends.cudnn.benchmark == timed
        assert [backend.allow_tf32 for backend in backends] == [precision == "tf32"] * 2
