"""Which pipeline of diffusers draws with a model, what a layout cannot hold, and how a pipeline differs from ours."""

from __future__ import annotations

import json
from typing import Any

from ...datasets.format.schema import IMPORTED
from ...precompute.encoders.autoencoders import FAMILIES as AUTOENCODERS
from ...precompute.encoders.text.instructions import instruction_text
from ...train.models.build import FAMILIES, family_of, patch_of, takes_guidance
from ...train.models.diffusers.model import Normalisation
from ...train.models.dit_dh import is_dit_dh
from ...train.models.spec import DiTOptions, ModelSpec
from ...train.sampling.snapshot import Snapshot, resolution_of, text_encoders
from ...train.techniques.registry import ObjectiveSection
from ...train.weights.folders import SNAPSHOT
from .decoding import decoder_settings, trains_as_the_vae_does

SD3_TOKENS = (77, 77, 256)  # of each caption, in StableDiffusion3Pipeline
NULL_LABEL = 1000  # DiTPipeline gives its models this label for null, however many classes they have


def pipeline_class(snapshot: Snapshot) -> str:
    """The pipeline of diffusers that samples from the model."""
    family = family_of(snapshot.spec.name)
    return FAMILIES[family].pipeline(snapshot.spec) if family else "DiTPipeline"


def vae_class(snapshot: Snapshot) -> str:
    """Class of the store's VAE; for imported stores, which do not know it, the pipeline's default."""
    family = family_of(snapshot.spec.name)
    default = FAMILIES[family].vae if family else "AutoencoderKL"
    recorded = snapshot.state["vae"].get("class_name", default)
    return default if recorded.startswith(IMPORTED) else recorded


def decoded_normalisation(snapshot: Snapshot) -> Normalisation:
    """What the pipeline undoes before the VAE decodes."""
    family = family_of(snapshot.spec.name)
    return FAMILIES[family].normalisation if family else "scale"


