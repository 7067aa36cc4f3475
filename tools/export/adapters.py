"""The adapters of a run as files: for ``load_lora_weights`` of diffusers' pipelines, or as a folder of peft.

PixArt's pipelines and transformer load no adapters; peft does.
"""

from __future__ import annotations

import json

from safetensors.torch import save as safetensors_of

from ...datasets.disk.hashing import canonical_json
from ...datasets.errors import RunError
from ...train.models.diffusers_models.adapters import ADAPTER
from ...train.sampling.snapshot import Snapshot
from ...train.weights import checkpoint
from .export_card import Files, pipeline_class

PIPELINE_FILE, PIPELINE_PREFIX, PIPELINE_CONFIG = (
    "pytorch_lora_weights.safetensors",
    "transformer.",
    "lora_adapter_metadata",
)
PEFT_FILE, PEFT_PREFIX, PEFT_CONFIG = "adapter_model.safetensors", "base_model.model.", "adapter_config.json"


def check_adapters(snapshot: Snapshot, *, merged: bool, encoders: bool) -> bool:
    """Whether adapters are written, not a model.

    Raises: RunError: the options do not fit the run.
    """
    if merged and not snapshot.spec.adapter:
        raise RunError(f"--merged: run '{snapshot.path.parent}' has no adapters. Leave it out.")
    if encoders and snapshot.spec.adapter and not merged:
        raise RunError("--encoders: adapters are a file beside a pipeline. Use --merged to write a whole one.")
    return bool(snapshot.spec.adapter) and not merged


def adapter_files(snapshot: Snapshot) -> Files:
    """The adapters, float32, with rank and alpha."""
    spec = snapshot.spec.adapter
    assert spec is not None
    config = {"r": spec.rank, "lora_alpha": spec.alpha, "target_modules": list(spec.targets)}
    tensors = {
        name.removeprefix("net.").replace(f".{ADAPTER}.", "."): tensor
        for name, tensor in checkpoint.read(snapshot.weights_path).read(checkpoint.MODEL).items()
    }
    if pipeline_loads(snapshot):
        prefixed = {PIPELINE_PREFIX + name: tensor for name, tensor in tensors.items()}
        described = json.dumps({PIPELINE_PREFIX + key: value for key, value in config.items()}, sort_keys=True)
        yield PIPELINE_FILE, safetensors_of(prefixed, {"format": "pt", PIPELINE_CONFIG: described})
        return
    prefixed = {PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}
    yield PEFT_FILE, safetensors_of(prefixed, {"format": "pt"})
    about = {"peft_type": "LORA", "base_model_name_or_path": source_of(snapshot), "inference_mode": True}
    yield PEFT_CONFIG, canonical_json(config | about)


def adapter_notes(snapshot: Snapshot) -> list[str]:
    """How the adapters are loaded, and onto what."""
    load = 'pipeline.load_lora_weights("FOLDER")'
    if not pipeline_loads(snapshot):
        load = 'pipeline.transformer = PeftModel.from_pretrained(pipeline.transformer, "FOLDER").merge_and_unload()'
    source = source_of(snapshot)
    notes = [
        f"Adapters for {pipeline_class(snapshot)} with the weights of '{source}' (hash "
        f"{snapshot.state['frozen']['xxh3_128']}), in float32: {load}"
    ]
    run, _, step = source.rpartition(f"/{checkpoint.SNAPSHOT}-")
    if run and step.isdecimal():
        notes.append(
            f"These weights are a run's, which diffusers and peft do not read: 'leandit export {run} --step {step} "
            "--out FOLDER' makes the pipeline that the adapters are loaded into"
        )
    return notes


def pipeline_loads(snapshot: Snapshot) -> bool:
    """Whether diffusers loads adapters into this transformer."""
    return hasattr(type(snapshot.model.net), "load_lora_adapter")


def source_of(snapshot: Snapshot) -> str:
    """The weights that the adapters were trained on, as ``model.init_from``."""
    return snapshot.state["frozen"]["source"]
