"""``leandit export``: a snapshot as a folder that diffusers' pipelines load, or as files in DiT's official layout.

The folder's index names the other parts of a pipeline (VAE, text encoder, tokenizer). They are copied only on request,
and only if they are the ones that made the store.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from safetensors.torch import save as safetensors_of

from ...datasets.disk.files import write_folder
from ...datasets.disk.hashing import canonical_json, read_json
from ...datasets.disk.strays import sweep_strays
from ...datasets.errors import EncoderError, RunError
from ...datasets.format.schema import UNKNOWN
from ...train.models.build import DiTDenoiser
from ...train.models.diffusers.families import family_of
from ...train.models.dit import size_of
from ...train.models.layers import DiTOptions
from ...train.models.spec import ModelSpec
from ...train.objective_recipe import ObjectiveSection
from ...train.sampling.schedulers import pipeline_scheduler
from ...train.sampling.snapshot import Snapshot, Weights, load_snapshot, text_encoders
from ...train.weights.folders import RECIPE, SNAPSHOT, STATE, find
from ...train.weights.published import official_bytes, to_diffusers
from .adapters import Files, adapter_files, adapter_notes
from .cards import CARD, model_card, model_rows
from .compatibility import FLOW_PIPELINES, NULL_LABEL, compatibility_notes, pipeline_class, vae_class

Layout = Literal["diffusers", "official"]

TRANSFORMER = ("transformer/config.json", "transformer/diffusion_pytorch_model.safetensors")
PART_BYTES = 1 << 24
NO_TOKENIZER = ("*.safetensors", "config.json", "*.index.json")
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt")
TEXT_CLASSES = {"t5": ("T5EncoderModel", "T5Tokenizer"), "gemma2": ("Gemma2Model", "GemmaTokenizer")}
SD3_CLASSES = TEXT_CLASSES | {"clip": ("CLIPTextModelWithProjection", "CLIPTokenizer")}
SD3_KINDS = ["clip", "clip", "t5"]


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
        raise RunError(f"folder '{out}': it already exists. Give another --out.")
    snapshot = load_snapshot(run, torch.device("cpu"), step, frozen=base, weights=weights)
    kind, pipeline, notes = str(layout), pipeline_class(snapshot) if layout == "diffusers" else None, list[str]()
    if pipeline is None:
        check_official(snapshot.spec, encoders=encoders)
        files = official_files(snapshot)
    elif merged and not snapshot.spec.adapter:
        raise RunError(f"--merged: run '{snapshot.path.parent}' has no adapters. Leave it out.")
    elif snapshot.spec.adapter and not merged:
        if encoders:
            raise RunError("--encoders: adapters are a file beside a pipeline. Use --merged to write a whole one.")
        kind, files = "adapters", adapter_files(snapshot)
        notes = [*adapter_notes(snapshot, pipeline), *compatibility_notes(snapshot)]
    else:
        check_diffusers(snapshot.spec, snapshot.objective, snapshot.state)
        files = diffusers_files(snapshot, encoder_folders(snapshot, vae, text) if encoders else {})
        notes = compatibility_notes(snapshot)
    notes = [*([snapshot.warning] if snapshot.warning else []), *notes]
    described = model_rows(snapshot.state, snapshot.spec, f"{snapshot.weights}, {snapshot.weights_path.name}")
    rows = {"layout": f"diffusers, for {pipeline}" if pipeline else layout} | described
    recipe = (run / RECIPE).read_text() if (run / RECIPE).is_file() else ""
    card = model_card(snapshot.spec.name, rows, is_pipeline=bool(pipeline), notes=notes, recipe=recipe)
    out.parent.mkdir(parents=True, exist_ok=True)
    sweep_strays(out.parent)
    if not write_folder(out, itertools.chain(files, [(CARD, card)]), replace=False):
        raise RunError(f"folder '{out}': another process created it. Give another --out.")
    return {
        "snapshot": snapshot.path.name,
        "step": snapshot.step,
        "weights": snapshot.weights,
        "format": kind,
        "pipeline": pipeline,
        "files": sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()),
        "notes": notes,
        "out": str(out),
    }


# ------------------------------------------------------------------------------------------------------------- checks


def fitting_layout(run: Path) -> Layout | None:
    """The layout that holds the newest snapshot of a run: diffusers' if it does, else the official one; None: neither.

    Raises: IndexError: there is no snapshot.
    """
    state = read_json(find(SNAPSHOT, run)[-1] / STATE)
    spec, objective = ModelSpec.model_validate(state["spec"]), ObjectiveSection.model_validate(state["objective"])
    with contextlib.suppress(RunError):
        if not spec.adapter:
            check_diffusers(spec, objective, state)
        return "diffusers"
    with contextlib.suppress(RunError):
        check_official(spec, encoders=False)
        return "official"
    return None


def check_official(spec: ModelSpec, *, encoders: bool) -> None:
    """Raise if the official layout of DiT cannot hold the model.

    Raises: RunError.
    """
    if family_of(spec.name):
        raise RunError(f"model '{spec.name}': the official layout is DiT's. Use --format diffusers.")
    if encoders:
        raise RunError("--encoders: the official layout is of the model alone. Use --format diffusers.")


def check_diffusers(spec: ModelSpec, objective: ObjectiveSection, state: dict[str, Any]) -> None:
    """Raise if diffusers' class cannot hold the model, or its pipeline cannot draw with it.

    Raises: RunError.
    """
    family, problem, instead = family_of(spec.name), "", "Load its weights from the snapshot."
    changed = [name for name, value in spec.options if value != getattr(DiTOptions(), name)]
    if family == "sd3":
        encoders = text_encoders(state)
        kinds = [encoders[text.name]["model"].get("kind") for text in spec.texts]
        if kinds != SD3_KINDS or spec.texts[-1].width != spec.caption_width:
            problem = (
                f"it reads captions of {', '.join(map(str, kinds))}, StableDiffusion3Pipeline of two clips and a t5 at "
                "least as wide as both"
            )
        elif objective.kind != "flow":
            problem = (
                f"it was trained with objective.kind = '{objective.kind}', StableDiffusion3Pipeline draws flows alone"
            )
    elif family:
        if (kind := state["text_encoder"]["model"]["kind"]) not in TEXT_CLASSES:
            problem = (
                f"it reads captions of a '{kind}', and diffusers' pipelines for it only those of "
                f"{' or '.join(TEXT_CLASSES)}"
            )
    else:
        instead = "Use --format official, which holds every DiT exactly."
        if spec.takes_text:
            problem = "it takes captions, diffusers' DiT only labels"
        elif changed:
            option = f"model.{changed[0]} = {getattr(spec.options, changed[0])!r}"
            problem = f"it was trained with {option}, which diffusers' DiT does not support"
        elif spec.class_width or spec.fused:
            problem = "diffusers' DiT has no class token and no routed tokens"
        elif spec.num_classes > NULL_LABEL:
            problem = (
                f"it has {spec.num_classes} classes, DiTPipeline takes {NULL_LABEL} at most, since its null is label "
                f"{NULL_LABEL}"
            )
    if problem:
        raise RunError(f"model '{spec.name}': {problem}. {instead}")


# -------------------------------------------------------------------------------------------------------------- files


def official_files(snapshot: Snapshot) -> Files:
    """The model alone, for ``model.init_from`` and for the trainers of DiT."""
    name = snapshot.spec.name.replace("/", "-")
    for suffix in (".safetensors", ".pt"):
        yield f"{name}{suffix}", official_bytes(snapshot.model.state_dict(), suffix)


def diffusers_files(snapshot: Snapshot, copies: Mapping[str, Path]) -> Files:
    """The files of a pipeline's folder.

    Args:
      copies: folders of encoders by their names in the pipeline.
    """
    scheduler = pipeline_scheduler(snapshot.objective, takes_flow_match=family_of(snapshot.spec.name) in FLOW_PIPELINES)
    config, weights = transformer_of(snapshot)
    yield TRANSFORMER[0], canonical_json(config)
    yield TRANSFORMER[1], safetensors_of({name: t.contiguous() for name, t in weights.items()}, {"format": "pt"})
    yield "scheduler/scheduler_config.json", scheduler.to_json_string().encode()
    yield "model_index.json", canonical_json(index_of(snapshot, type(scheduler).__name__, copies))
    for name, folder in copies.items():
        left_out = NO_TOKENIZER if name.startswith("tokenizer") else ()
        for path in sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)}):
            if ".fp16." not in path.name and not any(map(path.match, left_out)):
                yield f"{name}/{path.name}", _parts_of(path)


def _parts_of(path: Path) -> Iterator[bytes]:
    """The content of a file that may be larger than memory."""
    with open(path, "rb") as file:
        while part := file.read(PART_BYTES):
            yield part


def tokenizer_class(folder: Path) -> str | None:
    """The class that a tokenizer's folder names, if any."""
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else None
    name = config.get("tokenizer_class") if isinstance(config, dict) else None
    return name if isinstance(name, str) and name.isidentifier() else None


