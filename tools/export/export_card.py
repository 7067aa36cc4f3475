"""The model card of an export: which pipeline loads it, and how that pipeline differs from leandit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ... import __version__
from ...datasets.format.schema import IMPORTED, LatentSpec
from ...precompute.encoders.text.instructions import instruction_text
from ...train.models.diffusers_models.families import family_of
from ...train.models.spec import ModelSpec
from ...train.objective_recipe import ObjectiveSection
from ...train.sampling.snapshot import Snapshot, text_encoders
from .card import cell, fenced, table

Format = Literal["diffusers", "official"]
Files = Iterator[tuple[str, Any]]

CARD = "README.md"
SANA_VAE = "AutoencoderDC"
FLOW_PIPELINES = ("sana", "sd3")  # families whose pipelines take schedulers of flows
SD3_TOKENS = (77, 77, 256)  # of each caption, in StableDiffusion3Pipeline
NULL_LABEL = 1000  # DiTPipeline gives its models this label for null, however many classes they have


def pipeline_class(snapshot: Snapshot) -> str:
    """The pipeline of diffusers that samples from the model."""
    family = family_of(snapshot.spec.name)
    if family is None:
        return "DiTPipeline"
    if family == "sana":
        return "SanaPipeline"
    if family == "sd3":
        return "StableDiffusion3Pipeline"
    return "PixArtAlphaPipeline" if snapshot.spec.takes_sizes else "PixArtSigmaPipeline"


def vae_class(snapshot: Snapshot) -> str:
    """Class of the store's VAE; for imported stores, which do not know it, the pipeline's default."""
    default = SANA_VAE if family_of(snapshot.spec.name) == "sana" else "AutoencoderKL"
    known = snapshot.state["vae"].get("class_name", default)
    return default if known.startswith(IMPORTED) else known


def departures(snapshot: Snapshot) -> list[str]:
    """Differences between the pipeline and leandit; one note each."""
    spec, notes = snapshot.spec, list[str]()
    if family_of(spec.name) is None:
        notes.append(
            "diffusers' class embeds the time otherwise than DiT does, so its output differs from the trained model's; "
            "the official layout is exact."
        )
        if spec.num_classes < NULL_LABEL:
            notes.append(
                f"The label table has {NULL_LABEL} rows before null's, as DiTPipeline needs; those from "
                f"{spec.num_classes} on are copies of null's."
            )
    if snapshot.objective.kind == "flow" and family_of(spec.name) not in FLOW_PIPELINES:
        notes.append(
            "It samples with DPM-Solver++ over the flow's noise levels, rounded to whole times, where leandit takes "
            "Euler's steps: the same noise gives another picture."
        )
    if family_of(spec.name) == "sana":
        if vae_class(snapshot) != SANA_VAE:
            notes.append(f"SanaPipeline takes an {SANA_VAE}, the store was made with an {vae_class(snapshot)}.")
        notes.append(instruction_note(snapshot))
    if spec.texts:
        notes += sd3_notes(snapshot)
    elif not is_plainly_scaled(snapshot.latent):
        notes.append(
            "The latents are shifted, or scaled by channel; the pipeline divides by scaling_factor alone. Take its "
            'latents (output_type="latent"), and decode scale and shift yourself.'
        )
    if snapshot.latent.decoding and snapshot.latent.decoding.zero_to_one:
        notes.append("The VAE gives pictures from 0 to 1, where the pipeline takes them from -1 to 1. Decode yourself.")
    if snapshot.text is not None and spec.takes_text and not spec.texts:
        notes.append(
            f"Trained with {snapshot.text.max_tokens} caption tokens at most: give max_sequence_length="
            f"{snapshot.text.max_tokens}. In training, null has the mask of the caption that it replaces; the "
            "pipeline's has its own."
        )
        notes.append(
            "The pipeline makes prompts lower case, and PixArt's cleans them unless clean_caption=False; captions were "
            "encoded as they are. For theirs give prompt_embeds and prompt_attention_mask."
        )
    return notes


def sd3_notes(snapshot: Snapshot) -> list[str]:
    """Differences between StableDiffusion3Pipeline and leandit."""
    notes, tokens = list[str](), tuple(one.tokens for one in snapshot.spec.texts)
    both = [snapshot.latent] if snapshot.latent.decoding is None else [snapshot.latent, snapshot.latent.decoding]
    if any(len(set(each.shift)) > 1 or len(set(each.scale)) > 1 for each in both):
        notes.append(
            "The latents are shifted or scaled by channel; the pipeline has one shift_factor and one scaling_factor. "
            'Take its latents (output_type="latent"), and decode scale and shift yourself.'
        )
    if tokens[:2] != SD3_TOKENS[:2]:
        notes.append(
            f"Trained with {tokens[0]} and {tokens[1]} CLIP tokens; the pipeline has the model_max_length of its "
            "tokenizer for both. For others give prompt_embeds and pooled_prompt_embeds."
        )
    if tokens[2] != SD3_TOKENS[2]:
        notes.append(f"Trained with {tokens[2]} T5 tokens: give max_sequence_length={tokens[2]}.")
    return notes


def is_plainly_scaled(latent: LatentSpec) -> bool:
    """Whether the latents have one scale and no shift, which is all that the pipelines undo."""
    both = [latent] if latent.decoding is None else [latent, latent.decoding]
    return all(not any(each.shift) and len(set(each.scale)) == 1 for each in both)


def instruction_note(snapshot: Snapshot) -> str:
    """The instruction for SanaPipeline; its default is another text than Sana was trained with."""
    text = instruction_text(snapshot.state["text_encoder"]["model"].get("instruction", ""))
    lines = json.dumps(text.split("\n")) if text else None
    return (
        f"Captions were encoded behind {'this' if text else 'no'} instruction: give complex_human_instruction={lines}."
    )


def with_card(files: Files, snapshot: Snapshot, layout: Format, notes: list[str], recipe: str | None) -> Files:
    """The files, then the model card."""
    yield from files
    yield CARD, card(snapshot, layout, notes, recipe).encode()


def card(snapshot: Snapshot, layout: Format, notes: list[str], recipe: str | None) -> str:
    """The model card. What a run says of itself becomes text, never markup."""
    described = {"layout": layout if layout == "official" else f"diffusers, for {pipeline_class(snapshot)}"}
    described |= model_rows(snapshot.state, snapshot.spec, f"{snapshot.weights}, {snapshot.weights_path.name}")
    head = "---\nlibrary_name: diffusers\n---\n\n" if layout == "diffusers" else ""
    note_lines = "".join(f"\n- {cell(note)}" for note in notes)
    trained = f"\n## Recipe\n\n{fenced('toml', recipe)}" if recipe else ""
    return (
        f"{head}# {cell(snapshot.spec.name)}\n\nTrained and exported with leandit {__version__}.\n\n{table(described)}"
        f"{note_lines + chr(10) if note_lines else ''}{trained}"
    )


def model_rows(state: Mapping[str, Any], spec: ModelSpec, weights: str) -> dict[str, Any]:
    """Rows of a card: the model, its training and its encoders.

    Args:
      state: of the snapshot.
      weights: which they are, and the name of their folder.
    """
    described = {
        "model": spec.name,
        "weights": weights,
        "steps": state["step"],
        "objective": objective_words(state["objective"]),
        "root hash of the store": ", ".join(map(str, state.get("root_hashes") or [None])),
        "VAE": f"{state['vae']['model'].get('model')}, weights {state['vae']['weights_sha256']}",
    }
    if spec.adapter:
        frozen = state["frozen"]
        described["adapters of"] = (
            f"{frozen['source']}, weights {frozen['xxh3_128']}, rank {spec.adapter.rank}, alpha {spec.adapter.alpha:g}"
        )
    if average := state.get("average"):
        described["length of the average"] = f"{average['length']:g} of the run"
    if spec.takes_text:
        for name, text in text_encoders(state).items():
            described[f"text encoder {name}".strip()] = (
                f"{text['model'].get('model')}, weights {text['weights_sha256']}"
            )
    else:
        described["classes"] = len(state["classes"])
    return described


def objective_words(objective: Mapping[str, Any]) -> str:
    """The kind of an objective, and its settings that are not the defaults."""
    usual = ObjectiveSection().model_dump()
    changed = [f"{key} {value}" for key, value in objective.items() if key != "kind" and value != usual.get(key)]
    return ", ".join([str(objective["kind"]), *changed])