def text_parts(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """The text encoders by the ends of their names in a pipeline's folder: "", then "_2", "_3"."""
    encoders = text_encoders(snapshot.state)
    ordered = [encoders[one.name] for one in snapshot.spec.texts] or list(encoders.values())[:1]
    return {f"_{number}" if number > 1 else "": one for number, one in enumerate(ordered, start=1)}


def loads_adapters(snapshot: Snapshot) -> bool:
    """Whether diffusers' pipeline loads adapters. PixArt's and its transformer do not; peft does."""
    return hasattr(type(getattr(snapshot.model, "net", None)), "load_lora_adapter")


def drawn_tokens(spec: ModelSpec, state: dict[str, Any]) -> int:
    """Side, in tokens, of the square image that a model was trained on, which is drawn by default.

    Args:
      state: of the snapshot.
    """
    return drawn_side(state) // patch_of(spec)


def drawn_side(state: dict[str, Any]) -> int:
    """Side of that image, in latent pixels."""
    return resolution_of(state) // state["latent"]["downscale"]


def obstacle(layout: str, spec: ModelSpec, objective: ObjectiveSection, state: dict[str, Any]) -> str:
    """Why a layout cannot hold a model, or its pipeline cannot draw with it, and what to do; empty: it can."""
    family = family_of(spec.name)
    advice = "Load its weights from the snapshot."
    if layout == "official":
        problem = _official_problem(spec, state)
        if family:
            advice = "Use --format diffusers."
    elif family:
        problem = _pipeline_problem(family, spec, objective, state)
    else:
        problem = _dit_pipeline_problem(spec, state)
        if not _official_problem(spec, state):
            advice = "Use --format official, which holds every DiT exactly."
    return f"model '{spec.name}': {problem}. {advice}" if problem else ""


def _official_problem(spec: ModelSpec, state: dict[str, Any]) -> str:
    """Why the layout of DiT's code cannot hold a model; empty: it can."""
    if family_of(spec.name):
        return "the official layout is DiT's"
    drawn, learned = drawn_tokens(spec, state), spec.base_size // patch_of(spec)
    if drawn != learned and (is_dit_dh(spec.name) or spec.options.positions == "rope"):
        return (
            f"it was trained on {drawn} tokens a side with rotary positions that span {learned}, which the official "
            "layout does not record"
        )
    return ""


def _pipeline_problem(family: str, spec: ModelSpec, objective: ObjectiveSection, state: dict[str, Any]) -> str:
    """Why the pipeline of a model of diffusers cannot draw with it; empty: it can."""
    model, encoders = FAMILIES[family], text_encoders(state)
    pipeline = model.pipeline(spec)
    read = [encoders[text.name] for text in spec.texts] or list(encoders.values())[:1]
    kinds = [encoder["model"].get("kind") for encoder in read]
    fits = len(kinds) == len(model.text_classes) and all(
        kind in part for kind, part in zip(kinds, model.text_classes, strict=True)
    )
    if not fits or (spec.texts and spec.texts[-1].width != spec.caption_width):
        expected = " and ".join(" or ".join(part) for part in model.text_classes)
        widths = ", the last at least as wide as the others" if len(kinds) > 1 else ""
        return f"it reads captions of {', '.join(map(str, kinds))}, {pipeline} those of {expected}{widths}"
    if objective.kind != "flow" and spec.texts:
        return f"it was trained with objective.kind = '{objective.kind}', {pipeline} samples only flow models"
    return ""


def _dit_pipeline_problem(spec: ModelSpec, state: dict[str, Any]) -> str:
    """Why diffusers' class and pipeline of DiT cannot hold a model of ours; empty: they can."""
    if is_dit_dh(spec.name):
        return "diffusers has no class for it"
    if spec.takes_text:
        return "it takes captions, diffusers' DiT only labels"
    if changed := [name for name, value in spec.options if value != getattr(DiTOptions(), name)]:
        option = f"model.{changed[0]} = {getattr(spec.options, changed[0])!r}"
        return f"it was trained with {option}, which diffusers' DiT does not support"
    if spec.class_width or spec.fused:
        return "diffusers' DiT has no class token and no routed tokens"
    drawn, learned = drawn_tokens(spec, state), spec.base_size // patch_of(spec)
    if drawn != learned:
        return (
            f"it was trained on {drawn} tokens a side with positions that span {learned}, diffusers' DiT has one "
            "number for both"
        )
    if spec.num_classes > NULL_LABEL:
        most = f"{NULL_LABEL} at most, since its null is label {NULL_LABEL}"
        return f"it has {spec.num_classes} classes, DiTPipeline takes {most}"
    return ""


def adapter_notes(snapshot: Snapshot) -> list[str]:
    """How adapters are loaded, and onto what."""
    load = 'pipeline.load_lora_weights("FOLDER")'
    if not loads_adapters(snapshot):
        load = 'pipeline.transformer = PeftModel.from_pretrained(pipeline.transformer, "FOLDER").merge_and_unload()'
    source, weights_hash = snapshot.state["frozen"]["source"], snapshot.state["frozen"]["xxh3_128"]
    onto = f"{pipeline_class(snapshot)} with the weights of '{source}' (hash {weights_hash})"
    notes = [f"Adapters for {onto}, in float32: {load}"]
    run, _, step = source.rpartition(f"/{SNAPSHOT}-")
    if problem := obstacle("diffusers", snapshot.spec, snapshot.objective, snapshot.state):
        notes.append(f"No pipeline draws with them: {problem}")
    elif run and step.isdecimal():
        notes.append(
            f"These weights are a run's, which diffusers and peft do not read: 'leandit export {run} --step {step} "
            "--out FOLDER' makes the pipeline that the adapters are loaded into"
        )
    return notes


def compatibility_notes(snapshot: Snapshot, *, has_vae: bool = False) -> list[str]:
    """Differences between the pipeline and leandit, one note each.

    Args:
      has_vae: the VAE is exported too, with a config that decodes the run's latents.
    """
    spec, family, notes = snapshot.spec, family_of(snapshot.spec.name), list[str]()
    if family is None:
        notes.append(
            "diffusers' class embeds the time differently from DiT, so its output differs from the trained model's; "
            "the official layout is exact."
        )
        if spec.num_classes < NULL_LABEL:
            notes.append(
                f"The label table has {NULL_LABEL} rows before null's, as DiTPipeline needs; those from "
                f"{spec.num_classes} on are copies of null's."
            )
    if snapshot.objective.kind == "flow" and not (family and FAMILIES[family].samples_flows):
        notes.append(
            "It samples with DPM-Solver++ over the flow's noise levels, rounded to whole timesteps, where leandit "
            "takes Euler's steps: the same noise gives another image."
        )
    if family == "sana":
        if vae_class(snapshot) != FAMILIES[family].vae:
            notes.append(f"SanaPipeline takes an AutoencoderDC, the store was made with an {vae_class(snapshot)}.")
        # The pipeline's default is another text than Sana was trained with.
        text = instruction_text(snapshot.state["text_encoder"]["model"].get("instruction", ""))
        lines = json.dumps(text.split("\n")) if text else None
        which = "this" if text else "no"
        notes.append(f"Captions were encoded after {which} instruction: pass complex_human_instruction={lines}.")
    notes += _size_notes(snapshot)
    if not has_vae:
        notes += _decoding_notes(snapshot)
    if family and FAMILIES[family].is_flow:
        if (vae := vae_class(snapshot)) != FAMILIES[family].vae:
            notes.append(f"{pipeline_class(snapshot)} takes an {FAMILIES[family].vae}, the store was made with {vae}.")
        most = snapshot.text.max_tokens if snapshot.text else 0
        if spec.texts:
            most = spec.texts[-1].tokens
        notes.append(
            f"Pass max_sequence_length={most}, as in training; for leandit's steps, "
            "sigmas=numpy.linspace(1, pipeline.scheduler.sigma_min, STEPS)."
        )
        if pipeline_class(snapshot) != "Flux2Pipeline":  # which takes the guidance as an input alone
            notes.append(f"For leandit's --guidance G pass {FAMILIES[family].guidance_argument}.")
        if takes_guidance(spec):
            notes.append(
                f"Trained with the guidance {spec.guidance:g} as an input: pass guidance_scale={spec.guidance:g}."
            )
        return notes
    if spec.texts:
        tokens = tuple(one.tokens for one in spec.texts)
        if tokens[:2] != SD3_TOKENS[:2]:
            notes.append(
                f"Trained with {tokens[0]} and {tokens[1]} CLIP tokens; the pipeline has the model_max_length of its "
                "tokenizer for both. For others pass prompt_embeds and pooled_prompt_embeds."
            )
        if tokens[2] != SD3_TOKENS[2]:
            notes.append(f"Pass max_sequence_length={tokens[2]}, as in training.")
    if snapshot.text is not None and spec.takes_text and not spec.texts:
        most = snapshot.text.max_tokens
        notes.append(
            f"Pass max_sequence_length={most}, as in training. There, the null caption has the "
            "mask of the caption that it replaces; the pipeline's has its own."
        )
        notes.append(
            "The pipeline makes prompts lower case, and PixArt's cleans them unless clean_caption=False; captions were "
            "encoded as they are. For theirs pass prompt_embeds and prompt_attention_mask."
        )
    return notes


def _size_notes(snapshot: Snapshot) -> list[str]:
    """The size to pass to a pipeline that would draw another than the model was trained on, or has no table for it."""
    family = family_of(snapshot.spec.name)
    if family is None:
        return []
    resolution_px, notes = resolution_of(snapshot.state), list[str]()
    if FAMILIES[family].drawn_px not in (0, resolution_px):
        notes.append(
            f"Trained at {resolution_px} px; the pipeline draws {FAMILIES[family].drawn_px} px by default: pass "
            f"height={resolution_px}, width={resolution_px}."
        )
    sides = FAMILIES[family].binned_sides
    if sides and drawn_side(snapshot.state) not in sides:
        notes.append("The pipeline has no table of sizes for this resolution: pass use_resolution_binning=False.")
    return notes


def _decoding_notes(snapshot: Snapshot) -> list[str]:
    """What a VAE that is loaded into the pipeline needs to decode the latents of this run."""
    latent, normalisation = snapshot.latent, decoded_normalisation(snapshot)
    settings, notes = decoder_settings(latent, normalisation), list[str]()
    if settings is None and not (
        normalisation == "batch norm" and trains_as_the_vae_does(latent, snapshot.state["vae"])
    ):
        undone = {
            "scale": "divides by scaling_factor alone",
            "scale and shift": "has one shift_factor and one scaling_factor",
            "mean and std": "has a mean and a deviation by channel",
            "batch norm": "undoes the batch norm of its VAE alone",
        }
        notes.append(
            f"The latents are shifted, or scaled by channel; the pipeline {undone[normalisation]}. Request its latents "
            '(output_type="latent"), then undo scale and shift and decode yourself.'
        )
    elif settings is not None and not trains_as_the_vae_does(latent, snapshot.state["vae"]):
        arguments = ", ".join(f"{key}={value}" for key, value in settings.items())
        notes.append(
            "This run scales its latents by other numbers than its VAE's config may have: before drawing, call "
            f"pipeline.vae.register_to_config({arguments})."
        )
    autoencoder = AUTOENCODERS.get(snapshot.state["vae"].get("class_name", ""))
    if (latent.decoding and latent.decoding.zero_to_one) or (autoencoder and autoencoder.zero_to_one):
        notes.append("The VAE returns images from 0 to 1, where the pipeline expects -1 to 1. Decode yourself.")
    return notes
