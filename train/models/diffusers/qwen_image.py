"""Qwen-Image (arXiv 2508.02324): blocks of two streams over the valid tokens of a vision-language model's captions.

Its trainer is not published: first weights are as DiT's.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor

from ...objectives.shift import TimeShift
from ..conditioning import Conditioning
from ..spec import ModelSpec
from .model import (
    TWO_STREAMS,
    Config,
    DiffusersModel,
    initialize,
    keep_streams,
    pack,
    pack_all,
    stream_projections,
    unpack,
)


def size(depth: int, heads: int, axes: tuple[int, int, int]) -> Config:
    """The arguments of a size; ``axes``: numbers of a head that turn with frame, row and column."""
    return {
        "num_layers": depth,
        "num_attention_heads": heads,
        "attention_head_dim": sum(axes),
        "axes_dims_rope": list(axes),
    }


class QwenImage(DiffusersModel):
    """Qwen-Image."""

    transformer_class, pipeline_class = "transformer_qwenimage.QwenImageTransformer2DModel", "QwenImagePipeline"
    family, recipe, patch, is_flow = "qwen-image", "qwen-image-1024", 2, True
    sizes = {"qwen-image": size(60, 24, (16, 56, 56)), "qwen-image-tiny": size(4, 4, (8, 12, 12))}  # noqa: RUF012
    text_classes = ({"causal_lm": ("Qwen2_5_VLForConditionalGeneration", "Qwen2Tokenizer")},)
    roles = {  # noqa: RUF012
        "hidden": ("*.attn.*", "*.img_mlp.*", "*.txt_mlp.*"),
        "modulation": ("*.img_mod.1", "*.txt_mod.1", "norm_out.linear"),
        "embedding": ("img_in", "txt_in", "time_text_embed.*"),
        "head": ("proj_out",),
    }
    text_width, vae, normalisation = 3584, "AutoencoderKLQwenImage", "mean and std"
    adapted = TWO_STREAMS
    takes_reference = True
    resolution_shift = TimeShift(rule="tokens", most=0.9, most_tokens=8192, terminal=0.02)
    pads_null = False
    guidance_argument = 'true_cfg_scale=G, negative_prompt=""'

    @classmethod
    def needs(cls, spec: ModelSpec) -> Config:
        channels = {"in_channels": 4 * spec.channels, "out_channels": spec.out_channels}
        return channels | {"joint_attention_dim": spec.caption_width}

    def optimize(self) -> None:
        net = cast(Any, self.net)
        keep_streams(self, net.img_in, net.txt_in)
        net.pos_embed.forward = MethodType(rotations, net.pos_embed)
        # The last block's captions are not read. With a gradient of zero for its weights, DDP needs no search for them.
        last = net.transformer_blocks[-1]
        last.register_forward_hook(lambda _, inputs, out: (out[0], out[1] + 0 * out[0].mean(1, keepdim=True)))

    def initialize_weights(self) -> None:
        """Zeros for modulations and the output."""
        net = cast(Any, self.net)
        fused = stream_projections(net.transformer_blocks)
        initialize(net, fused, net.img_in, [net.time_text_embed], self.zeroed)

    def inputs(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Config:
        captions, images = conditioning.valid_captions, conditioning.images(x)
        return {
            "hidden_states": pack_all(images),
            "timestep": t / 1000,
            "encoder_hidden_states": captions.padded,
            "encoder_hidden_states_mask": captions.mask,
            "img_shapes": [[(1, x.shape[2] // 2, x.shape[3] // 2)] * len(images)] * len(x),
        }

    def velocity(self, output: Any, x: Tensor) -> Tensor:
        return unpack(output, x)

    @classmethod
    def rescale_guided(cls, guided: Tensor, conditional: Tensor) -> Tensor:
        """Give the velocity of each token the norm that it has without guidance, as QwenImagePipeline does."""
        tokens = pack(guided)
        norms = [packed.norm(dim=-1, keepdim=True) for packed in (pack(conditional), tokens)]
        return unpack(tokens * (norms[0] / norms[1]), guided)


def rotations(
    self: Any, shapes: list[list[tuple[int, int, int]]], device: torch.device, max_txt_seq_len: int
) -> tuple[Tensor, Tensor]:
    """diffusers' rotations of image tokens (T, d / 2) and caption tokens (L, d / 2), complex64, for any device.

    diffusers makes its table on the CPU when the model is built, so a model on the meta device would have none.
    Rows and columns are counted from the center of an image; captions go on behind its larger half. All images have the
    size of the first.
    """
    _, rows, columns = shapes[0][0]
    halves = [torch.arange(side, device=device) - (side - side // 2) for side in (rows, columns)]
    numbers = [halves[0].new_full((1,), number) for number in range(len(shapes[0]))]
    places = torch.cat([torch.cartesian_prod(number, *halves) for number in numbers])
    text = torch.arange(max_txt_seq_len, device=device) + max(rows // 2, columns // 2)

    def turned(places: Tensor) -> Tensor:
        angles = []
        for axis, width in zip(places.unbind(1), self.axes_dim, strict=True):
            steps = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
            angles.append(torch.outer(axis.float(), 1.0 / self.theta**steps))
        angle = torch.cat(angles, dim=1)
        return torch.polar(torch.ones_like(angle), angle)

    return turned(places), turned(text[:, None].expand(-1, 3))
