"""``leandit export``: a snapshot as a folder that diffusers' pipelines load, or as files in DiT's official layout.

The folder's index names the other parts of a pipeline (VAE, text encoder, tokenizer). They are copied only on request,
and only if they are the ones that made the store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save as safetensors_of

from ...datasets.disk.files import write_folder
from ...datasets.disk.hashing import canonical_json, read_json
from ...datasets.disk.strays import sweep_beside
from ...datasets.disk.weight_files import index_name, weight_names
from ...datasets.format.schema import UNKNOWN
from ...errors import EncoderError, RecipeError, RunError
from ...precompute.encoders.model_files import TEXT_WEIGHTS, VAE_WEIGHTS, weight_files
from ...recipe import parse_stored
from ...train.models.build import FAMILIES, family_of
from ...train.models.diffusers.adapters import ADAPTER, UP
from ...train.models.diffusers.model import DiffusersModel
from ...train.models.dit import size_of
from ...train.models.spec import ModelSpec
from ...train.sampling.schedulers import pipeline_scheduler
from ...train.sampling.snapshot import Snapshot, Weights, load_snapshot
from ...train.techniques.registry import ObjectiveSection
from ...train.weights import checkpoint
from ...train.weights.folders import RECIPE, SNAPSHOT, STATE, find
from ...train.weights.published import official_bytes, to_diffusers
from .cards import CARD, model_card
from .compatibility import (
    NULL_LABEL,
    adapter_notes,
    compatibility_notes,
    decoded_normalisation,
    drawn_side,
    drawn_tokens,
    loads_adapters,
    obstacle,
    pipeline_class,
    text_parts,
    vae_class,
)
from .decoding import vae_config

Layout = Literal["diffusers", "official"]
Files = Iterator[tuple[str, Any]]  # relative path, and bytes or an iterable of bytes

CHAT_TEMPLATE = "chat_template.jinja"  # pipelines apply it; captions were encoded with the text of the recipe
PART_BYTES = 1 << 24
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def export(
    run: Path,
    out: Path,
    *,
    layout: Layout = "diffusers",
    step: int = 0,
    encoders: bool = False,
    vae: str | None = None,
    text: str | None = None,
    merged: bool = False,
    base: str = "",
    weights: Weights = "averaged",
) -> dict:
    """Write the weights of a run for other programs; the folder appears complete or not at all.

    Args:
      run: or a folder that ``leandit average`` has made.
      layout: "diffusers": the folder of a pipeline; "official": DiT's `.safetensors` and `.pt`.
      step: of the snapshot; 0: the newest.
      encoders: also copy the VAE, text encoder and tokenizer of the store.
      vae, text: their current location: folder or hub id.
      merged: of a run with adapters: its model with the adapters merged into the weights, instead of the adapters.
      base: current location of the weights that the adapters were trained on.
      weights: averaged or raw.
    Returns: what was written, as plain values.
    Raises: RunError: the layout cannot hold the model, or the folder exists; EncoderError: an encoder cannot be found.
    """
    if out.exists():
        raise RunError(f"folder '{out}': it already exists. Use another --out.")
    snapshot = load_snapshot(run, torch.device("cpu"), step, frozen=base, weights=weights)
    is_pipeline, adapter = layout == "diffusers", snapshot.spec.adapter
    is_adapters = is_pipeline and adapter is not None and not merged
    if not is_adapters and (problem := obstacle(layout, snapshot.spec, snapshot.objective, snapshot.state)):
        raise RunError(problem)
    if not is_pipeline and encoders:
        raise RunError("--encoders: the official layout holds only the model. Use --format diffusers.")
    if is_pipeline and merged and not adapter:
        raise RunError(f"--merged: run '{snapshot.path.parent}' has no adapters. Leave it out.")
    if is_adapters and encoders:
        raise RunError("--encoders: adapters are saved without a pipeline. Use --merged to write a whole one.")
    copies = dict[str, Path]()
    decoder = b""
    if is_adapters:
        files = adapter_files(snapshot)
    elif is_pipeline:
        if encoders:
            copies = encoder_folders(snapshot, vae, text)
            normalisation = decoded_normalisation(snapshot)
            decoder = vae_config(copies["vae"], snapshot.latent, normalisation, pipeline_class(snapshot))
        files = diffusers_files(snapshot, copies, decoder)
    else:
        files = official_files(snapshot)
    pipeline = pipeline_class(snapshot) if is_pipeline else None
    notes = [snapshot.warning] if snapshot.warning else []
    notes += adapter_notes(snapshot) if is_adapters else []
    notes += compatibility_notes(snapshot, has_vae=encoders) if is_pipeline else []
    card = model_card(
        snapshot.spec.name,
        snapshot.state,
        weights=f"{snapshot.weights}, {snapshot.weights_path.name}",
        layout=f"diffusers, for {pipeline}" if pipeline else layout,
        is_pipeline=is_pipeline,
        notes=notes,
        recipe=(run / RECIPE).read_text() if (run / RECIPE).is_file() else "",
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    sweep_beside(out)
    if not write_folder(out, itertools.chain(files, [(CARD, card)]), replace=False):
        raise RunError(f"folder '{out}': another process created it. Use another --out.")
    return {
        "snapshot": snapshot.path.name,
        "step": snapshot.step,
        "weights": snapshot.weights,
        "format": "adapters" if is_adapters else layout,
        "pipeline": pipeline,
        "files": sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()),
        "notes": notes,
        "out": str(out),
    }


def fitting_layout(run: Path) -> Layout | None:
    """The layout that holds the newest snapshot of a run: diffusers' if it does, else the official one; None: neither.

    Raises: IndexError: there is no snapshot.
    """
    state = read_json(find(SNAPSHOT, run)[-1] / STATE)
    spec = ModelSpec.model_validate(state["spec"])
    objective, _ = parse_stored("objective", ObjectiveSection, state["objective"])
    if spec.adapter or not obstacle("diffusers", spec, objective, state):
        return "diffusers"
    return None if obstacle("official", spec, objective, state) else "official"


def official_files(snapshot: Snapshot) -> Files:
    """The model alone, for ``model.init_from`` and for the trainers of DiT."""
    name = snapshot.spec.name.replace("/", "-")
    side = drawn_tokens(snapshot.spec, snapshot.state)
    for suffix in (".safetensors", ".pt"):
        yield f"{name}{suffix}", official_bytes(snapshot.model.state_dict(), suffix, side=side)


def adapter_files(snapshot: Snapshot) -> Files:
    """The adapters, float32: for ``load_lora_weights`` of a pipeline, or as a folder of peft.

    B contains the factor alpha / rank, so that alpha equals the rank. ComfyUI, kohya's scripts and others look for
    alpha in tensors of the file, not in diffusers' metadata or peft's config, and without one add B A as it is.
    """
    spec = snapshot.spec.adapter
    assert spec is not None
    for_pipeline = loads_adapters(snapshot)
    prefix = "transformer." if for_pipeline else "base_model.model."
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint.read(snapshot.weights_path).read(checkpoint.MODEL).items():
        factor = spec.scale if name.endswith(UP) else 1.0
        tensors[prefix + name.removeprefix("net.").replace(f".{ADAPTER}.", ".")] = factor * tensor
    config = {"r": spec.rank, "lora_alpha": spec.rank, "target_modules": list(spec.targets)}
    if for_pipeline:
        described = json.dumps({prefix + key: value for key, value in config.items()}, sort_keys=True)
        metadata = {"format": "pt", "lora_adapter_metadata": described}
        yield "pytorch_lora_weights.safetensors", safetensors_of(tensors, metadata)
    else:
        source = snapshot.state["frozen"]["source"]
        base = {"peft_type": "LORA", "base_model_name_or_path": source, "inference_mode": True}
        yield "adapter_model.safetensors", safetensors_of(tensors, {"format": "pt"})
        yield "adapter_config.json", canonical_json(config | base)


def diffusers_files(snapshot: Snapshot, copies: Mapping[str, Path], vae: bytes) -> Files:
    """The files of a pipeline's folder.

    Args:
      copies: folders of encoders by their names in the pipeline.
      vae: config.json of the VAE, if it is copied.
    """
    family = family_of(snapshot.spec.name)
    takes_flow = family is not None and FAMILIES[family].samples_flows
    scheduler = pipeline_scheduler(
        snapshot.spec, snapshot.objective, snapshot.sample_shift, takes_flow_match=takes_flow
    )
    config, weights = transformer_of(snapshot)
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    yield "transformer/config.json", canonical_json(config)
    yield "transformer/diffusion_pytorch_model.safetensors", safetensors_of(weights, {"format": "pt"})
    yield "scheduler/scheduler_config.json", canonical_json(scheduler)
    yield "model_index.json", canonical_json(index_of(snapshot, scheduler["_class_name"], copies))
    for name, folder in copies.items():
        if name == "vae":
            yield "vae/config.json", vae
        for path in _copied_files(name, folder):
            yield f"{name}/{path.name}", _parts_of(path)


def _copied_files(name: str, folder: Path) -> list[Path]:
    """The files of a part of a pipeline to copy: of its weights only those that its library loads.

    Args:
      name: of the part, in the pipeline.
      folder: that may also hold other parts, variants of the weights, and files of an earlier save.
    """
    files = {path for pattern in MODEL_FILES for path in folder.glob(pattern)}
    others = {path for path in files if not path.name.endswith((".safetensors", ".safetensors.index.json"))}
    if name.startswith("tokenizer"):
        return sorted(others - {folder / "config.json"})
    stem = VAE_WEIGHTS if name == "vae" else TEXT_WEIGHTS
    weights = weight_files(folder, stem, what=f"--encoders: {name}")
    index = {folder / index_name(stem)} if weights != [folder / f"{stem}.safetensors"] else set()
    written = {folder / "config.json"} if name == "vae" else set()
    return sorted({*others, *weights, *index} - written)


def _parts_of(path: Path) -> Iterator[bytes]:
    """The content of a file that may be larger than memory."""
    with open(path, "rb") as file:
        while part := file.read(PART_BYTES):
            yield part


def transformer_of(snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and weights of diffusers' class."""
    from diffusers import __version__ as diffusers_version

    model, spec = snapshot.model, snapshot.spec
    weights = {name.removeprefix("net."): t.detach().cpu() for name, t in model.state_dict().items()}
    if isinstance(model, DiffusersModel):
        config = {key: value for key, value in model.net.config.items() if not key.startswith("_")}
        config = model.config_to_draw(config, drawn_side(snapshot.state))
    else:
        depth, width, heads, patch = size_of(spec.name)
        weights = to_diffusers(weights, NULL_LABEL)
        config = {
            "num_layers": depth,
            "num_attention_heads": heads,
            "attention_head_dim": width // heads,
            "in_channels": spec.channels,
            "out_channels": spec.out_channels,
            "patch_size": patch,
            "sample_size": spec.base_size,
            "num_embeds_ada_norm": NULL_LABEL,
            "norm_type": "ada_norm_zero",
            "norm_elementwise_affine": False,
            "norm_eps": 1e-6,  # the official value; the class uses it in one of a block's norms only if it is set
            "activation_fn": "gelu-approximate",
            "attention_bias": True,
        }
    return {"_class_name": _transformer_class(snapshot), "_diffusers_version": diffusers_version, **config}, weights


