"""Pipelines and transformers as a user of diffusers loads them from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
