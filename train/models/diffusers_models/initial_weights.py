"""Weights for training from scratch, as the published code has them."""

from __future__ import annotations

from typing import Any

from torch import nn

from .families import Family

FUSED_QKV, FUSED_KV = 2**-0.5, (2 / 3) ** 0.5  # xavier of three or two square matrices in one, of xavier of each
CAPTION_NORM_GAIN = 0.01  # of Sana's norm of captions at the start (y_norm_scale_factor of its configurations)
EMBEDDING_STD = 0.02  # as DiT's embeddings


def initialize_weights(net: Any, family: Family) -> None:
    """Initialise as the published code does, unlike diffusers.

    Both: xavier for linear layers and patches, with queries, keys and values as one matrix, and a standard deviation
    of 0.02 for embedders of time, sizes and captions. PixArt: zeros for the output of the model and of cross-attention.
    Sana: xavier for the output, a gain of 0.01 for the caption norm. Sana's convolutions, and the modulation tables of
    both, keep the defaults of torch and diffusers, which are the published ones.

    Source: ``initialize`` in PixArt-sigma's and NVlabs/Sana's ``PixArtMS.py`` and ``sana_multi_scale.py``.
    """
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for block in net.transformer_blocks:
        for linear in (block.attn1.to_q, block.attn1.to_k, block.attn1.to_v):
            nn.init.xavier_uniform_(linear.weight, gain=FUSED_QKV)
        for linear in (block.attn2.to_k, block.attn2.to_v):
            nn.init.xavier_uniform_(linear.weight, gain=FUSED_KV)
    patch_weight = (net.pos_embed if family == "pixart" else net.patch_embed).proj.weight
    nn.init.xavier_uniform_(patch_weight.view(patch_weight.shape[0], -1))
    times = net.adaln_single if family == "pixart" else net.time_embed
    for module in (*times.modules(), *net.caption_projection.modules()):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=EMBEDDING_STD)
    if family == "sana":
        nn.init.constant_(net.caption_norm.weight, CAPTION_NORM_GAIN)
        return
    for linear in (net.proj_out, *(block.attn2.to_out[0] for block in net.transformer_blocks)):
        nn.init.zeros_(linear.weight)
