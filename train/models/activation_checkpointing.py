"""Activation checkpointing: the backward pass recomputes activations (Chen et al. 2016).

A block gets a subclass whose ``forward`` is checkpointed: parameters keep their names, compilation includes it, and
FSDP, which hooks into ``__call__``, does not gather weights twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Mode = Literal["none", "blocks", "selective"]
Hooks = Callable[[], AbstractContextManager[Any]]


def checkpoint_blocks(blocks: Iterable[nn.Module], mode: Mode, *, to_cpu: bool | Hooks = False) -> None:
    """Choose what the blocks keep for the backward pass; a later call replaces an earlier one.

    Args:
      mode: "none" keeps everything. "blocks" keeps the inputs of a block. "selective" keeps matrix products,
        convolutions and attention too, and recomputes the pointwise rest.
      to_cpu: offload the inputs of a block to the CPU; or the saved-tensor hooks that simulate it.
    """
    for block in blocks:
        plain = getattr(type(block), "plain_class", type(block))
        block.__class__ = plain if mode == "none" else checkpointed_class(plain, mode, to_cpu)


@functools.cache
def checkpointed_class(plain: type[nn.Module], mode: Mode, to_cpu: bool | Hooks = False) -> type[nn.Module]:
    """A subclass of a block's class that recomputes what the mode does not keep.

    Its ``forward`` is defined here, because the compiler skips torch's own frames; blocks of a class share it, and so
    their compiled code.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # blocks are deterministic
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept_operations())

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain_forward = super(subclass, self).forward  # pyright: ignore[reportAttributeAccessIssue]
        if not to_cpu:
            return checkpoint(plain_forward, *args, **options, **kwargs)
        num_args, names = len(args), tuple(kwargs)

        def of_places(*values: Any) -> Any:  # a checkpoint saves inputs through hooks only if they have no name
            return plain_forward(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

        # Hooks around a checkpoint see the inputs of the block; the hooks within it drop the rest.
        values = (*args, *kwargs.values())
        on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in values)
        with to_cpu() if callable(to_cpu) else save_on_cpu(pin_memory=on_gpu):
            return checkpoint(of_places, *values, **options)

    subclass = type(plain.__name__, (plain,), {"forward": forward, "plain_class": plain})
    return subclass


def kept_operations() -> list[Any]:
    """The expensive operations, whose results "selective" keeps."""
    import torch.nn.attention.varlen  # registers its operation

    aten = torch.ops.aten
    return [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_mm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
    ]
