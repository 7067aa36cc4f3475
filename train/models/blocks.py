"""What blocks keep for the backward pass, and how they are compiled; both replace the ``forward`` of each block.

Parameters keep their names, blocks of a kind share their graphs, and FSDP, which hooks into ``__call__``, gathers the
weights of a block once for its recomputation and its backward pass.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

LOG = logging.getLogger(__name__)
MOST_GRAPHS, MOST_STATIC_GRAPHS = 8, 64  # of a kind of block; a graph takes up to half a minute

Mode = Literal["none", "blocks", "selective"]
Hooks = Callable[[], AbstractContextManager[Any]]


def checkpoint_blocks(blocks: nn.ModuleList, mode: Mode, *, to_cpu: bool | Hooks = False) -> None:
    """Choose what the blocks keep for the backward pass; a later call replaces an earlier one.

    Args:
      mode: "none" keeps everything. "blocks" keeps the inputs of a block and recomputes the rest (Chen et al. 2016).
        "selective" also keeps matrix products, convolutions and attention, and recomputes the pointwise rest.
      to_cpu: offload the inputs of a block to the CPU; or the saved-tensor hooks that simulate it.
    """
    for block in blocks:
        forward: Any = block.forward
        plain = getattr(forward.__func__, "plain", forward.__func__)
        block.forward = MethodType(plain if mode == "none" else _checkpointed(plain, mode, to_cpu), block)


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

        values = (*args, *kwargs.values())
        if not to_cpu:
            return checkpoint(positional, *values, **options)
        # Hooks around a checkpoint see the inputs of the block; the hooks within it drop the rest.
        on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in values)
        with to_cpu() if callable(to_cpu) else save_on_cpu(pin_memory=on_gpu):
            return checkpoint(positional, *values, **options)

    forward.plain = plain  # pyright: ignore[reportFunctionMemberAccess]
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


def compile_blocks(blocks: nn.ModuleList, *, whole: bool = True) -> None:
    """Compile the forward of each block for any number of images and tokens: one graph serves all shapes of a kind.

    With ``LEANDIT_STATIC_SHAPES=1`` in the environment each shape has its own graph, which may be faster where there
    are few. Shapes beyond the limit of graphs run eagerly, with a warning that names them.

    Args:
      whole: a graph must hold the whole forward; false where a block offloads its inputs, whose hooks break a graph.
    """
    import torch._functorch.config as gradients  # here: the compiler takes seconds to import
    from torch.fx.experimental import _config as shapes

    static = os.environ.get("LEANDIT_STATIC_SHAPES") == "1"
    kinds = {tuple((name, *p.shape) for name, p in block.named_parameters()) for block in blocks}
    most = (MOST_STATIC_GRAPHS if static else MOST_GRAPHS) * len(kinds)
    config = torch._dynamo.config
    config.recompile_limit, config.accumulated_recompile_limit = most, max(config.accumulated_recompile_limit, most)
    config.optimize_ddp = False  # it would split blocks at the ends of gradient buckets
    shapes.use_duck_shape = False  # else as many images as heads, in the first batch, would have to stay as many
    # Gradients are computed outside of autocast; compiled with it, sums that the forward keeps in float32 lose 16 bits.
    gradients.backward_pass_autocast = "off"
    warned = set[str]()
    for block in blocks:
        compiled = torch.compile(block.forward, fullgraph=whole, dynamic=not static)
        block.forward = _or_eager(compiled, block.forward, type(block).__name__, most, warned)


def _or_eager(
    compiled: Callable[..., Any], plain: Callable[..., Any], kind: str, most: int, warned: set[str]
) -> Callable[..., Any]:
    """The compiled forward of a block, or the plain one for a shape beyond the limit of graphs."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except FailOnRecompileLimitHit:
            leaves = tree_leaves((args, kwargs))
            shape = ", ".join("x".join(map(str, one.shape)) for one in leaves if isinstance(one, Tensor))
            if shape not in warned:
                warned.add(shape)
                LOG.warning("%s: %d graphs are compiled, so a batch of the shapes %s runs eagerly", kind, most, shape)
            return plain(*args, **kwargs)

    return forward
