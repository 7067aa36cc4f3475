"""Find the fastest of torch's attention kernels by timing the model's own calls.

The fastest depends on head width, number of tokens and GPU (FlashAttention-3 paper, arXiv 2407.08608, figure 5).
Checkpoints store the choice, because kernels round differently.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ...datasets.errors import ResourceError
from ..metrics.flops import example_conditioning, meta_model
from ..models.spec import ModelSpec

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,  # once it is installed in place of torch's
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FLASH3_PACKAGE, FLASH3_NAME, FLASH3_MAJOR = "flash_attn_interface", "FA3", 9  # it is for Hopper alone
TRIES = 10
LOG = logging.getLogger(__name__)


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


def has_flash3(device: torch.device) -> bool:
    """Whether FlashAttention-3 is there: a torch that can install it, its package, and a Hopper GPU."""
    known: Any = getattr(attention, "list_flash_attention_impls", list)
    if device.type != "cuda" or FLASH3_NAME not in known() or find_spec(FLASH3_PACKAGE) is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == FLASH3_MAJOR


def install_flash(names: Sequence[str]) -> None:
    """Make torch's flash attention, that of variable length too, the version that comes first among the names.

    For the whole process, because a backward must be of the version that the forward was of.

    Raises: ResourceError: its package is missing, or does not fit to torch or CUDA.
    """
    if next((name for name in names if KERNELS[name] is SDPBackend.FLASH_ATTENTION), None) == "flash3":
        try:
            attention.activate_flash_attention_impl(FLASH3_NAME)
        except (RuntimeError, ImportError, OSError) as error:
            raise ResourceError(
                f"attention kernel 'flash3': package '{FLASH3_PACKAGE}' does not load: {error}. Install the one for "
                "this torch and CUDA on every machine, or remove it: then the run measures its kernels again."
            ) from error
    elif (has_current := getattr(attention, "current_flash_attention_impl", None)) and has_current():
        attention.restore_flash_attention_impl()


def kernel_seconds(
    calls: Mapping[Call, int], images: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float | None]:
    """GPU time of forward and backward of all calls, by kernel; None for one that does not support them.

    Args:
      images: in a microbatch.
      dtype: that attention is computed in.
      device: a GPU.
    """
    found: dict[str, float | None] = {}
    for name in KERNELS:
        is_there = name != "flash3" or has_flash3(device)
        found[name] = _seconds_installed(name, calls, images, dtype, device) if is_there else None
    return found


def _seconds_installed(name: str, *given: Any) -> float | None:
    """``_seconds``, with torch's own flash attention afterwards."""
    try:
        install_flash([name])
        return _seconds(name, *given)
    except ResourceError as error:
        LOG.warning("%s", error)
        return None
    finally:
        install_flash([])


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
    backends = dict.fromkeys(KERNELS[name] for name in names)  # two versions are one backend
    return sdpa_kernel([*backends, SDPBackend.MATH], set_priority=True)
