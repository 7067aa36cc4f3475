"""A tiny model of every family, and inputs for it."""

from __future__ import annotations

import torch
from torch import Tensor

from leandit.datasets.batches.captions import Captions
from leandit.train.models.conditioning import Conditioning, Extras
from leandit.train.models.spec import DiTOptions, ModelSpec, ProjectorSpec, TextInput

CAPTION_WIDTH = 6
POOLED_WIDTH = 5
JOINED_TOKENS = 7  # of a model that reads padding
CHANNELS = 4
LABELS = ModelSpec(name="DiT-S/2", channels=CHANNELS, out_channels=8, num_classes=3, caption_width=0, base_size=8)
CAPTIONED = LABELS.model_copy(
    update={"num_classes": 0, "caption_width": CAPTION_WIDTH, "out_channels": CHANNELS, "name": "pixart-tiny"}
)
TEXT = TextInput(name="", tokens=JOINED_TOKENS, width=CAPTION_WIDTH)
POOLED_TEXT = TEXT.model_copy(update={"pooled_width": POOLED_WIDTH})
EVERYTHING = {  # that a recipe can add to a DiT
    "options": DiTOptions(qk_norm=True, norm="rms", mlp="swiglu", positions="both", value_residual=True),
    "fused": (2, 2),
    "projectors": {
        "dinov2": ProjectorSpec(block=1, width=16, feature_width=10, has_class=True),
        "clip": ProjectorSpec(block=1, width=16, feature_width=10, kind="conv"),
    },
}
FAMILY_SPECS: dict[str, ModelSpec] = {
    "dit": LABELS,
    "dit-captions": CAPTIONED.model_copy(update={"name": "DiT-S/2"}),
    "dit-everything": CAPTIONED.model_copy(update={"name": "DiT-S/2"} | EVERYTHING),
    "dit-dh": LABELS.model_copy(update={"name": "DiTDH-S/1", "out_channels": CHANNELS}),
    "pixart": CAPTIONED,
    "sana": CAPTIONED.model_copy(update={"name": "sana-tiny"}),
    "sd3": CAPTIONED.model_copy(update={"name": "sd3-tiny", "texts": (POOLED_TEXT,)}),
    "flux1": CAPTIONED.model_copy(update={"name": "flux1-tiny", "texts": (POOLED_TEXT,)}),
    "flux2": CAPTIONED.model_copy(update={"name": "flux2-tiny", "texts": (TEXT,)}),
    "qwen-image": CAPTIONED.model_copy(update={"name": "qwen-image-tiny"}),
    "z-image": CAPTIONED.model_copy(update={"name": "z-image-tiny"}),
}


def conditioning_of(spec: ModelSpec, *lengths: int) -> Conditioning:
    """Labels, or captions of so many tokens where the model reads valid tokens alone."""
    count = len(lengths)
    if not spec.takes_text:
        return Conditioning(labels=torch.arange(count) % spec.num_classes)
    if spec.texts:
        pooled = torch.randn(count, POOLED_WIDTH) if spec.pooled_width else None
        return Conditioning(captions=torch.randn(count, JOINED_TOKENS, CAPTION_WIDTH), pooled=pooled)
    return Conditioning(captions=Captions.of([torch.randn(length, CAPTION_WIDTH) for length in lengths]))


def inputs_of(
    spec: ModelSpec, *lengths: int, size: tuple[int, int] = (8, 8)
) -> tuple[Tensor | Conditioning | Extras, ...]:
    """The arguments of a forward of so many images as there are lengths of captions."""
    count = len(lengths)
    inputs = (torch.randn(count, CHANNELS, *size), torch.full((count,), 500.0), conditioning_of(spec, *lengths))
    if not spec.projectors:
        return inputs
    return *inputs, Extras(class_token=torch.randn(count, spec.class_width), projected=None)
