"""What blocks keep for the backward pass, and how they are compiled; both replace the ``forward`` of each block.

Parameters keep their names, blocks of a kind share their graphs, and FSDP, which hooks into ``__call__``, gathers the
weights of a block once for its recomputation and its backward pass.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

LOG = logging.getLogger(__name__)
MOST_GRAPHS = 8  # of a kind of block; a graph takes up to half a minute

Mode = Literal["none", "blocks", "selective"]


def checkpoint_blocks(blocks: nn.ModuleList, mode: Mode) -> None:
    """Choose what the blocks keep for the backward pass; a later call replaces an earlier one.

    Args:
      mode: "none" keeps everything. "blocks" keeps the inputs of a block and recomputes the rest (Chen et al. 2016).
        "selective" also keeps matrix products, convolutions and attention, and recomputes the pointwise rest.
    """
    for block in blocks:
        forward: Any = block.forward
        plain = getattr(forward.__func__, "plain", forward.__func__)
        block.forward = MethodType(plain if mode == "none" else _checkpointed(plain, mode), block)


@functools.cache
def _checkpointed(plain: Callable[..., Any], mode: Mode) -> Callable[..., Any]:
    """A ``forward`` that recomputes what the mode does not keep; the compiler would skip one defined in torch."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # blocks are deterministic
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _expensive_operations())

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda *values, **named: plain(self, *values, **named), *args, **kwargs, **options)

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


def compile_blocks(blocks: nn.ModuleList) -> None:
    """Compile the forward of each block for any number of images and tokens: one graph serves all shapes of a kind.

    Shapes beyond the limit of graphs run eagerly, with a warning that names them.
    """
    import torch._functorch.config as gradients  # here: the compiler takes seconds to import
    from torch.fx.experimental import _config as shapes

    kinds = {tuple((name, *p.shape) for name, p in block.named_parameters()) for block in blocks}
    most = MOST_GRAPHS * len(kinds)
    config = torch._dynamo.config
    config.recompile_limit, config.accumulated_recompile_limit = most, max(config.accumulated_recompile_limit, most)
    config.optimize_ddp = False  # it would split blocks at the ends of gradient buckets
    shapes.use_duck_shape = False  # else as many images as heads, in the first batch, would have to stay as many
    # Gradients are computed outside of autocast; compiled with it, sums that the forward keeps in float32 lose 16 bits.
    gradients.backward_pass_autocast = "off"
    warned = set[str]()
    for block in blocks:
        compiled = torch.compile(block.forward, fullgraph=True, dynamic=True)
        block.forward = _or_eager(compiled, block.forward, f"{type(block).__name__}: {most} graphs", warned)


def _or_eager(
    compiled: Callable[..., Any], plain: Callable[..., Any], limit: str, warned: set[str]
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
                LOG.warning("%s are compiled, so a batch of the shapes %s runs eagerly", limit, shape)
            return plain(*args, **kwargs)

    return forward
