"""Stable Diffusion 3 and 3.5: diffusers' transformer, in which captions are a stream of their own, behind the common
call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..activation_checkpointing import Mode, checkpoint_blocks
from ..conditioning import Conditioning
from .families import transformer_class
from .initial_weights import initialize_joint_weights
from .patch_embed import CroppedPatchEmbed, start_stream
from .processors import JointProcessor


class JointDenoiser(nn.Module):
    """A transformer of two streams behind the common call.

    The last block gives no captions, and some have two attentions, so that they compile to two or three graphs.

    Args:
      config: arguments of diffusers' class.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.net = transformer_class("sd3")(**config)
        self.net.pos_embed = CroppedPatchEmbed(self.net.pos_embed)
        for embed in (self.net.pos_embed, self.net.context_embedder):
            embed.register_forward_hook(start_stream)
        for block in self.net.transformer_blocks:
            for attention in (block.attn, block.attn2):
                if attention is not None:
                    attention.set_processor(JointProcessor())
        initialize_joint_weights(self.net)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """(B, C, H, W), (B,) time in 0..1000, where 1000 is pure noise, captions to (B, out_channels, H, W)."""
        return self.net(
            hidden_states=x,
            encoder_hidden_states=conditioning.captions,
            pooled_projections=conditioning.pooled,
            timestep=t,
            return_dict=False,
        )[0]

    def checkpoint_activations(self, mode: Mode = "blocks") -> None:
        """See ``checkpoint_blocks``."""
        checkpoint_blocks(self.blocks, mode)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks that are compiled, sharded and checkpointed one by one."""
        return self.net.transformer_blocks
