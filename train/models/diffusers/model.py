"""A transformer of diffusers behind the common call: what the file of one model defines.

A new model is a file with a subclass, entered in ``families.FAMILIES``. diffusers takes seconds to import, and brings
its own optional libraries: only ``transformer`` imports it, when a model is built.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..activation_checkpointing import Mode, checkpoint_blocks
from ..conditioning import Conditioning
from ..numerics import at_least_float32, product_dtype
from ..spec import ModelSpec

Config = dict[str, Any]
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
EMBEDDING_STD = 0.02  # as DiT's embeddings


class TextRole(NamedTuple):
    """What a model reads of one text encoder, and its published sizes.

    Args:
      encoder: display name.
      tokens: of each caption, padding included; 0: only the pooled vector is read.
      width: of a token.
      pooled_width: 0: the pooled vector is not read.
      beside: its tokens are joined to those of the role before by their features, not after them.
    """

    encoder: str
    tokens: int
    width: int
    pooled_width: int = 0
    beside: bool = False


class DiffusersModel(nn.Module):
    """A transformer of diffusers, ``net``, as a function of noisy latents, time and conditioning.

    Args:
      config: arguments of diffusers' class.

    Attributes:
      family: name of the family.
      sizes: model name -> the arguments of diffusers' class that its size fixes.
      patch: side of a token in latent pixels.
      recipe: precompute recipe whose stores fit the published sizes; other resolutions have a recipe beside it.
      texts: the text encoders that the model reads, padding included; empty: the valid tokens of one.
      adapted: ends of the names of the linear layers that get adapters by default.
      residual: dtype of the residual stream under autocast to bfloat16; in any other precision it is float32.
      has_narrow_residual: whether ``residual`` may be "bf16".
    """

    family: ClassVar[str]
    sizes: ClassVar[dict[str, Config]]
    patch: ClassVar[int]
    recipe: ClassVar[str]
    texts: ClassVar[tuple[TextRole, ...]] = ()
    adapted: ClassVar[tuple[str, ...]] = ATTENTION
    has_narrow_residual: ClassVar[bool] = False
    residual: Literal["float32", "bf16"] = "float32"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.net = self.transformer()(**config)
        self.optimize()
        self.initialize()

    @staticmethod
    def transformer() -> Any:
        """diffusers' class."""
        raise NotImplementedError

    @classmethod
    def needs(cls, spec: ModelSpec) -> Config:
        """The arguments that store and objective fix; a published config must have the same."""
        raise NotImplementedError

    @classmethod
    def config(cls, spec: ModelSpec) -> Config:
        """All arguments for training from scratch."""
        return {**cls.sizes[spec.name], "patch_size": cls.patch, **cls.needs(spec)}

    @classmethod
    def most_tokens(cls, spec: ModelSpec) -> int | None:
        """Side of the largest grid of tokens that the model has positions for; None: any."""
        return None

    def optimize(self) -> None:
        """Replace what diffusers computes slower or less precisely; names of parameters stay."""

    def initialize(self) -> None:
        """Initialize weights for training from scratch as the published code does, unlike diffusers."""
        raise NotImplementedError

    def inputs(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> dict[str, Any]:
        """Arguments of ``net``: latents packed as it takes them, its scale of time, its text."""
        raise NotImplementedError

    def velocity(self, output: Tensor, x: Tensor) -> Tensor:
        """What ``net`` returns, unpacked to (B, out_channels, H, W) and towards the noise."""
        return output

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """(B, C, H, W), (B,) time in 0..1000, where 1000 is pure noise, captions to (B, out_channels, H, W)."""
        return self.velocity(self.net(**self.inputs(x, t, conditioning), return_dict=False)[0], x)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks that are compiled, sharded and checkpointed one by one."""
        return self.net.transformer_blocks

    def checkpoint_activations(self, mode: Mode = "blocks") -> None:
        """See ``checkpoint_blocks``."""
        checkpoint_blocks(self.blocks, mode)

    def start_stream(self, tokens: Tensor) -> Tensor:
        """Embedded tokens (B, T, E), contiguous and at least float32, as blocks return them.

        Otherwise the first block would be compiled separately, and each norm would transpose.
        """
        narrow = self.residual == "bf16" and product_dtype(tokens.device) == torch.bfloat16
        tokens = at_least_float32(tokens).contiguous()
        return tokens.bfloat16() if narrow else tokens


def initialize_linear(net: nn.Module) -> None:
    """Xavier for linear layers, zeros for their biases."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def initialize_fused(attention: nn.Module, *names: str) -> None:
    """Xavier for linear layers of a width each as if they were one matrix."""
    gain = (2 / (1 + len(names))) ** 0.5
    for name in names:
        nn.init.xavier_uniform_(attention.get_submodule(name).weight, gain=gain)  # pyright: ignore[reportArgumentType]


def initialize_patches(convolution: Any) -> None:
    """Xavier for a patch embedding, as the linear map that it is."""
    weight = convolution.weight
    nn.init.xavier_uniform_(weight.view(weight.shape[0], -1))


def initialize_embedders(*embedders: nn.Module) -> None:
    """A small standard deviation for the linear layers of embedders of time, size and text."""
    for module in (module for embedder in embedders for module in embedder.modules()):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=EMBEDDING_STD)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Silence what diffusers' optional libraries log during their import."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