def transformer_of(snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and weights of diffusers' class."""
    from diffusers import __version__ as diffusers_version

    model, spec = snapshot.model, snapshot.spec
    weights = {name.removeprefix("net."): t.detach().cpu() for name, t in model.state_dict().items()}
    if not isinstance(model, DiTDenoiser):
        config = {key: value for key, value in model.net.config.items() if not key.startswith("_")}
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
    return {"_class_name": transformer_name(snapshot), "_diffusers_version": diffusers_version, **config}, weights


def index_of(snapshot: Snapshot, scheduler: str, copies: Mapping[str, Path]) -> dict[str, Any]:
    """``model_index.json``: the pipeline, and the class of each part.

    Args:
      copies: folders of encoders by their names in the index.
    """
    from diffusers import __version__ as diffusers_version

    spec = snapshot.spec
    parts: dict[str, Any] = {
        "transformer": ["diffusers", transformer_name(snapshot)],
        "scheduler": ["diffusers", scheduler],
    }
    parts["vae"] = ["diffusers", vae_class(snapshot)]
    if spec.takes_text:
        for suffix, made in text_parts(snapshot).items():
            encoder, tokenizer = (SD3_CLASSES if spec.texts else TEXT_CLASSES)[made["model"]["kind"]]
            folder = copies.get(f"tokenizer{suffix}")
            tokenizer = (folder and tokenizer_class(folder)) or tokenizer
            parts[f"text_encoder{suffix}"] = ["transformers", encoder]
            parts[f"tokenizer{suffix}"] = ["transformers", tokenizer]
    else:
        parts["id2label"] = {str(number): name for number, name in enumerate(snapshot.class_names.names)}
    return {"_class_name": pipeline_class(snapshot), "_diffusers_version": diffusers_version, **parts}


def transformer_name(snapshot: Snapshot) -> str:
    """diffusers' class of the transformer."""
    model = snapshot.model
    return "DiTTransformer2DModel" if isinstance(model, DiTDenoiser) else type(model.net).__name__


def text_parts(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """The text encoders by the ends of their names in a pipeline's folder: "", then "_2", "_3"."""
    encoders = text_encoders(snapshot.state)
    ordered = [encoders[one.name] for one in snapshot.spec.texts] or list(encoders.values())[:1]
    return {f"_{number}" if number > 1 else "": one for number, one in enumerate(ordered, start=1)}


def encoder_folders(snapshot: Snapshot, vae_place: str | None, text_place: str | None) -> dict[str, Path]:
    """Folders of the store's encoders, by their names in a pipeline's folder.

    Args:
      vae_place, text_place: their current location, if they have moved.
    Raises: EncoderError: one cannot be found, or did not make the store.
    """
    from ...precompute.config import TextSection, VaeSection
    from ...precompute.encoders import model_files as files

    vae, texts = snapshot.state["vae"], text_parts(snapshot) if snapshot.spec.takes_text else {}
    moved = {name: {"model": place} if place else {} for name, place in (("vae", vae_place), ("text", text_place))}
    wanted: list[tuple[str, VaeSection | TextSection, str, str, str]] = []
    try:
        section = VaeSection.model_validate(vae["model"] | moved["vae"])
        wanted.append(("vae", section, section.subfolder, files.VAE_WEIGHTS, vae["weights_sha256"]))
        for suffix, text in texts.items():
            section = TextSection.model_validate(text["model"] | moved["text"])
            made_with = text["weights_sha256"]
            wanted.append((f"text_encoder{suffix}", section, section.subfolder, files.TEXT_WEIGHTS, made_with))
            wanted.append((f"tokenizer{suffix}", section, section.tokenizer_subfolder, "", UNKNOWN))
    except (ValidationError, TypeError) as error:
        raise EncoderError(f"snapshot '{snapshot.path}': it does not name its encoders ({error}).") from error
    folders: dict[str, Path] = {}
    for name, section, subfolder, stem, made_with in wanted:
        what, role = f"--encoders: {name}", "vae" if name == "vae" else "text"
        names = (files.CONFIG, *files.weight_names(stem)) if stem else files.TOKENIZER_FILES
        try:
            with contextlib.nullcontext() if moved[role] else files.nothing_fetched():
                folder, _ = files.resolve_model(section.model, subfolder, section.revision, files=names, what=what)
            weights = files.hash_files(files.weight_files(folder, stem, what=what)) if stem else UNKNOWN
        except EncoderError as error:
            raise EncoderError(f"{error} If it is in another folder, give it with --{role}.") from error
        if made_with not in (UNKNOWN, weights):
            raise EncoderError(f"{what} '{folder}': not the one that made the store. Check --{role}.")
        folders[name] = folder
    return folders