def _transformer_class(snapshot: Snapshot) -> str:
    model = snapshot.model
    return type(model.net).__name__ if isinstance(model, DiffusersModel) else "DiTTransformer2DModel"


def index_of(snapshot: Snapshot, scheduler: str, copies: Mapping[str, Path]) -> dict[str, Any]:
    """``model_index.json``: the pipeline, and the class of each part.

    Args:
      copies: folders of encoders by their names in the index.
    """
    from diffusers import __version__ as diffusers_version

    spec = snapshot.spec
    vae = _named_class(copies.get("vae"), "config.json", "_class_name") or vae_class(snapshot)
    classes = {"transformer": _transformer_class(snapshot), "scheduler": scheduler, "vae": vae}
    parts: dict[str, Any] = {name: ["diffusers", class_name] for name, class_name in classes.items()}
    if family := family_of(spec.name):
        by_kind = FAMILIES[family].text_classes
        for (suffix, made), classes in zip(text_parts(snapshot).items(), by_kind, strict=True):
            encoder, tokenizer = classes[made["model"]["kind"]]
            parts[f"text_encoder{suffix}"] = ["transformers", encoder]
            name = f"tokenizer{suffix}"
            named = _named_class(copies.get(name), "tokenizer_config.json", "tokenizer_class")
            parts[name] = ["transformers", named or tokenizer]
    else:
        parts["id2label"] = {str(number): name for number, name in enumerate(snapshot.class_names.names)}
    return {"_class_name": pipeline_class(snapshot), "_diffusers_version": diffusers_version, **parts}


