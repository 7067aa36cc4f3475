"""The adapters of a run as files: for ``load_lora_weights`` of diffusers' pipelines, or as a folder of peft.

PixArt's pipelines and transformer load no adapters; peft does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from safetensors.torch import save as safetensors_of

from ...datasets.disk.hashing import canonical_json
from ...train.models.diffusers.adapters import ADAPTER
from ...train.sampling.snapshot import Snapshot
from ...train.weights import checkpoint

Files = Iterator[tuple[str, Any]]  # relative path, and bytes or an iterable of bytes

PIPELINE_FILE, PIPELINE_PREFIX = "pytorch_lora_weights.safetensors", "transformer."
PEFT_FILE, PEFT_PREFIX = "adapter_model.safetensors", "base_model.model."


def adapter_files(snapshot: Snapshot) -> Files:
    """The adapters, float32, with rank and alpha."""
    spec = snapshot.spec.adapter
    assert spec is not None
    for_pipeline = _pipeline_loads_them(snapshot)
    prefix = PIPELINE_PREFIX if for_pipeline else PEFT_PREFIX
    tensors = {
        prefix + name.removeprefix("net.").replace(f".{ADAPTER}.", "."): tensor
        for name, tensor in checkpoint.read(snapshot.weights_path).read(checkpoint.MODEL).items()
    }
    config = {"r": spec.rank, "lora_alpha": spec.alpha, "target_modules": list(spec.targets)}
    if for_pipeline:
        described = json.dumps({prefix + key: value for key, value in config.items()}, sort_keys=True)
        yield PIPELINE_FILE, safetensors_of(tensors, {"format": "pt", "lora_adapter_metadata": described})
    else:
        base = {"peft_type": "LORA", "base_model_name_or_path": _source(snapshot), "inference_mode": True}
        yield PEFT_FILE, safetensors_of(tensors, {"format": "pt"})
        yield "adapter_config.json", canonical_json(config | base)


def adapter_notes(snapshot: Snapshot, pipeline: str) -> list[str]:
    """How the adapters are loaded, and onto what."""
    load = 'pipeline.load_lora_weights("FOLDER")'
    if not _pipeline_loads_them(snapshot):
        load = 'pipeline.transformer = PeftModel.from_pretrained(pipeline.transformer, "FOLDER").merge_and_unload()'
    source, weights_hash = _source(snapshot), snapshot.state["frozen"]["xxh3_128"]
    notes = [f"Adapters for {pipeline} with the weights of '{source}' (hash {weights_hash}), in float32: {load}"]
    run, _, step = source.rpartition(f"/{checkpoint.SNAPSHOT}-")
    if run and step.isdecimal():
        notes.append(
            f"These weights are a run's, which diffusers and peft do not read: 'leandit export {run} --step {step} "
            "--out FOLDER' makes the pipeline that the adapters are loaded into"
        )
    return notes


def _pipeline_loads_them(snapshot: Snapshot) -> bool:
    return hasattr(type(snapshot.model.net), "load_lora_adapter")


def _source(snapshot: Snapshot) -> str:
    """The weights that the adapters were trained on, as ``model.init_from``."""
    return snapshot.state["frozen"]["source"]
