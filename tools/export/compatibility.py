"""Which pipeline of diffusers draws with a model, and how it differs from leandit."""

from __future__ import annotations

import json

from ...datasets.format.schema import IMPORTED
from ...precompute.encoders.text.instructions import instruction_text
from ...train.models.diffusers.families import family_of
from ...train.sampling.snapshot import Snapshot

SANA_VAE = "AutoencoderDC"
FLOW_PIPELINES = ("sana", "sd3")  # families whose pipelines take schedulers of flows
SD3_TOKENS = (77, 77, 256)  # of each caption, in StableDiffusion3Pipeline
NULL_LABEL = 1000  # DiTPipeline gives its models this label for null, however many classes they have
PIPELINES = {None: "DiTPipeline", "sana": "SanaPipeline", "sd3": "StableDiffusion3Pipeline"}  # by family


def pipeline_class(snapshot: Snapshot) -> str:
    """The pipeline of diffusers that samples from the model."""
    pixart = "PixArtAlphaPipeline" if snapshot.spec.takes_sizes else "PixArtSigmaPipeline"
    return PIPELINES.get(family_of(snapshot.spec.name), pixart)


def vae_class(snapshot: Snapshot) -> str:
    """Class of the store's VAE; for imported stores, which do not know it, the pipeline's default."""
    default = SANA_VAE if family_of(snapshot.spec.name) == "sana" else "AutoencoderKL"
    known = snapshot.state["vae"].get("class_name", default)
    return default if known.startswith(IMPORTED) else known


def compatibility_notes(snapshot: Snapshot) -> list[str]:
    """Differences between the pipeline and leandit, one note each."""
    spec, family, latent, notes = snapshot.spec, family_of(snapshot.spec.name), snapshot.latent, list[str]()
    if family is None:
        notes.append(
            "diffusers' class embeds the time otherwise than DiT does, so its output differs from the trained model's; "
            "the official layout is exact."
        )
        if spec.num_classes < NULL_LABEL:
            notes.append(
                f"The label table has {NULL_LABEL} rows before null's, as DiTPipeline needs; those from "
                f"{spec.num_classes} on are copies of null's."
            )
    if snapshot.objective.kind == "flow" and family not in FLOW_PIPELINES:
        notes.append(
            "It samples with DPM-Solver++ over the flow's noise levels, rounded to whole times, where leandit takes "
            "Euler's steps: the same noise gives another picture."
        )
    if family == "sana":
        if vae_class(snapshot) != SANA_VAE:
            notes.append(f"SanaPipeline takes an {SANA_VAE}, the store was made with an {vae_class(snapshot)}.")
        # The pipeline's default is another text than Sana was trained with.
        text = instruction_text(snapshot.state["text_encoder"]["model"].get("instruction", ""))
        lines = json.dumps(text.split("\n")) if text else None
        which = "this" if text else "no"
        notes.append(f"Captions were encoded behind {which} instruction: give complex_human_instruction={lines}.")
    scalings = [latent] if latent.decoding is None else [latent, latent.decoding]
    if spec.texts:
        if any(len(set(one.shift)) > 1 or len(set(one.scale)) > 1 for one in scalings):
            notes.append(
                "The latents are shifted or scaled by channel; the pipeline has one shift_factor and one "
                'scaling_factor. Take its latents (output_type="latent"), and decode scale and shift yourself.'
            )
        tokens = tuple(one.tokens for one in spec.texts)
        if tokens[:2] != SD3_TOKENS[:2]:
            notes.append(
                f"Trained with {tokens[0]} and {tokens[1]} CLIP tokens; the pipeline has the model_max_length of its "
                "tokenizer for both. For others give prompt_embeds and pooled_prompt_embeds."
            )
        if tokens[2] != SD3_TOKENS[2]:
            notes.append(f"Trained with {tokens[2]} T5 tokens: give max_sequence_length={tokens[2]}.")
    elif any(any(one.shift) or len(set(one.scale)) > 1 for one in scalings):
        notes.append(
            "The latents are shifted, or scaled by channel; the pipeline divides by scaling_factor alone. Take its "
            'latents (output_type="latent"), and decode scale and shift yourself.'
        )
    if latent.decoding and latent.decoding.zero_to_one:
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
