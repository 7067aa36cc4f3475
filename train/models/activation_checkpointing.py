"""Activation checkpointing: the backward pass recomputes activations (Chen et al. 2016).

A block gets a subclass with another ``forward``: parameters keep their names, compilation includes it, blocks of a
class share compiled code, and FSDP, which hooks into ``__call__``, does not gather weights twice.
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


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module another ``forward``, which takes the module first."""
    module.__class__ = _with_forward(type(module), forward)


@functools.cache
def _with_forward(plain: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    return type(plain.__name__, (plain,), {"forward": forward})


def checkpoint_blocks(blocks: Iterable[nn.Module], mode: Mode, *, to_cpu: bool | Hooks = False) -> None:
    """Choose what the blocks keep for the backward pass; a later call replaces an earlier one.

    Args:
      mode: "none" keeps everything. "blocks" keeps the inputs of a block. "selective" also keeps matrix products,
        convolutions and attention, and recomputes the pointwise rest.
      to_cpu: offload the inputs of a block to the CPU; or the saved-tensor hooks that simulate it.
    """
    for block in blocks:
        if getattr(type(block).forward, "checkpointed", False):
            block.__class__ = type(block).__mro__[1]
        if mode != "none":
            replace_forward(block, _checkpointed(type(block).forward, mode, to_cpu))


@functools.cache
def _checkpointed(plain: Callable[..., Any], mode: Mode, to_cpu: bool | Hooks) -> Callable[..., Any]:
    """A ``forward`` that recomputes what the mode does not keep; the compiler would skip one defined in torch."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # blocks are deterministic
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _expensive_operations())

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        num_args, names = len(args), tuple(kwargs)

        def positional(*values: Any) -> Any:  # a checkpoint saves inputs through hooks only if they have no name
            return plain(self, *values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

        if not to_cpu:
            return checkpoint(positional, *args, *kwargs.values(), **options)

        # Hooks around a checkpoint see the inputs of the block; the hooks within it drop the rest.
        values = (*args, *kwargs.values())
        on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in values)
        with to_cpu() if callable(to_cpu) else save_on_cpu(pin_memory=on_gpu):
            return checkpoint(positional, *values, **options)

    forward.checkpointed = True  # pyright: ignore[reportFunctionMemberAccess]
    return forward


def _expensive_operations() -> list[Any]:
    """The operations whose results "selective" keeps."""
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
