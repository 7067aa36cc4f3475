"""Z-Image (Tongyi-MAI 2025, arXiv 2511.22699): one stream of image and caption tokens, padding unread.

Its time runs the other way, from 0 at the noise to 1 at the image, and so does its velocity. Its trainer is not
published: first weights are as DiT's.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...objectives.shift import TimeShift
from ..conditioning import Conditioning
from ..spec import ModelSpec
from .model import ATTENTION, Config, DiffusersModel, initialize, keep_streams

STEP = 32  # image and caption are padded to a multiple of so many tokens


def size(depth: int, heads: int, axes: tuple[int, int, int], *, refiners: int = 2) -> Config:
    """The arguments of a size.

    Args:
      axes: numbers of a head that turn with place in the caption, row and column; their sum is the width of a head.
      refiners: blocks over image and captions alone, before the others.
    """
    return {
        "n_layers": depth,
        "n_refiner_layers": refiners,
        "n_heads": heads,
        "n_kv_heads": heads,
        "dim": heads * sum(axes),
        "axes_dims": list(axes),
    }


class ZImage(DiffusersModel):
    """Z-Image."""

    transformer_class, pipeline_class = "transformer_z_image.ZImageTransformer2DModel", "ZImagePipeline"
    family, recipe, patch, is_flow = "z-image", "z-image-1024", 2, True
    sizes = {  # noqa: RUF012
        "z-image": size(30, 30, (32, 48, 48)),
        "z-image-tiny": size(4, 4, (8, 12, 12), refiners=1),
    }
    text_classes = ({"causal_lm": ("Qwen3Model", "Qwen2Tokenizer")},)
    text_width = 2560
    caption_multiple = STEP
    roles = {  # noqa: RUF012
        "hidden": ("*.attention.to_*", "*.feed_forward.*"),
        "modulation": ("*.adaLN_modulation.*",),
        "embedding": ("all_x_embedder.*", "cap_embedder.*", "t_embedder.*"),
        "head": ("all_final_layer.*.linear",),
    }
    resolution_shift = TimeShift(rule="tokens")
    pads_null = False
    guidance_argument = "guidance_scale=G - 1"
    adapted = tuple(f"attention.{name}" for name in ATTENTION)

    @classmethod
    def needs(cls, spec: ModelSpec) -> Config:
        return {"in_channels": spec.channels, "cap_feat_dim": spec.caption_width}

    @classmethod
    def config(cls, spec: ModelSpec) -> Config:
        return {**cls.sizes[spec.name], **cls.needs(spec), "all_patch_size": [cls.patch]}

    def optimize(self) -> None:
        keep_streams(self)  # padding, which is float32, would widen the first

    def initialize_weights(self) -> None:
        """Zeros for modulations and the output."""
        net = cast(Any, self.net)
        (patches,) = net.all_x_embedder.values()
        fused = [(block.attention, ATTENTION[:3]) for block in cast(Any, self.blocks)]
        initialize(net, fused, patches, [net.t_embedder], self.zeroed)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The forward of diffusers, for a batch: the same operations for any number of images."""
        net, captions = cast(Any, self.net), conditioning.valid_captions
        (patches,), (last,) = net.all_x_embedder.values(), net.all_final_layer.values()
        rows, columns = x.shape[2] // self.patch, x.shape[3] // self.patch
        time = net.t_embedder((1000 - t) / 1000 * net.t_scale)
        images = padded(patches(_tokens_of(x)), net.x_pad_token)
        # Places: captions count from 1, in whole padding; an image has the next one, and padding is at the origin.
        lengths = padded_length(captions.offsets.diff())
        text = padded(net.cap_embedder(captions.padded.float()), net.cap_pad_token, captions.mask)
        numbers = torch.arange(text.shape[1], device=x.device)
        grid = torch.cartesian_prod(numbers[:1], *(torch.arange(side, device=x.device) for side in (rows, columns)))
        grid = grid + torch.stack([lengths + 1, lengths * 0, lengths * 0], dim=1)[:, None]  # (B, T, 3)
        image_turns = self.rotations(padded(grid, grid.new_zeros(3)))
        text_turns = self.rotations(F.pad(numbers[:, None] + 1, (0, 2)).expand(len(x), -1, -1))
        is_ragged = len({padded_length(length) for length in captions.lengths}) > 1
        mask = numbers < lengths[:, None] if is_ragged else None
        for block in net.noise_refiner:
            images = block(images, None, image_turns, time)
        for block in net.context_refiner:
            text = block(text, mask, text_turns)
        tokens, turns = torch.cat([images, text], dim=1), torch.cat([image_turns, text_turns], dim=1)
        mask = None if mask is None else F.pad(mask, (images.shape[1], 0), value=True)
        for block in net.layers:
            tokens = block(tokens, mask, turns, time)
        output = last(tokens, time)[:, : rows * columns].unflatten(2, (self.patch, self.patch, -1))
        return -output.unflatten(1, (rows, columns)).permute(0, 5, 1, 3, 2, 4).reshape(x.shape)

    def rotations(self, places: Tensor) -> Tensor:
        """(B, N, 3) places to (B, N, d / 2) complex64, as in ``RopeEmbedder``, whose table is on the CPU."""
        angles = []
        for axis, width in enumerate(self.net.axes_dims):
            steps = torch.arange(0, width, 2, device=places.device, dtype=torch.float64) / width
            angles.append(places[..., axis, None].double() / self.net.rope_theta**steps)
        angle = torch.cat(angles, dim=2).float()
        return torch.polar(torch.ones_like(angle), angle)

    @property
    def blocks(self) -> nn.ModuleList:
        return nn.ModuleList([*self.net.noise_refiner, *self.net.context_refiner, *self.net.layers])


def _tokens_of(x: Tensor) -> Tensor:
    """(B, C, H, W) to (B, H/2 * W/2, 4C), with the channels of a position beside each other."""
    squares = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # (B, C, rows, 2, columns, 2)
    return squares.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def padded_length(length: Any) -> Any:
    """The least multiple of ``STEP`` that holds so many tokens."""
    return (length + STEP - 1) // STEP * STEP


def padded(tokens: Tensor, padding: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B, N, E) with ``padding`` (E,) up to a multiple of ``STEP`` tokens, and where ``mask`` (B, N) is false."""
    count = tokens.shape[1]
    if mask is not None:
        tokens = torch.where(mask[..., None], tokens, padding)
    more = padding.expand(len(tokens), padded_length(count) - count, -1)
    return torch.cat([tokens, more.to(tokens.dtype)], dim=1)
