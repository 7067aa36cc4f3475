"""Which pipeline of diffusers draws with a model, what a layout cannot hold, and how a pipeline differs from ours."""

from __future__ import annotations

import json
from typing import Any

from ...datasets.format.schema import IMPORTED
from ...precompute.encoders.text.instructions import instruction_text
from ...train.models.build import FAMILIES, family_of
from ...train.models.dit_dh import is_dit_dh
from ...train.models.spec import DiTOptions, ModelSpec
from ...train.sampling.snapshot import Snapshot, text_encoders
from ...train.techniques.registry import ObjectiveSection
from ...train.weights.folders import SNAPSHOT

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
    known = snapshot.state["vae"].get("class_name", default)
    return default if known.startswith(IMPORTED) else known


def text_parts(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """The text encoders by the ends of their names in a pipeline's folder: "", then "_2", "_3"."""
    encoders = text_encoders(snapshot.state)
    ordered = [encoders[one.name] for one in snapshot.spec.texts] or list(encoders.values())[:1]
    return {f"_{number}" if number > 1 else "": one for number, one in enumerate(ordered, start=1)}


def loads_adapters(snapshot: Snapshot) -> bool:
    """Whether diffusers' pipeline loads adapters. PixArt's and its transformer do not; peft does."""
    return hasattr(type(getattr(snapshot.model, "net", None)), "load_lora_adapter")


def obstacle(layout: str, spec: ModelSpec, objective: ObjectiveSection, state: dict[str, Any]) -> str:
    """Why a layout cannot hold a model, or its pipeline cannot draw with it, and what to do; empty: it can."""
    family, problem, instead = family_of(spec.name), "", "Load its weights from the snapshot."
    changed = [name for name, value in spec.options if value != getattr(DiTOptions(), name)]
    if layout == "official":
        problem, instead = "the official layout is DiT's" if family else "", "Use --format diffusers."
    elif family:
        model, encoders = FAMILIES[family], text_encoders(state)
        pipeline = model.pipeline(spec)
        read = [encoders[text.name] for text in spec.texts] or list(encoders.values())[:1]
        kinds = [encoder["model"].get("kind") for encoder in read]
        fits = len(kinds) == len(model.text_classes) and all(
            kind in part for kind, part in zip(kinds, model.text_classes, strict=True)
        )
        if not fits or (spec.texts and spec.texts[-1].width != spec.caption_width):
            known = " and ".join(" or ".join(part) for part in model.text_classes)
            problem = f"it reads captions of {', '.join(map(str, kinds))}, {pipeline} those of {known}"
            problem += ", the last at least as wide as the others" if len(kinds) > 1 else ""
        elif objective.kind != "flow" and spec.texts:
            problem = f"it was trained with objective.kind = '{objective.kind}', {pipeline} samples only flow models"
    else:
        instead = "Use --format official, which holds every DiT exactly."
        if is_dit_dh(spec.name):
            problem = "diffusers has no class for it"
        elif spec.takes_text:
            problem = "it takes captions, diffusers' DiT only labels"
        elif changed:
            option = f"model.{changed[0]} = {getattr(spec.options, changed[0])!r}"
            problem = f"it was trained with {option}, which diffusers' DiT does not support"
        elif spec.class_width or spec.fused:
            problem = "diffusers' DiT has no class token and no routed tokens"
        elif spec.num_classes > NULL_LABEL:
            most = f"{NULL_LABEL} at most, since its null is label {NULL_LABEL}"
            problem = f"it has {spec.num_classes} classes, DiTPipeline takes {most}"
    return f"model '{spec.name}': {problem}. {instead}" if problem else ""


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


def compatibility_notes(snapshot: Snapshot) -> list[str]:
    """Differences between the pipeline and leandit, one note each."""
    spec, family, latent, notes = snapshot.spec, family_of(snapshot.spec.name), snapshot.latent, list[str]()
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
    if family and FAMILIES[family].is_flow:
        if (vae := vae_class(snapshot)) != FAMILIES[family].vae:
            notes.append(f"{pipeline_class(snapshot)} takes an {FAMILIES[family].vae}, the store was made with {vae}.")
        most = spec.texts[-1].tokens if spec.texts else snapshot.text.max_tokens if snapshot.text else 0
        notes.append(
            f"Pass max_sequence_length={most}, as in training; for leandit's steps, "
            "sigmas=numpy.linspace(1, pipeline.scheduler.sigma_min, STEPS)."
        )
        if spec.config.get("guidance_embeds"):
            notes.append(
                f"Trained with the guidance {spec.guidance:g} as an input: pass guidance_scale={spec.guidance:g}."
            )
        return notes
    scalings = [latent] if latent.decoding is None else [latent, latent.decoding]
    decode = 'Request its latents (output_type="latent"), then undo scale and shift and decode yourself.'
    if spec.texts:
        if any(len(set(one.shift)) > 1 or len(set(one.scale)) > 1 for one in scalings):
            notes.append(
                "The latents are shifted or scaled by channel; the pipeline has one shift_factor and one "
                f"scaling_factor. {decode}"
            )
        tokens = tuple(one.tokens for one in spec.texts)
        if tokens[:2] != SD3_TOKENS[:2]:
            notes.append(
                f"Trained with {tokens[0]} and {tokens[1]} CLIP tokens; the pipeline has the model_max_length of its "
                "tokenizer for both. For others pass prompt_embeds and pooled_prompt_embeds."
            )
        if tokens[2] != SD3_TOKENS[2]:
            notes.append(f"Pass max_sequence_length={tokens[2]}, as in training.")
    elif any(any(one.shift) or len(set(one.scale)) > 1 for one in scalings):
        notes.append(
            f"The latents are shifted, or scaled by channel; the pipeline divides by scaling_factor alone. {decode}"
        )
    if latent.decoding and latent.decoding.zero_to_one:
        notes.append("The VAE returns images from 0 to 1, where the pipeline expects -1 to 1. Decode yourself.")
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
