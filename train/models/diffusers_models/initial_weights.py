"""Weights for training from scratch, as the published code has them."""

from __future__ import annotations

from typing import Any

from torch import nn

from .families import Family

FUSED_QKV, FUSED_KV = 2**-0.5, (2 / 3) ** 0.5  # xavier of three or two square matrices in one, of xavier of each
CAPTION_NORM_GAIN = 0.01  # of Sana's norm of captions at the start (y_norm_scale_factor of its configurations)
EMBEDDING_STD = 0.02  # as DiT's embeddings


def initialize_joint_weights(net: Any) -> None:
    """Initialise a Stable Diffusion 3, whose trainer is not published, as DiT.

    Xavier for linear layers and patches, with the queries, keys and values of a stream as one matrix; a standard
    deviation of 0.02 for embedders of time and pooled captions; zeros for modulations and the output.

    Source: Peebles and Xie 2022 (DiT), ``initialize_weights`` in its ``models.py``.
    """
    _initialize_linear(net)
    for block in net.transformer_blocks:
        streams = [(block.attn, ("to_q", "to_k", "to_v")), (block.attn, ("add_q_proj", "add_k_proj", "add_v_proj"))]
        streams += [(block.attn2, ("to_q", "to_k", "to_v"))] if block.attn2 is not None else []
        for attention, names in streams:
            for name in names:
                nn.init.xavier_uniform_(getattr(attention, name).weight, gain=FUSED_QKV)
        nn.init.zeros_(block.norm1.linear.weight)
        nn.init.zeros_(block.norm1_context.linear.weight)
    _initialize_patches(net.pos_embed.proj)
    for module in net.time_text_embed.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=EMBEDDING_STD)
    nn.init.zeros_(net.norm_out.linear.weight)
    nn.init.zeros_(net.proj_out.weight)


def _initialize_linear(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _initialize_patches(convolution: Any) -> None:
    weight = convolution.weight
    nn.init.xavier_uniform_(weight.view(weight.shape[0], -1))


def initialize_weights(net: Any, family: Family) -> None:
    """Initialise as the published code does, unlike diffusers.

    Both: xavier for linear layers and patches, with queries, keys and values as one matrix, and a standard deviation
    of 0.02 for embedders of time, sizes and captions. PixArt: zeros for the output of the model and of cross-attention.
    Sana: xavier for the output, a gain of 0.01 for the caption norm. Sana's convolutions, and the modulation tables of
    both, keep the defaults of torch and diffusers, which are the published ones.

    Source: ``initialize`` in PixArt-sigma's and NVlabs/Sana's ``PixArtMS.py`` and ``sana_multi_scale.py``.
    """
    _initialize_linear(net)
    for block in net.transformer_blocks:
        for linear in (block.attn1.to_q, block.attn1.to_k, block.attn1.to_v):
            nn.init.xavier_uniform_(linear.weight, gain=FUSED_QKV)
        for linear in (block.attn2.to_k, block.attn2.to_v):
            nn.init.xavier_uniform_(linear.weight, gain=FUSED_KV)
    _initialize_patches((net.pos_embed if family == "pixart" else net.patch_embed).proj)
    times = net.adaln_single if family == "pixart" else net.time_embed
    for module in (*times.modules(), *net.caption_projection.modules()):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=EMBEDDING_STD)
    if family == "sana":
        nn.init.constant_(net.caption_norm.weight, CAPTION_NORM_GAIN)
        return
    for linear in (net.proj_out, *(block.attn2.to_out[0] for block in net.transformer_blocks)):
        nn.init.zeros_(linear.weight)
