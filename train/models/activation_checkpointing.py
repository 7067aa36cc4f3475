"""Activation checkpointing: what the backward pass computes again instead of keeping it (Chen et al. 2016).

A block becomes one of a subclass whose ``forward`` is checkpointed: the names of parameters stay, a block that is
compiled is compiled with it, and FSDP, which hooks into the call, gathers no weights a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .cpu_linear import has_onednn

Mode = Literal["none", "blocks", "selective"]
Hooks = Callable[[], AbstractContextManager[Any]]


def checkpoint_blocks(blocks: Iterable[nn.Module], mode: Mode, *, to_cpu: bool | Hooks = False) -> None:
    """Choose what the blocks keep for the backward pass; the last call holds.

    Args:
      mode: "none" keeps everything. "blocks" keeps what goes into a block. "selective" keeps matrix products,
        convolutions and attention too, and computes the pointwise rest again.
      to_cpu: what goes into a block waits in the memory of the CPU; or the hooks that do as if it did.
    """
    for block in blocks:
        plain = getattr(type(block), "plain_class", type(block))
        block.__class__ = plain if mode == "none" else checkpointed_class(plain, mode, to_cpu)


@functools.cache
def checkpointed_class(plain: type[nn.Module], mode: Mode, to_cpu: bool | Hooks = False) -> type[nn.Module]:
    """A subclass of a block's class that computes again what the mode does not keep.

    Its ``forward`` is a function of this module, since the compiler passes over frames of torch's own, and one for all
    blocks of a class, so that they share their compiled code.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # no block draws anything
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept_operations())

    def forward(self: Any, *args: Any, **more: Any) -> Any:
        own = super(made, self).forward  # pyright: ignore[reportAttributeAccessIssue]
        if not to_cpu:
            return checkpoint(own, *args, **options, **more)
        # The hooks around a checkpoint take the inputs of the block; those within it take the rest, and drop it.
        on_gpu = any(isinstance(given, Tensor) and given.is_cuda for given in args)
        with to_cpu() if callable(to_cpu) else save_on_cpu(pin_memory=on_gpu):
            return checkpoint(own, *args, **options, **more)

    made = type(plain.__name__, (plain,), {"forward": forward, "plain_class": plain})
    return made


def kept_operations() -> list[Any]:
    """Operations whose results "selective" keeps: those that take the time."""
    import torch.nn.attention.varlen  # registers its operation

    aten = torch.ops.aten
    return [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        *([torch.ops.mkldnn._linear_pointwise.default] if has_onednn() else []),
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
    ]