def _named_class(folder: Path | None, file: str, key: str) -> str | None:
    """The class that a JSON file of a copied part names, if any."""
    path = folder and folder / file
    config = read_json(path) if path and path.is_file() else None
    name = config.get(key) if isinstance(config, dict) else None
    return name if isinstance(name, str) and name.isidentifier() else None


def encoder_folders(snapshot: Snapshot, vae_place: str | None, text_place: str | None) -> dict[str, Path]:
    """Folders of the store's encoders, by their names in a pipeline's folder.

    Args:
      vae_place, text_place: their current location, if they have moved.
    Raises: EncoderError: one cannot be found, or did not make the store.
    """
    from ...precompute.config import TextSection, VaeSection
    from ...precompute.encoders import model_files as files

    vae, texts = snapshot.state["vae"], text_parts(snapshot) if snapshot.spec.takes_text else {}
    moved = {"vae": vae_place, "text": text_place}
    # Name, section of the recipe, subfolder, stem of the weights ("": a tokenizer), and their hash.
    wanted: list[tuple[str, VaeSection | TextSection, str, str, str]] = []
    try:
        section, _ = parse_stored("vae", VaeSection, vae["model"] | ({"model": vae_place} if vae_place else {}))
        wanted.append(("vae", section, section.subfolder, files.VAE_WEIGHTS, vae["weights_sha256"]))
        for suffix, text in texts.items():
            section, _ = parse_stored(
                "text", TextSection, text["model"] | ({"model": text_place} if text_place else {})
            )
            made_with = text["weights_sha256"]
            wanted.append((f"text_encoder{suffix}", section, section.subfolder, files.TEXT_WEIGHTS, made_with))
            wanted.append((f"tokenizer{suffix}", section, section.tokenizer_subfolder, "", UNKNOWN))
    except (RecipeError, TypeError) as error:
        raise EncoderError(f"snapshot '{snapshot.path}': it does not name its encoders ({error}).") from error
    folders: dict[str, Path] = {}
    for name, section, subfolder, stem, made_with in wanted:
        what, role = f"--encoders: {name}", "vae" if name == "vae" else "text"
        names = (files.CONFIG, *weight_names(stem)) if stem else (*files.TOKENIZER_FILES, CHAT_TEMPLATE)
        try:
            with contextlib.nullcontext() if moved[role] else files.nothing_fetched():
                folder, _ = files.resolve_model(section.model, subfolder, section.revision, files=names, what=what)
            weights = files.hash_files(files.weight_files(folder, stem, what=what)) if stem else UNKNOWN
        except EncoderError as error:
            raise EncoderError(f"{error} If it is in another folder, pass it with --{role}.") from error
        if made_with not in (UNKNOWN, weights):
            raise EncoderError(f"{what} '{folder}': not the one that made the store. Check --{role}.")
        folders[name] = folder
    return folders
