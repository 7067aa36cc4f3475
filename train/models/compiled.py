"""Compile the blocks of a model, for any number of images and tokens at once.

One graph serves all buckets, caption lengths and last batches of a kind of block; with ``LEANDIT_STATIC_SHAPES=1`` in
the environment each shape has its own, which may be faster where there are few.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .build import Denoiser

LOG = logging.getLogger(__name__)
MOST_GRAPHS, MOST_STATIC_GRAPHS = 8, 64  # of a kind of block; a graph takes up to half a minute


def compile_blocks(model: Denoiser, *, whole: bool = True) -> None:
    """Compile the forward of each block; blocks of a kind share their graphs.

    Hooks of FSDP stay outside of the graphs, and parameters keep their names.

    Args:
      whole: a graph must hold the whole forward; false where a block offloads its inputs, whose hooks break a graph.
    """
    import torch._functorch.config as gradients  # here: the compiler takes seconds to import
    from torch.fx.experimental import _config as shapes

    static = os.environ.get("LEANDIT_STATIC_SHAPES") == "1"
    most = (MOST_STATIC_GRAPHS if static else MOST_GRAPHS) * num_kinds(model.blocks)
    config = torch._dynamo.config
    config.recompile_limit, config.accumulated_recompile_limit = most, max(config.accumulated_recompile_limit, most)
    config.optimize_ddp = False  # it would split blocks at the ends of gradient buckets
    shapes.use_duck_shape = False  # else as many images as heads, in the first batch, would have to stay as many
    # Gradients are computed outside of autocast; compiled with it, sums that the forward keeps in float32 lose 16 bits.
    gradients.backward_pass_autocast = "off"
    warned = set[str]()
    for block in model.blocks:
        compiled = torch.compile(block.forward, fullgraph=whole, dynamic=not static)
        block.forward = _or_eager(compiled, block.forward, type(block).__name__, most, warned)


def num_kinds(blocks: nn.ModuleList) -> int:
    """Kinds of blocks: those that differ in their parameters have graphs of their own."""
    return len({tuple((name, *p.shape) for name, p in block.named_parameters()) for block in blocks})


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
