"""Find the fastest of torch's attention kernels by timing the model's own calls.

The fastest depends on head width, number of tokens and GPU (FlashAttention-3 paper, arXiv 2407.08608, figure 5).
Checkpoints store the choice, because kernels round differently.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ..metrics.flops import example_conditioning, meta_model
from ..models.spec import ModelSpec

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TRIES = 10


class Call(NamedTuple):
    """Sizes of a call of attention for one image: heads, queries, keys, width of a head."""

    heads: int
    queries: int
    keys: int
    width: int


def attention_calls(spec: ModelSpec, latent_size: tuple[int, int], caption_tokens: int) -> Counter[Call]:
    """The calls without a mask that a forward makes, with their counts; runs on the meta device.

    Args:
      latent_size: height and width of the latent.
      caption_tokens: of a caption, for a model with text.
    """
    with _Recorder() as recorder, torch.no_grad(), torch.device("meta"):
        x = torch.empty(1, spec.channels, *latent_size)
        meta_model(spec)(x, torch.empty(1), example_conditioning(spec, 1, caption_tokens))
    return recorder.calls


class _Recorder(TorchFunctionMode):
    """Records the sizes of each attention call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is scaled_dot_product_attention and (kwargs or {}).get("attn_mask") is None:
            q, k = args[:2]
            self.calls[Call(q.shape[1], q.shape[2], k.shape[2], q.shape[3])] += 1
        return function(*args, **(kwargs or {}))


def fastest_kernels(calls: Mapping[Call, int], images: int, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Names of the kernels, the fastest first; unsupported ones come last. The arguments are of ``kernel_seconds``."""
    seconds = kernel_seconds(calls, images, dtype, device)
    return sorted(KERNELS, key=lambda name: (seconds[name] is None, seconds[name]))


def kernel_seconds(
    calls: Mapping[Call, int], images: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float | None]:
    """GPU time of forward and backward of all calls, by kernel; None for one that does not support them.

    Args:
      images: in a microbatch.
      dtype: that attention is computed in.
      device: a GPU.
    """
    return {name: _seconds(name, calls, images, dtype, device) for name in KERNELS}


def _seconds(
    name: str, calls: Mapping[Call, int], images: int, dtype: torch.dtype, device: torch.device
) -> float | None:
    """GPU time of a kernel for all calls of a step; None if it does not support one of them."""
    total = 0.0
    for call, count in calls.items():
        sizes = [(images, call.heads, tokens, call.width) for tokens in (call.queries, call.keys, call.keys)]
        inputs = [torch.randn(size, dtype=dtype, device=device, requires_grad=True) for size in sizes]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            with sdpa_kernel(KERNELS[name]):
                _forward_backward(inputs)
                start.record()
                for _ in range(TRIES):
                    _forward_backward(inputs)
                end.record()
        except RuntimeError:  # unsupported sizes, dtype or GPU
            return None
        end.synchronize()
        total += count * start.elapsed_time(end) / 1000 / TRIES
    return total


def _forward_backward(inputs: list[Tensor]) -> None:
    q, k, v = inputs
    scaled_dot_product_attention(q, k, v).sum().backward()


def preferred(names: Sequence[str]) -> AbstractContextManager[Any]:
    """Within this context attention uses the first of these kernels that supports a call; no names: torch's choice."""
    if not names:
        return contextlib.nullcontext()
    return sdpa_kernel([*(KERNELS[name] for name in names), SDPBackend.MATH], set_priority=True)
