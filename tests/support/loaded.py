"""Pipelines and transformers as a user of diffusers loads them from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leandit.datasets.batches.captions import Captions


def load_pipeline(name: str, folder: Path, **parts: Any) -> Any:
    import diffusers

    pipeline = getattr(diffusers, name).from_pretrained(folder, low_cpu_mem_usage=False, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_transformer(name: str, folder: Path) -> Any:
    """The class of diffusers, loaded fresh; no key is missing and none too many."""
    import diffusers

    model, loading = getattr(diffusers, name).from_pretrained(
        folder, subfolder="transformer", low_cpu_mem_usage=False, output_loading_info=True
    )
    assert {key: value for key, value in loading.items() if value} == {}
    return model.eval()


def forward(model: Any, x: Tensor, t: Tensor, given: Any) -> Tensor:
    """The output of a transformer of diffusers for our ``Conditioning`` on captions."""
    kind, captions = type(model).__name__, given.captions
    packed = isinstance(captions, Captions)
    more: dict[str, Any] = {"encoder_attention_mask": captions.mask.float()} if packed else {}
    if "SD3" in kind:
        more = {"pooled_projections": given.pooled}
    elif "PixArt" in kind:
        more["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    with torch.no_grad():
        return model(
            hidden_states=x, encoder_hidden_states=captions.padded if packed else captions, timestep=t, **more
        ).sample
